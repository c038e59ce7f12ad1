// Who waits for memory of which budget, and how urgent that is: so that work of lower priority that is parked
// between two slices can let go of what it holds there.
//
// Thread-safe. Its mutex is taken last.
#ifndef LATENTD_SERVER_RUNTIME_MEMORY_WANTS_H_
#define LATENTD_SERVER_RUNTIME_MEMORY_WANTS_H_

#include <atomic>
#include <list>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "cache/base/mutex.h"

namespace latentd {

class MemoryWants {
 public:
  // A want, from construction to its end.
  class Want {
   public:
    Want(MemoryWants* wants, std::string budget, int priority) : wants_(wants) {
      MutexLock lock(&wants_->mu_);
      here_ = wants_->list_.insert(wants_->list_.end(), {std::move(budget), priority});
      ++wants_->count_;
    }
    ~Want() {
      MutexLock lock(&wants_->mu_);
      wants_->list_.erase(here_);
      --wants_->count_;
    }
    Want(const Want&) = delete;
    Want& operator=(const Want&) = delete;

   private:
    MemoryWants* const wants_;
    std::list<std::pair<std::string, int>>::iterator here_;
  };

  // Whether somebody of a higher priority wants memory of the budget of that name.
  bool Above(int priority, absl::string_view budget) const {
    if (count_ == 0) return false;
    MutexLock lock(&mu_);
    for (const auto& [name, wanted] : list_) {
      if (name == budget && wanted > priority) return true;
    }
    return false;
  }

 private:
  mutable Mutex mu_;
  std::atomic<int> count_ = 0;
  std::list<std::pair<std::string, int>> list_ ABSL_GUARDED_BY(mu_);
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_MEMORY_WANTS_H_
