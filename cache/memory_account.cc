#include "cache/memory_account.h"

#include <array>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "c10/core/CPUAllocator.h"
#include "cache/base/error.h"
#include "cache/base/mutex.h"
#include "cache/weights/weight_stream.h"

namespace latentd {
namespace {

constexpr char kReason[] = "PROMISE_EXCEEDED";

thread_local MemoryAccount* current = nullptr;

// Blocks that belong to an account. Most do not, so that a look into an empty part costs no lock.
class Blocks {
 public:
  struct Owner {
    std::shared_ptr<MemoryAccount> account;
    int64_t bytes = 0;
  };

  void Add(const void* block, Owner owner) {
    Part& part = PartOf(block);
    MutexLock lock(&part.mu);
    part.blocks[block] = std::move(owner);
    ++part.count;
  }
  // Empty when it belongs to nobody.
  Owner Take(const void* block) {
    Part& part = PartOf(block);
    if (part.count == 0) return {};
    MutexLock lock(&part.mu);
    auto it = part.blocks.find(block);
    if (it == part.blocks.end()) return {};
    Owner owner = std::move(it->second);
    part.blocks.erase(it);
    --part.count;
    return owner;
  }

 private:
  struct Part {
    Mutex mu;
    absl::flat_hash_map<const void*, Owner> blocks ABSL_GUARDED_BY(mu);
    std::atomic<int64_t> count = 0;  // whoever frees a block has seen it being added
  };
  Part& PartOf(const void* block) {
    return parts_[(reinterpret_cast<uintptr_t>(block) >> 12) % parts_.size()];
  }

  std::array<Part, 16> parts_;
};

Blocks& AllBlocks() {
  static auto& blocks = *new Blocks();
  return blocks;
}

}  // namespace

// LibTorch's allocator with the books kept. What it gives is what LibTorch's own gives, so that each can free
// the other's.
class AccountingAllocator : public c10::Allocator {
 public:
  static AccountingAllocator& Get() {
    static auto& allocator = *new AccountingAllocator();
    return allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    MemoryAccount* const account = current;
    const auto n = static_cast<int64_t>(bytes);
    if (account == nullptr || n == 0) return Ours(real_->allocate(bytes));
    if (!account->Charge(n)) {
      throw StatusError(
          MakeError(absl::StatusCode::kResourceExhausted, kReason,
                    absl::StrCat("a computation takes ", account->refused_at(), " bytes at least; ",
                                 account->limit_.load(), " are promised for it"),
                    {{"needed_bytes", absl::StrCat(account->refused_at())},
                     {"promised_bytes", absl::StrCat(account->limit_.load())}}));
    }
    c10::DataPtr data;
    try {
      data = Ours(real_->allocate(bytes));
    } catch (...) {
      account->Give(n);
      throw;
    }
    AllBlocks().Add(data.get(), {account->shared_from_this(), n});
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // For whoever has other ideas of an owner.
  static void Forget(const void* block) {
    const Blocks::Owner owner = AllBlocks().Take(block);
    if (owner.account != nullptr) owner.account->Give(owner.bytes);
  }

 private:
  static c10::DataPtr Ours(c10::DataPtr data) {
    const c10::Device device = data.device();
    void* const block = data.release_context();
    return {block, block, &Free, device};
  }
  static void Free(void* block) {
    if (block == nullptr) return;
    Forget(block);
    Get().real_->raw_deleter()(block);
  }

  c10::Allocator* const real_ = c10::GetCPUAllocator();
};

std::shared_ptr<MemoryAccount> MemoryAccount::Open() {
  return std::shared_ptr<MemoryAccount>(new MemoryAccount());
}

bool MemoryAccount::Charge(int64_t bytes) {
  const int64_t now = bytes_ += bytes;
  if (now > limit_) {
    bytes_ -= bytes;
    refused_at_ = now;
    return false;
  }
  int64_t peak = peak_;
  while (now > peak && !peak_.compare_exchange_weak(peak, now)) {
  }
  return true;
}

void MemoryAccount::Exempt(const void* data) { AccountingAllocator::Forget(data); }

void MemoryAccount::Install() {
  // Higher than LibTorch's own, lower than what a test puts in its place.
  constexpr uint8_t kPriority = 50;
  static const bool once = [] {
    c10::SetCPUAllocator(&AccountingAllocator::Get(), kPriority);
    return true;
  }();
  static_cast<void>(once);
}

MemoryAccount::Scope::Scope(std::shared_ptr<MemoryAccount> account)
    : account_(std::move(account)), outer_(current) {
  Install();
  current = account_.get();
}

MemoryAccount::Scope::~Scope() { current = outer_; }

bool IsPromiseExceeded(const absl::Status& status) { return ErrorReason(status) == kReason; }

}  // namespace latentd
