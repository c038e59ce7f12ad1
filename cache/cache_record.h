// The inside of a record. For the files of ModelCache alone.
#ifndef LATENTD_CACHE_CACHE_RECORD_H_
#define LATENTD_CACHE_CACHE_RECORD_H_

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cache/base/greedy_dual.h"
#include "cache/model_cache.h"
#include "cache/wait_registry.h"

namespace latentd {

// Bytes of records that are out of the index and not yet free. Outlives the cache where a pointer does.
struct LeavingBytes {
  Mutex mu;  // taken after the cache's and before a budget's
  int64_t bytes ABSL_GUARDED_BY(mu) = 0;
};

// A resource with its promise: the pointers that are handed out share one of these, so the bytes are counted
// exactly as long as anybody can reach them.
struct Accounted {
  Reservation memory;
  std::shared_ptr<const Resource> resource;
  std::shared_ptr<const void> base;       // an earlier copy, whose tensors this one took over
  std::shared_ptr<LeavingBytes> leaving;  // of a record; null for a copy on a device
  bool left = false;                      // guarded by leaving->mu: counted there

  ~Accounted() {
    resource = nullptr;  // the memory is free before its promise is given back
    if (leaving == nullptr) return;
    MutexLock lock(&leaving->mu);
    if (left) leaving->bytes -= memory.bytes();
    memory.Release();
  }

  static std::shared_ptr<const Resource> Pointer(const std::shared_ptr<Accounted>& accounted) {
    return std::shared_ptr<const Resource>(accounted, accounted->resource.get());
  }
};

// Who holds something, one entry per lock. Short, so that looking through it is the fastest way.
class Holders {
 public:
  struct Holder {
    std::string owner;
    bool lasting = false;  // LockOptions::lasting
    uint64_t number = 0;   // tells the locks of one owner apart: some may last, and others not any more
  };

  bool empty() const { return holders_.empty(); }
  size_t size() const { return holders_.size(); }
  // Returns the lock's number.
  uint64_t Add(const std::string& owner, bool lasting) {
    holders_.push_back({owner, lasting, ++added_});
    return added_;
  }
  void Remove(uint64_t number) {
    const auto it =
        std::find_if(holders_.begin(), holders_.end(), [&](const Holder& h) { return h.number == number; });
    if (it == holders_.end()) return;
    std::swap(*it, holders_.back());
    holders_.pop_back();
  }
  void WillEnd(const std::string& owner) {
    for (Holder& holder : holders_) holder.lasting &= holder.owner != owner;
  }
  bool lasting() const {
    return std::any_of(holders_.begin(), holders_.end(), [](const Holder& h) { return h.lasting; });
  }
  const std::vector<Holder>& all() const { return holders_; }

  // One for each lock, sorted.
  std::vector<std::string> Owners() const {
    std::vector<std::string> owners;
    owners.reserve(holders_.size());
    for (const Holder& holder : holders_) owners.push_back(holder.owner);
    std::sort(owners.begin(), owners.end());
    return owners;
  }

 private:
  std::vector<Holder> holders_;
  uint64_t added_ = 0;
};

// Those who wait for somebody's work. Guarded by the cache's mutex.
class Waiting {
 public:
  void Add(WaitRegistry::Entry* entry) { entries_.push_back(entry); }
  // False when its wait was over already.
  bool Remove(WaitRegistry::Entry* entry) { return std::erase(entries_, entry) != 0; }
  // From here on nobody of them waits, whenever their threads get to run.
  void Over() {
    for (WaitRegistry::Entry* entry : entries_) entry->Over();
    entries_.clear();
  }

 private:
  std::vector<WaitRegistry::Entry*> entries_;
};

// A record's copy on a device that does not use host memory.
struct Residency {
  std::shared_ptr<const Resource> copy;  // null while nothing is there; counts itself
  int64_t bytes = 0;
  std::vector<bool> resident;  // by block
  Holders holders;
  uint64_t turn = 0;            // of the promise that the copy's last bytes came from
  bool moving_in = false;       // somebody works on it; whoever else wants it waits
  std::string mover;            // who that is
  bool waits_for_room = false;  // and that somebody waits for memory
  Waiting waiting;

  void LetGoOfMemory() {
    copy = nullptr;
    bytes = 0;
    resident.clear();
  }
};

struct CacheRecord {
  ModelKey key;
  std::string kind;
  MemoryUse use = MemoryUse::kWeights;
  int64_t bytes = 0;
  double load_seconds = 0;
  std::vector<std::string> sources;
  std::shared_ptr<const Resource> resource;  // shares an Accounted

  // The rest is guarded by ModelCache::mu_, and changed through RecordIndex.
  std::weak_ptr<Accounted> accounted;
  std::set<std::string> names;  // Loader::name of all who asked for it
  Holders holders;
  std::map<Device*, Residency> residency;
  GreedyDual::Worth worth;
  absl::Time last_used;
  uint64_t turn = 0;  // of the promise of its bytes
  bool indexed = false;
  size_t slot = 0;    // RecordIndex's
  uint64_t look = 0;  // RecordIndex's

  double cost() const { return GreedyDual::Cost(load_seconds, bytes); }
};

}  // namespace latentd

#endif  // LATENTD_CACHE_CACHE_RECORD_H_
