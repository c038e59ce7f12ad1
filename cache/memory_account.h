// What tensor code takes of host memory while it runs, counted at each allocation, and a limit on it that is
// kept: the allocation that would go beyond it is refused before it is made. So a guess at what a computation
// takes can be tried, and never overshoots what was promised for it.
//
//   auto account = MemoryAccount::Open();
//   account->set_limit(promised);
//   {
//     MemoryAccount::Scope scope(account);
//     ... tensor code ...  // StatusError PROMISE_EXCEEDED where it wants more
//   }
//   account->peak_bytes();
//
// Memory belongs to the account under which it was allocated until it is freed, wherever and by whom. What
// threads of LibTorch's own allocate inside of an operation is not seen; operations allocate on the thread
// that calls them.
//
// Thread-safe.
#ifndef LATENTD_CACHE_MEMORY_ACCOUNT_H_
#define LATENTD_CACHE_MEMORY_ACCOUNT_H_

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>

#include "absl/status/status.h"

namespace latentd {

class MemoryAccount : public std::enable_shared_from_this<MemoryAccount> {
 public:
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

  static std::shared_ptr<MemoryAccount> Open();

  // This thread's tensors are allocated under the account, from construction to its end. The innermost
  // counts.
  class Scope {
   public:
    explicit Scope(std::shared_ptr<MemoryAccount> account);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const std::shared_ptr<MemoryAccount> account_;
    MemoryAccount* const outer_;
  };

  int64_t bytes() const { return bytes_; }      // now
  int64_t peak_bytes() const { return peak_; }  // the most at a time, since the last ForgetPeak
  void ForgetPeak() { peak_ = bytes_.load(); }
  // What would have been in use with the allocation that was refused last: that much is needed at least. 0:
  // none was refused.
  int64_t refused_at() const { return refused_at_; }

  void set_limit(int64_t bytes) { limit_ = bytes; }

  // Takes memory that was allocated under some account out of it: it is promised elsewhere from now on.
  // `data` is what a tensor's storage begins with; other addresses change nothing.
  static void Exempt(const void* data);

  // Lets accounts see LibTorch's allocations. Scope does it where it was not done; before other threads
  // compute is the better time.
  static void Install();

 private:
  friend class AccountingAllocator;
  MemoryAccount() = default;
  // False when that would be beyond the limit.
  bool Charge(int64_t bytes);
  void Give(int64_t bytes) { bytes_ -= bytes; }

  std::atomic<int64_t> bytes_ = 0, peak_ = 0, refused_at_ = 0, limit_ = kNoLimit;
};

// True for the error of an allocation beyond an account's limit.
bool IsPromiseExceeded(const absl::Status& status);

}  // namespace latentd

#endif  // LATENTD_CACHE_MEMORY_ACCOUNT_H_
