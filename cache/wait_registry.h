// Who waits for memory, over all budgets that belong together, and the mutex of those budgets.
//
// An owner can hold bytes of one budget while it waits in another, or while it waits for a load that itself
// waits for memory. Only a view of all waits tells who may go on and who cannot (wait_analysis.h). So that
// there is such a view, budgets that belong together share a mutex, and a count that moves with everything
// that happens to them: a decision holds as long as the count stands.
//
// Thread-safe. Lock order: the cache's mutex may be held while anything here is called, except Look().
#ifndef LATENTD_CACHE_WAIT_REGISTRY_H_
#define LATENTD_CACHE_WAIT_REGISTRY_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cache/base/mutex.h"
#include "cache/wait_analysis.h"

namespace latentd {

class MemoryBudget;

class WaitRegistry {
 public:
  // A wait for somebody's work, from construction to its end. The waits of requests to a budget are the
  // budgets' own matter.
  class Entry {
   public:
    // `what` is waited for, which `worker` is doing.
    Entry(std::shared_ptr<WaitRegistry> registry, const std::string& owner, std::string what,
          const std::string& worker);
    ~Entry() { Over(); }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

    // The owner waits no more, from now on and not only from the end of this object: called together with
    // what ends the wait, under the same mutex, so that nobody takes one who can go on for one who waits.
    void Over();

   private:
    const std::shared_ptr<WaitRegistry> registry_;
    const uint64_t id_;
  };

  bool Waits(const std::string& owner) const;
  // Of all kinds, now. For tests.
  size_t size() const { return static_cast<size_t>(waiting_.load()); }

  // Not 0 when it was looked at how things are now, and found that everybody who waits for a budget has to:
  // until somebody does something, nothing happens. Another number when something happened since. For tests.
  uint64_t Settled() const;

  // Something happened elsewhere that may let a waiter go on: a holder let go. Cheap when nobody waits.
  void LookAgain();

 private:
  friend class MemoryBudget;

  struct Wait {
    WaitView view;
    std::string what;
    const MemoryBudget* budget = nullptr;  // of a request, which has a thread that sleeps here
    CondVar* wake = nullptr;
    bool awake = true;
  };

  uint64_t Enter(Wait wait) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Leave(uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Something changed. One of those who sleep looks at it, and wakes those whom it concerns.
  void Moved() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Wake(uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Sleeps until woken or `until`. REQUIRES: `analysis` is of how things are, and says that `id` has to wait.
  void Sleep(uint64_t id, const WaitAnalysis& analysis, absl::Time until) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Join(MemoryBudget* budget);
  void Quit(MemoryBudget* budget);

  // What all budgets and waits look like at one moment. Null when something moved meanwhile.
  std::shared_ptr<const WaitAnalysis> Look(uint64_t seen) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int IndexOf(const MemoryBudget* budget) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // "session-1 waits for …; …", oldest first; for error messages.
  std::string Say(const std::vector<uint64_t>& ids) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;  // of the budgets, too
  uint64_t next_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t moved_ ABSL_GUARDED_BY(mu_) = 0;
  std::atomic<int64_t> waiting_ = 0;  // size of waits_
  std::map<uint64_t, Wait> waits_ ABSL_GUARDED_BY(mu_);
  int64_t awake_ ABSL_GUARDED_BY(mu_) = 0;  // requests whose threads do not sleep
  std::vector<MemoryBudget*> budgets_ ABSL_GUARDED_BY(mu_);
  uint64_t analysed_ ABSL_GUARDED_BY(mu_) = 0;  // the state that analysis_ is of
  std::shared_ptr<const WaitAnalysis> analysis_ ABSL_GUARDED_BY(mu_);
};

}  // namespace latentd

#endif  // LATENTD_CACHE_WAIT_REGISTRY_H_
