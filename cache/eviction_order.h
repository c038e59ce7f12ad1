// What leaves memory, and in which order, when room is needed: the policy of eviction, on whatever describes
// a record. The cache's own records go by it, and those of a plan of what would happen.
//
// A record goes in this order: what is not conditioning by its worth (GreedyDual); and before each of those,
// the conditioning that was not used since. So what is computed for one prompt never outlives, for its
// seconds, weights that plain LRU would have kept.
#ifndef LATENTD_CACHE_EVICTION_ORDER_H_
#define LATENTD_CACHE_EVICTION_ORDER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "cache/base/greedy_dual.h"
#include "cache/memory_use.h"

namespace latentd {

// Why a record left.
enum class EvictReason {
  kRoom,       // to make room for another
  kTrim,       // ModelCache::Trim
  kDrop,       // ModelCache::Drop; a locked record counts when it becomes stale
  kKeepAlive,  // not used for long
};

// The records that nobody holds, in the order in which they go. A Record has `worth`, `use` and `bytes`, none
// of which changes while it is listed, nor its address.
template <typename Record>
class EvictionOrder {
 public:
  void Add(Record* record) {
    const bool added = record->use == MemoryUse::kConditioning ? conditioning_.insert(record).second
                                                               : rest_.insert(record).second;
    if (added) bytes_ += record->bytes;
  }
  // False when it was not listed.
  bool Remove(Record* record) {
    const size_t removed =
        record->use == MemoryUse::kConditioning ? conditioning_.erase(record) : rest_.erase(record);
    if (removed != 0) bytes_ -= record->bytes;
    return removed != 0;
  }
  int64_t bytes() const { return bytes_; }

  // Calls f(record) in order, until it says false.
  template <typename F>
  void ForEach(F f) const {
    auto rest = rest_.begin();
    auto conditioning = conditioning_.begin();
    while (rest != rest_.end() || conditioning != conditioning_.end()) {
      const bool first = conditioning != conditioning_.end() &&
                         (rest == rest_.end() || (*conditioning)->worth.last_used < (*rest)->worth.last_used);
      if (!f(first ? *conditioning++ : *rest++)) return;
    }
  }

  // In order, as many as free `bytes`; all of them, when they do not.
  std::vector<Record*> Victims(int64_t bytes) const {
    std::vector<Record*> victims;
    if (bytes <= 0) return victims;
    int64_t freed = 0;
    ForEach([&](Record* record) {
      victims.push_back(record);
      return (freed += record->bytes) < bytes;
    });
    return victims;
  }

  // The conditioning that goes when there are `all` bytes of it, held ones among them, and are to be no more
  // than `most`: the least recently used.
  std::vector<Record*> ConditioningBeyond(int64_t most, int64_t all) const {
    std::vector<Record*> victims;
    for (auto it = conditioning_.begin(); all > most && it != conditioning_.end(); ++it) {
      victims.push_back(*it);
      all -= (*it)->bytes;
    }
    return victims;
  }

 private:
  struct ByWorth {
    bool operator()(const Record* a, const Record* b) const {
      return a->worth < b->worth || (!(b->worth < a->worth) && a < b);
    }
  };
  struct ByTurn {
    bool operator()(const Record* a, const Record* b) const {
      return std::pair(a->worth.last_used, a) < std::pair(b->worth.last_used, b);
    }
  };

  std::set<Record*, ByWorth> rest_;
  std::set<Record*, ByTurn> conditioning_;
  int64_t bytes_ = 0;
};

// What an eviction says of the worth of those that stay. What goes for another reason than its place in the
// order says nothing, and conditioning's place is not by its worth.
template <typename Record>
void LearnFromEviction(GreedyDual& uses, const Record& record, EvictReason reason) {
  const bool by_order = reason == EvictReason::kRoom || reason == EvictReason::kTrim;
  if (by_order && record.use != MemoryUse::kConditioning) uses.Evict(record.worth);
}

// The bytes of conditioning beyond which it goes: `configured`, or where that is 0 a sixteenth of the RAM.
inline int64_t ConditioningCap(int64_t configured, int64_t ram_cap) {
  constexpr int64_t kShare = 16;
  return configured > 0 ? configured : ram_cap / kShare;
}

// A copy on a device that nobody holds.
struct IdleCopy {
  uint64_t last_used = 0;  // of its record: larger is later
  int64_t bytes = 0;
};
// Which of them go, as indices, in the order in which they do: those that were not used for longest, as many
// as free `bytes` (all of them, when they do not), less what is not needed for that after all.
std::vector<size_t> CopiesThatGo(absl::Span<const IdleCopy> copies, int64_t bytes);

}  // namespace latentd

#endif  // LATENTD_CACHE_EVICTION_ORDER_H_
