#include "server/rpc/request_memory.h"

#include <gtest/gtest.h>

namespace latentd {
namespace {

TEST(RequestMemory, GivesUpToItsLimitAndTakesBack) {
  RequestMemory memory(100, nullptr);
  auto first = memory.Take(60, "a", "b");
  ASSERT_TRUE(first);
  EXPECT_FALSE(memory.Take(41, "a", "b"));
  EXPECT_EQ(memory.bytes(), 60);
  RequestMemory::Charge moved = *std::move(first);
  EXPECT_EQ(moved.bytes(), 60);
  moved = RequestMemory::Charge();
  EXPECT_EQ(memory.bytes(), 0);
  EXPECT_TRUE(memory.Take(100, "a", "b"));
}

TEST(RequestMemory, IsChargedToTheBudgetWhereThatHasRoom) {
  constexpr int64_t kBytes = RequestMemory::kLarge + 1;
  RamBudget ram(kBytes * 3 / 2);
  RequestMemory memory(10 * kBytes, &ram);
  auto fits = memory.Take(kBytes, "a", "b");
  EXPECT_EQ(ram.stats().reserved_bytes, kBytes);
  auto small = memory.Take(RequestMemory::kLarge / 10, "a", "b");
  EXPECT_EQ(ram.stats().reserved_bytes, kBytes);
  auto beyond = memory.Take(kBytes, "a", "b");
  EXPECT_TRUE(beyond) << "what is within its own limit is let in";
  EXPECT_EQ(ram.stats().reserved_bytes, kBytes);
  fits->Release();
  EXPECT_EQ(ram.stats().reserved_bytes, 0);
}

}  // namespace
}  // namespace latentd
