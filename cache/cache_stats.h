// What a ModelCache tells about itself. Plain values.
#ifndef LATENTD_CACHE_CACHE_STATS_H_
#define LATENTD_CACHE_CACHE_STATS_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cache/base/greedy_dual.h"
#include "cache/eviction_order.h"
#include "cache/memory_budget.h"
#include "cache/model_key.h"
#include "cache/resource.h"

namespace latentd {

struct ResidencyStats {
  std::string device;
  int64_t bytes = 0;
  int64_t full_bytes = 0;  // more than `bytes` where a part is streamed
  int64_t lock_count = 0;
  bool lasting = false;  // a lock on it is (LockOptions::lasting)
  std::vector<ResourceBlock> blocks;
  std::vector<bool> resident;  // by block
};

struct RecordStats {
  ModelKey key;
  std::vector<std::string> names;  // ids of the models that share it, sorted; none: its key is its name
  std::string kind;
  MemoryUse use = MemoryUse::kWeights;
  int64_t bytes = 0;
  int64_t lock_count = 0;
  std::vector<std::string> holders;  // one entry per lock, sorted
  bool lasting = false;              // one of these locks is (LockOptions::lasting)
  bool stale = false;
  double load_seconds = 0;  // that its load took
  absl::Time last_used;     // taken or let go
  GreedyDual::Worth worth;  // its place in the order of eviction; last_used is larger for later uses
  std::vector<ResidencyStats> residency;
};

inline constexpr size_t kEvictReasons = 4;
absl::string_view EvictReasonName(EvictReason reason);  // "room", "trim", "drop", "keep_alive"

struct Eviction {
  ModelKey key;
  std::vector<std::string> names;  // as of RecordStats
  int64_t bytes = 0;
  EvictReason reason = EvictReason::kRoom;
  absl::Time time;
};

struct DeviceStats {
  MemoryBudget::Stats budget;
  int64_t allocated_bytes = 0;  // as measured by the device
  int64_t residency_bytes = 0;  // of all records there
  int64_t copies = 0;           // records copied to it, whole or in part
  int64_t copied_bytes = 0;
  int64_t offloads = 0;        // copies that went to make room
  int64_t streamed_locks = 0;  // locks that got only a part, and stream the rest
};

struct CacheStats {
  std::vector<RecordStats> records;  // in the order in which they would go, then held ones, then stale ones
  GreedyDual uses;                   // what records' worth is measured by, as it stands
  int64_t conditioning_cap = 0;      // conditioning beyond it goes when it is not held
  MemoryBudget::Stats ram;
  std::map<std::string, DeviceStats> devices;  // those with a budget of their own
  int64_t record_bytes = 0;                    // Σ bytes of `records`
  int64_t leaving_bytes = 0;                   // of records that are out, and whose memory is being freed
  int64_t hits = 0;
  int64_t misses = 0;  // loads started
  int64_t load_failures = 0;
  int64_t bytes_loaded = 0;
  std::array<int64_t, kEvictReasons> evictions{};  // by EvictReason
  std::vector<Eviction> recent_evictions;          // the last ones, newest last

  int64_t evicted(EvictReason reason) const { return evictions[static_cast<size_t>(reason)]; }
  // What the budget says is in use and no record accounts for. 0, always: anything else is a bug.
  int64_t unaccounted_bytes() const { return ram.in_use_bytes - record_bytes - leaving_bytes; }
};

struct DropResult {
  int64_t evicted_records = 0;
  int64_t evicted_bytes = 0;
  int64_t stale_records = 0;  // locked ones: they go at their last unlock
  int64_t stale_bytes = 0;
  int64_t busy_records = 0;  // Unload: locked ones, which stay
};

}  // namespace latentd

#endif  // LATENTD_CACHE_CACHE_STATS_H_
