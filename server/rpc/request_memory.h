// Bytes of requests that are on their way in, and of answers that wait to be read: of all clients together.
//
// They are limited on their own, and large ones are also charged to the host's budget where that has room
// (chunks of uploads are not large: the upload has promised itself their bytes). Where it has none they are
// let in all the same, up to the limit: a server whose memory is full must still be able to hear "cancel".
//
// Thread-safe. Must outlive its charges.
#ifndef LATENTD_SERVER_RPC_REQUEST_MEMORY_H_
#define LATENTD_SERVER_RPC_REQUEST_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "cache/memory_budget.h"

namespace latentd {

class RequestMemory {
 public:
  // What is larger is charged to the budget.
  static constexpr int64_t kLarge = 2 << 20;

  // Move-only; gives its bytes back when it ends.
  class Charge {
   public:
    Charge() = default;
    Charge(Charge&& other) noexcept { *this = std::move(other); }
    Charge& operator=(Charge&& other) noexcept;
    ~Charge() { Release(); }
    int64_t bytes() const { return bytes_; }
    void Release();

   private:
    friend class RequestMemory;
    RequestMemory* memory_ = nullptr;
    int64_t bytes_ = 0;
    Reservation reservation_;
  };

  // `budget` may be null.
  RequestMemory(int64_t limit, MemoryBudget* budget) : limit_(limit), budget_(budget) {}

  // Nothing when the limit is reached. `owner` and `what` are for the budget's accounts.
  std::optional<Charge> Take(int64_t bytes, const std::string& owner, const std::string& what);

  int64_t bytes() const { return bytes_; }
  int64_t limit() const { return limit_; }
  // Grows by what was taken, ever.
  int64_t taken_ever() const { return taken_ever_; }

 private:
  const int64_t limit_;
  MemoryBudget* const budget_;
  std::atomic<int64_t> bytes_ = 0;
  std::atomic<int64_t> taken_ever_ = 0;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_REQUEST_MEMORY_H_
