// Calls whose answers were handed to gRPC and not sent yet: cancels those that their clients do not read.
#ifndef LATENTD_SERVER_RPC_ANSWER_WATCH_H_
#define LATENTD_SERVER_RPC_ANSWER_WATCH_H_

#include <functional>
#include <map>
#include <mutex>

#include "absl/time/time.h"

namespace latentd {

// Thread-safe.
class AnswerWatch {
 public:
  // `cancel` is called at most once, by Tick, between Add and Remove. `call` is the caller's own name for it.
  void Add(const void* call, absl::Time now, std::function<void()> cancel) {
    std::lock_guard lock(mu_);
    calls_[call] = {now, std::move(cancel)};
  }
  void Remove(const void* call) {
    std::lock_guard lock(mu_);
    calls_.erase(call);
  }

  // Cancels what is older than `limit`.
  void Tick(absl::Time now, absl::Duration limit) {
    std::lock_guard lock(mu_);
    while (true) {
      auto late = calls_.begin();
      while (late != calls_.end() && now - late->second.since <= limit) ++late;
      if (late == calls_.end()) return;
      const std::function<void()> cancel = std::move(late->second.cancel);
      calls_.erase(late);
      cancel();
    }
  }

 private:
  struct Call {
    absl::Time since;
    std::function<void()> cancel;
  };
  // gRPC may end a call, which is then removed, in the thread that cancels it. Held meanwhile, so that nobody
  // else ends it.
  std::recursive_mutex mu_;
  std::map<const void*, Call> calls_;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_ANSWER_WATCH_H_
