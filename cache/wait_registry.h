// Who waits for memory, over all budgets that belong together.
//
// An owner can hold bytes of one budget while it waits in another, or while it waits for a load that itself
// waits for memory. Only a view of all waits tells whether a wait can end; and one order over all of them
// tells whose request is the newest and is to be refused when none can.
//
// Thread-safe. Lock order: an Entry wakes all budgets when it begins and ends, so none of their mutexes may be
// held then; the cache's may.
#ifndef LATENTD_CACHE_WAIT_REGISTRY_H_
#define LATENTD_CACHE_WAIT_REGISTRY_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/mutex.h"

namespace latentd {

class WaitRegistry {
 public:
  // A wait, from construction to its end.
  class Entry {
   public:
    // `what` is waited for. `refusable`: the wait is a request to a budget, which can be refused; else it is
    // for somebody's work.
    Entry(std::shared_ptr<WaitRegistry> registry, const std::string& owner, std::string what, bool refusable)
        : registry_(std::move(registry)), id_(registry_->Enter(owner, std::move(what), refusable)) {}
    ~Entry() {
      Over();
      registry_->WakeAll();
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

    // The owner waits no more, from now on and not only from the end of this object: called together with
    // what ends the wait, under the same mutex, so that nobody takes one who can go on for one who waits.
    // Wakes nobody.
    void Over() { registry_->Leave(id_); }

    // True when all of `owners` wait, and no refusable wait began after this one: both at one moment, for one
    // who begins to wait between two looks would be seen by the second alone.
    bool NewestWhileAllWait(const std::set<std::string>& owners) const {
      return registry_->NewestWhileAllWait(id_, owners);
    }

   private:
    const std::shared_ptr<WaitRegistry> registry_;
    const uint64_t id_;
  };

  bool Waits(const std::string& owner) const {
    MutexLock lock(&mu_);
    return WaitsLocked(owner);
  }

  // "session-1 waits for …", oldest first; for error messages.
  std::vector<std::string> List() const {
    MutexLock lock(&mu_);
    std::vector<std::string> list;
    for (const auto& [id, wait] : waits_) list.push_back(absl::StrCat(wait.owner, " waits for ", wait.what));
    return list;
  }

  // `wake` is called, without a lock, whenever a wait begins or ends. Returns a number for Unsubscribe.
  uint64_t Subscribe(std::function<void()> wake) {
    MutexLock lock(&mu_);
    wakes_[++next_] = std::make_shared<std::function<void()>>(std::move(wake));
    return next_;
  }
  void Unsubscribe(uint64_t id) {
    MutexLock lock(&mu_);
    wakes_.erase(id);
  }

 private:
  struct Wait {
    std::string owner;
    std::string what;
    bool refusable;
  };

  uint64_t Enter(const std::string& owner, std::string what, bool refusable) {
    uint64_t id = 0;
    {
      MutexLock lock(&mu_);
      id = ++next_;
      waits_[id] = {owner, std::move(what), refusable};
    }
    WakeAll();
    return id;
  }
  void Leave(uint64_t id) {
    MutexLock lock(&mu_);
    waits_.erase(id);
  }
  bool WaitsLocked(const std::string& owner) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return std::any_of(waits_.begin(), waits_.end(), [&](const auto& w) { return w.second.owner == owner; });
  }
  bool NewestWhileAllWait(uint64_t id, const std::set<std::string>& owners) const {
    MutexLock lock(&mu_);
    for (auto it = waits_.upper_bound(id); it != waits_.end(); ++it) {
      if (it->second.refusable) return false;
    }
    return std::all_of(owners.begin(), owners.end(),
                       [&](const std::string& o) ABSL_SHARED_LOCKS_REQUIRED(mu_) { return WaitsLocked(o); });
  }
  void WakeAll() {
    std::vector<std::shared_ptr<std::function<void()>>> wakes;
    {
      MutexLock lock(&mu_);
      for (const auto& [id, wake] : wakes_) wakes.push_back(wake);
    }
    for (const auto& wake : wakes) (*wake)();
  }

  mutable Mutex mu_;
  uint64_t next_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, Wait> waits_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, std::shared_ptr<std::function<void()>>> wakes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace latentd

#endif  // LATENTD_CACHE_WAIT_REGISTRY_H_
