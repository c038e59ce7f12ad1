// What ModelCache must do, written anew for model_cache_model_test.cc: plain lists, the order of eviction
// worked out from scratch. Knows nothing of the cache's code.
#ifndef LATENTD_CACHE_MODEL_CACHE_MODEL_H_
#define LATENTD_CACHE_MODEL_CACHE_MODEL_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "cache/cache_test_util.h"
#include "cache/model_cache.h"

namespace latentd {

inline constexpr int kDevices = 2;
inline constexpr int64_t kRamCap = 100 * kUnit;
inline constexpr int64_t kDeviceCap = 60 * kUnit;

struct ModelCopy {
  bool there = false;
  int64_t bytes = 0;
  std::vector<bool> resident;
  int holders = 0;
  void LetGoOfMemory() {
    there = false;
    bytes = 0;
    resident.clear();
  }
};

struct ModelRecord {
  ModelKey key;
  int64_t bytes = 0;
  double seconds = 0;
  MemoryUse use = MemoryUse::kWeights;
  std::vector<ResourceBlock> blocks;
  std::vector<std::string> sources;
  bool indexed = true;
  bool gone = false;  // out of everything, and kept by pointers alone
  int holders = 0;
  int pointers = 0;
  double worth = 0;
  uint64_t turn = 0;  // of its last use
  absl::Time last_used;
  ModelCopy copies[kDevices];
};
using Ref = std::list<ModelRecord>::iterator;

struct ModelDevice {
  int64_t cap = kDeviceCap;
  int64_t reserved = 0;
  int64_t offloads = 0;
};

struct Model {
  std::list<ModelRecord> records;
  int64_t cap = kRamCap;
  int64_t reserved = 0;
  double floor = 0;
  uint64_t turns = 0;
  absl::Time now;
  int64_t hits = 0, misses = 0, failures = 0;
  std::array<int64_t, kEvictReasons> evictions{};
  std::vector<std::pair<ModelKey, EvictReason>> fresh;  // evictions of this operation
  ModelDevice devices[kDevices];

  int64_t InUse() const {
    int64_t sum = 0;
    for (const ModelRecord& r : records) sum += r.bytes;
    return sum;
  }
  int64_t Idle() const {
    int64_t sum = 0;
    for (const ModelRecord& r : records) sum += r.indexed && r.holders == 0 ? r.bytes : 0;
    return sum;
  }
  Ref Find(const ModelKey& key) {
    return std::find_if(records.begin(), records.end(),
                        [&](const ModelRecord& r) { return r.indexed && r.key == key; });
  }

  // The rule of GreedyDual-Size, from its paper: H = L + cost / size at each use; the least H goes, and L
  // becomes it.
  void Use(Ref r) {
    const double per_byte = r->seconds / static_cast<double>(r->bytes);
    r->worth = floor + (per_byte < 0.5e-9 ? 0.5e-9 : per_byte);
    r->turn = ++turns;
  }
  void Hold(Ref r) {
    ++r->holders;
    Use(r);
  }
  void LetGo(Ref r, bool counts = true) {
    if (counts) {
      r->last_used = now;
      Use(r);
    }
    if (--r->holders > 0) return;
    if (!r->indexed) Gone(r);
    EvictIdle(InUse() + reserved - cap, EvictReason::kRoom);  // where the cap was lowered meanwhile
  }
  void LetGoOn(Ref r, int d, int64_t promised) {
    devices[d].reserved -= promised;
    --r->copies[d].holders;
    Offload(d, InUseOn(d) + devices[d].reserved - devices[d].cap);
    LetGo(r);
  }
  void Gone(Ref r) {
    if (r->pointers == 0) {
      records.erase(r);
      return;
    }
    r->gone = true;
    r->indexed = false;
    for (ModelCopy& copy : r->copies) copy = {};
  }
  void LetGoOfPointer(Ref r) {
    if (--r->pointers == 0 && r->gone) records.erase(r);
  }

  void Evict(Ref r, EvictReason reason) {
    ++evictions[static_cast<size_t>(reason)];
    fresh.emplace_back(r->key, reason);
    if (reason == EvictReason::kRoom || reason == EvictReason::kTrim) floor = std::max(floor, r->worth);
    r->indexed = false;
    if (r->holders == 0) Gone(r);
  }
  std::vector<Ref> Indexed(bool only_idle) {
    std::vector<Ref> list;
    for (Ref r = records.begin(); r != records.end(); ++r) {
      if (r->indexed && (!only_idle || r->holders == 0)) list.push_back(r);
    }
    std::sort(list.begin(), list.end(),
              [](Ref a, Ref b) { return std::tie(a->worth, a->turn) < std::tie(b->worth, b->turn); });
    return list;
  }
  std::vector<Ref> Victims(int64_t bytes) {
    std::vector<Ref> list;
    for (Ref r : Indexed(/*only_idle=*/true)) {
      if (bytes <= 0) break;
      bytes -= r->bytes;
      list.push_back(r);
    }
    return list;
  }
  int64_t EvictIdle(int64_t bytes, EvictReason reason) {
    int64_t freed = 0;
    for (Ref r : Victims(bytes)) {
      freed += r->bytes;
      Evict(r, reason);
    }
    return freed;
  }

  // Empty, or the reason why there is no room.
  std::string Room(int64_t bytes) {
    if (bytes > cap) return "MODEL_EXCEEDS_BUDGET";
    while (bytes > 0 && bytes > cap - reserved - InUse()) {
      if (bytes > cap - reserved - InUse() + Idle()) return "BUDGET_EXHAUSTED";
      if (EvictIdle(bytes - (cap - reserved - InUse()), EvictReason::kRoom) == 0) return "BUDGET_EXHAUSTED";
    }
    return "";
  }

  int64_t InUseOn(int d) const {
    int64_t sum = 0;
    for (const ModelRecord& r : records) sum += r.copies[d].bytes;
    return sum;
  }
  int64_t ObtainableOn(int d) const {
    int64_t held = 0;
    for (const ModelRecord& r : records) held += r.copies[d].holders > 0 ? r.copies[d].bytes : 0;
    return devices[d].cap - devices[d].reserved - held;
  }
  // The least recently used ones until it is enough; then, from the last used on, those stay without which it
  // is enough as well.
  int64_t Offload(int d, int64_t bytes) {
    if (bytes <= 0) return 0;
    std::vector<Ref> list;
    for (Ref r = records.begin(); r != records.end(); ++r) {
      if (r->copies[d].there && r->copies[d].holders == 0) list.push_back(r);
    }
    std::sort(list.begin(), list.end(), [](Ref a, Ref b) { return a->turn < b->turn; });
    int64_t freed = 0;
    std::vector<Ref> go;
    for (Ref r : list) {
      if (freed >= bytes) break;
      freed += r->copies[d].bytes;
      go.push_back(r);
    }
    std::reverse(go.begin(), go.end());
    for (Ref r : go) {
      if (freed - r->copies[d].bytes >= bytes) {
        freed -= r->copies[d].bytes;
        continue;
      }
      r->copies[d] = {};
      ++devices[d].offloads;
    }
    return freed;
  }
  std::string RoomOn(int d, int64_t bytes) {
    if (bytes > devices[d].cap) return "MODEL_EXCEEDS_BUDGET";
    const int64_t free = devices[d].cap - devices[d].reserved - InUseOn(d);
    if (bytes == 0 || bytes <= free) return "";
    if (bytes > ObtainableOn(d)) return "BUDGET_EXHAUSTED";
    Offload(d, bytes - free);
    return "";
  }
};

}  // namespace latentd

#endif  // LATENTD_CACHE_MODEL_CACHE_MODEL_H_
