#include "cache/memory_account.h"

#include <thread>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/weights/weight_stream.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

constexpr int64_t kFloats = 1000, kBytes = 4 * kFloats;

at::Tensor Floats(int64_t n = kFloats) { return at::empty({n}, at::kFloat); }

TEST(MemoryAccount, CountsWhatIsAllocatedUnderItUntilItIsFreed) {
  const at::Tensor before = Floats();
  auto account = MemoryAccount::Open();
  at::Tensor kept;
  {
    MemoryAccount::Scope scope(account);
    kept = Floats();
    const at::Tensor another = Floats(2 * kFloats);
    EXPECT_EQ(account->bytes(), 3 * kBytes);
  }
  EXPECT_EQ(account->bytes(), kBytes);
  EXPECT_EQ(account->peak_bytes(), 3 * kBytes);
  const at::Tensor after = Floats();
  EXPECT_EQ(account->bytes(), kBytes) << "the scope is over";
  std::thread([&] { kept.reset(); }).join();
  EXPECT_EQ(account->bytes(), 0) << "freed by another thread, outside of the scope";
  EXPECT_EQ(account->peak_bytes(), 3 * kBytes);
}

TEST(MemoryAccount, TheInnermostScopeCountsAndThreadsHaveTheirOwn) {
  auto outer = MemoryAccount::Open(), inner = MemoryAccount::Open();
  MemoryAccount::Scope scope(outer);
  const at::Tensor first = Floats();
  {
    MemoryAccount::Scope nested(inner);
    const at::Tensor second = Floats();
    EXPECT_EQ(inner->bytes(), kBytes);
    std::thread([&] { EXPECT_TRUE(Floats().defined()); }).join();
  }
  const at::Tensor third = Floats();
  EXPECT_EQ(outer->bytes(), 2 * kBytes);
  EXPECT_EQ(inner->peak_bytes(), kBytes);
  EXPECT_EQ(inner->bytes(), 0);
}

TEST(MemoryAccount, RefusesWhatIsBeyondItsLimitBeforeItIsAllocated) {
  auto account = MemoryAccount::Open();
  account->set_limit(2 * kBytes);
  MemoryAccount::Scope scope(account);
  at::Tensor first = Floats();
  EXPECT_EQ(account->refused_at(), 0);
  try {
    Floats(kFloats + 1);
    FAIL() << "it was allocated";
  } catch (const StatusError& e) {
    EXPECT_TRUE(IsPromiseExceeded(e.status())) << e.status();
    EXPECT_EQ(GetErrorDetails(e.status())["needed_bytes"], absl::StrCat(2 * kBytes + 4));
    EXPECT_EQ(GetErrorDetails(e.status())["promised_bytes"], absl::StrCat(2 * kBytes));
  }
  EXPECT_EQ(account->refused_at(), 2 * kBytes + 4);
  EXPECT_EQ(account->bytes(), kBytes) << "what was refused is not counted";
  EXPECT_EQ(account->peak_bytes(), kBytes);
  const at::Tensor fits = Floats();
  EXPECT_EQ(account->bytes(), 2 * kBytes);
  // Inside of an operation that has begun.
  EXPECT_THROW(at::matmul(at::ones({1, 1}), at::ones({1, kFloats})), StatusError);
  account->set_limit(MemoryAccount::kNoLimit);
  EXPECT_TRUE(Floats().defined());
}

TEST(MemoryAccount, WhatIsExemptIsSomebodyElses) {
  auto account = MemoryAccount::Open();
  MemoryAccount::Scope scope(account);
  at::Tensor tensor = Floats(), other = Floats();
  MemoryAccount::Exempt(tensor.storage().data());
  MemoryAccount::Exempt(tensor.storage().data());
  MemoryAccount::Exempt(nullptr);
  EXPECT_EQ(account->bytes(), kBytes);
  tensor.reset();
  EXPECT_EQ(account->bytes(), kBytes) << "taken off once";
  other.reset();
  EXPECT_EQ(account->bytes(), 0);
}

TEST(MemoryAccount, MemoryOutlivesTheHandleOfItsAccount) {
  at::Tensor tensor;
  {
    auto account = MemoryAccount::Open();
    MemoryAccount::Scope scope(account);
    tensor = Floats();
  }
  tensor.reset();
  SUCCEED();
}

// What grows in place, and what LibTorch's libraries ask for by the raw interface.
TEST(MemoryAccount, SeesResizesAndRawAllocations) {
  auto account = MemoryAccount::Open();
  MemoryAccount::Scope scope(account);
  at::Tensor tensor = Floats(1);
  tensor.resize_({kFloats});
  EXPECT_EQ(account->bytes(), kBytes);
  c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::CPU);
  void* const raw = allocator->raw_allocate(kBytes);
  EXPECT_EQ(account->bytes(), 2 * kBytes);
  allocator->raw_deallocate(raw);
  EXPECT_EQ(account->bytes(), kBytes);
}

}  // namespace
}  // namespace latentd
