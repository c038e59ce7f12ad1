// Memory that is only thought of: a snapshot of a cache, on which a job is gone through as it would go
// through the cache itself. Keeps what is where and who holds it. What is admitted and refused, what goes,
// and what of a record comes to a device, is decided by the code by which the cache decides
// (cache/admission.h, eviction_order.h, residency_choice.h, load_set.h).
//
// Nobody else does anything meanwhile: what a job would have to wait for is refused, with the numbers that
// the job would be told at the end of its wait. Memory that was being freed when the snapshot was made is
// free.
//
// One thread at a time.
#ifndef LATENTD_SERVER_RUNTIME_IMAGINED_MEMORY_H_
#define LATENTD_SERVER_RUNTIME_IMAGINED_MEMORY_H_

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache/admission.h"
#include "cache/base/greedy_dual.h"
#include "cache/cache_stats.h"
#include "cache/eviction_order.h"
#include "cache/model_cache.h"
#include "cache/residency_choice.h"

namespace latentd {

class ImaginedMemory {
 public:
  // Something that was not there.
  struct Load {
    ModelKey key;
    std::string kind;
    int64_t bytes = 0;
    std::vector<std::string> names;  // as of RecordStats
  };
  // Something that went to make room.
  struct Eviction {
    ModelKey key;
    std::string kind;
    int64_t bytes = 0;
    std::string device;  // that the copy went off; empty: out of host memory
    std::vector<std::string> names;
  };
  // A lock on a record on a device.
  struct OnDevice {
    ModelKey key;
    std::string device;
    ResidencyPlan plan;
    int64_t full_bytes = 0;
    int64_t working_bytes = 0;
  };

  // `seconds_to_load`: of a record of so many bytes of a kind, which is its worth to the cache.
  ImaginedMemory(const CacheStats& stats,
                 std::function<double(const std::string& kind, int64_t bytes)> seconds_to_load);
  ImaginedMemory(const ImaginedMemory&) = delete;
  ImaginedMemory& operator=(const ImaginedMemory&) = delete;

  // Devices are named as in CacheStats::devices. Any other name, or none, is the host's memory.

  // As MemoryBudget::Reserve and the end of that promise.
  absl::Status Promise(const std::string& device, int64_t bytes, const std::string& what);
  void GiveBack(const std::string& device, int64_t bytes);

  // As of ModelCache. Errors: those of a budget, of one who may not wait.
  absl::Status Lock(const LockRequest& request) { return LockAll({&request, 1}); }
  // The same where it is known that the record takes `bytes` of those that are promised for its load.
  absl::Status Lock(const LockRequest& request, int64_t bytes);
  absl::Status LockAll(absl::Span<const LockRequest> requests);
  bool TryLock(const ModelKey& key);
  // As ModelCache::Insert, of `bytes` that were promised in host memory.
  void Insert(const ModelKey& key, const std::string& kind, MemoryUse use, int64_t bytes, double seconds);
  // REQUIRES: locked, by one of these.
  void Unlock(const ModelKey& key);

  // As ModelCache::LockOnDevice. `wish.blocks` are believed where no copy says what there is. REQUIRES:
  // locked.
  absl::StatusOr<OnDevice> LockOnDevice(const ModelKey& key, const std::string& device, ResidencyWish wish);
  void Unlock(const OnDevice& lock);

  bool Has(const ModelKey& key) const { return by_key_.count(key) != 0; }
  // As MemoryBudget::ObtainableBytes.
  int64_t ObtainableBytes(const std::string& device) const;

  // In the order in which things happened.
  const std::vector<Load>& loads() const { return loads_; }
  const std::vector<Eviction>& evictions() const { return evictions_; }
  // The most of the host's budget that this held at once.
  int64_t peak_ram_bytes() const { return peak_ram_bytes_; }

  // As it is now, for whoever compares it with a cache: bytes of the records that are there, and of their
  // copies by device.
  struct There {
    int64_t bytes = 0;
    std::map<std::string, ResidentPart> copies = {};
  };
  std::map<ModelKey, There> Contents() const;

 private:
  class Room;
  struct Copy {
    ResidentPart part;
    int64_t others = 0, mine = 0;  // locks
    bool lasting = false;
    bool held() const { return others + mine > 0; }
  };
  struct Record {
    ModelKey key;
    std::string kind;
    MemoryUse use = MemoryUse::kWeights;
    int64_t bytes = 0;
    double seconds = 0;
    std::set<std::string> names = {};
    GreedyDual::Worth worth = {};
    int64_t others = 0, mine = 0;  // locks
    bool lasting = false, stale = false;
    std::vector<ResourceBlock> blocks = {};  // where a copy says what they are
    std::map<std::string, Copy> copies = {};
    bool held() const { return others + mine > 0; }
  };
  struct Budget {
    std::string name;
    BudgetBytes bytes = {};
    int64_t mine = 0;  // promised to this
  };

  Budget& BudgetOf(const std::string& device);
  const Budget& BudgetOf(const std::string& device) const;
  bool IsHost(const Budget& budget) const { return &budget == &ram_; }
  // Calls f(bytes, held, lasting, mine) for each record, or copy, in the memory of a budget.
  template <typename F>
  void ForEachIn(const Budget& budget, F f) const;
  int64_t IdleBytes(const Budget& budget) const;

  absl::Status Take(Budget& budget, int64_t bytes, const std::string& what);
  void Commit(Budget& budget, int64_t bytes);
  void GiveBack(Budget& budget, int64_t bytes);
  absl::Status Refuse(const Budget& budget, RefusalCause cause, int64_t bytes, const std::string& what) const;
  void MakeRoom(Budget& budget, int64_t bytes);
  void Evict(Record& record);
  void LetGoOfCopy(const std::string& device, Copy& copy);
  // After something was let go of: what a lowered cap has no room for goes.
  void KeepTheCap(Budget& budget) { MakeRoom(budget, budget.bytes.over()); }

  Record& Add(Record record);
  // All of its estimate is promised; the record takes so many bytes of it.
  void LoadPromised(const LockRequest& request, int64_t bytes);
  void BoundConditioning();
  void AddLock(Record& record);
  void Unlock(Record& record);
  // Changes locks and worth of a record: f().
  template <typename F>
  void Change(Record& record, F f);
  void HoldsRam(int64_t more);

  const std::function<double(const std::string&, int64_t)> seconds_to_load_;
  const int64_t conditioning_cap_;
  GreedyDual uses_;
  std::list<Record> records_;
  std::map<ModelKey, std::list<Record>::iterator> by_key_;  // without stale ones
  EvictionOrder<Record> idle_;
  Budget ram_;
  std::map<std::string, Budget> devices_;
  std::vector<Load> loads_;
  std::vector<Eviction> evictions_;
  int64_t ram_bytes_ = 0, peak_ram_bytes_ = 0;  // that this holds
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_IMAGINED_MEMORY_H_
