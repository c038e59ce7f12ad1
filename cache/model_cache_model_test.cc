// Random operations on a cache with two devices, against the model of its rules in model_cache_model.h, with
// a clock that only the test moves. After every operation everything that can be seen of the cache is
// compared with the model.
//
// LATENTD_MODEL_SEED and LATENTD_MODEL_OPERATIONS change what is run.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <map>
#include <random>
#include <tuple>

#include "absl/algorithm/container.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "cache/cache_test_util.h"
#include "cache/model_cache.h"
#include "cache/model_cache_model.h"
#include "cache/residency_plan.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

constexpr size_t kIds = 7;  // times two components

class ModelTest : public CacheTest {
 protected:
  struct Held {
    LockHandle handle;
    Ref record;
    bool counts = true;
  };
  struct HeldOn {
    DeviceLock lock;
    Ref record;
    int device = 0;
    int64_t reserved = 0;
  };
  struct Promise {
    Reservation reservation;
    int device = -1;  // of RAM
  };

  ModelTest() {
    for (SimDevice* sim : sims) sim->budget().set_cap(kDeviceCap);
    model.now = Now();
  }

  size_t Pick(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); }
  bool Chance(size_t one_in) { return Pick(one_in) == 0; }
  std::string Owner() { return absl::StrCat("owner-", Pick(3)); }
  ModelKey Key() { return {absl::StrCat("m", Pick(kIds)), Chance(2) ? "x" : ""}; }
  void Tick(absl::Duration d) {
    Advance(d);
    model.now += d;
  }

  // What a key is made of, always the same.
  static int Number(const ModelKey& key) { return (key.id[1] - '0') * 2 + (key.component.empty() ? 0 : 1); }
  static int64_t BytesOf(const ModelKey& key) { return (4 + Number(key) * 2) * kUnit; }
  static absl::Duration LoadTime(const ModelKey& key) { return absl::Seconds(Number(key) % 4); }
  static MemoryUse UseOf(const ModelKey& key) {
    return Number(key) % 3 == 0 ? MemoryUse::kPatches : MemoryUse::kWeights;
  }
  static std::vector<ResourceBlock> BlocksOf(const ModelKey& key) {
    const int64_t bytes = BytesOf(key);
    if (Number(key) % 2 == 0) return {{bytes, true}};
    std::vector<ResourceBlock> blocks = {{2 * kUnit, true}};
    for (int64_t left = bytes - 2 * kUnit; left > 0;) {
      const int64_t block = std::min<int64_t>(left, (1 + Number(key) % 3) * kUnit);
      blocks.push_back({block, false});
      left -= block;
    }
    return blocks;
  }

  // How a load ends.
  enum class Fate { kGood, kFails, kUnderestimated, kDropped };
  Fate SomeFate(const ModelKey& key) {
    const Fate fate = Chance(10) ? static_cast<Fate>(1 + Pick(3)) : Fate::kGood;
    // Without a component a key covers others too.
    return fate == Fate::kDropped && key.component.empty() ? Fate::kGood : fate;
  }
  Loader LoaderOf(const ModelKey& key, Fate fate) {
    return {"test", BytesOf(key) - (fate == Fate::kUnderestimated ? 1 : 0),
            [this, key, fate](const LoadContext&) -> Loaded {
              Advance(LoadTime(key));
              if (fate == Fate::kFails) return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", "bad");
              if (fate == Fate::kDropped) cache.Drop(key);
              return std::make_shared<const Blob>(BytesOf(key), &alive, BlocksOf(key));
            },
            UseOf(key)};
  }
  Ref NewRecord(const ModelKey& key, double seconds, MemoryUse use) {
    ModelRecord r;
    r.key = key;
    r.bytes = BytesOf(key);
    r.seconds = seconds;
    r.use = use;
    r.blocks = BlocksOf(key);
    return model.records.insert(model.records.end(), r);
  }
  // What the model says to a load whose room is promised. Null when it fails, with why.
  Ref ModelLoad(const ModelKey& key, Fate fate, std::string* why) {
    model.now += LoadTime(key);
    if (fate == Fate::kFails || fate == Fate::kUnderestimated) {
      *why = fate == Fate::kFails ? "CORRUPT_FILE" : "ESTIMATE_TOO_LOW";
      ++model.failures;
      return model.records.end();
    }
    Ref r = NewRecord(key, absl::ToDoubleSeconds(LoadTime(key)), UseOf(key));
    r->indexed = fate != Fate::kDropped;
    model.Hold(r);
    return r;
  }

  void Lock() {
    const ModelKey key = Key();
    const Fate fate = SomeFate(key);
    auto got = cache.Lock(key, LoaderOf(key, fate), {.owner = Owner(), .deadline = absl::InfinitePast()});
    Ref r = model.Find(key);
    std::string why;
    if (r != model.records.end()) {
      ++model.hits;
      model.Hold(r);
    } else {
      ++model.misses;
      why = model.Room(BytesOf(key) - (fate == Fate::kUnderestimated ? 1 : 0));
      if (!why.empty()) {
        ++model.failures;
      } else {
        r = ModelLoad(key, fate, &why);
      }
    }
    ExpectReason(got.status(), why);
    if (got.ok() && why.empty()) handles.push_back({std::move(*got), r});
  }

  void LockAll() {
    std::map<ModelKey, Fate> set;
    while (set.size() < 3) {
      const ModelKey key = Key();
      set[key] = SomeFate(key);
    }
    std::vector<LockRequest> requests;
    for (const auto& [key, fate] : set) requests.push_back({key, LoaderOf(key, fate)});
    std::shuffle(requests.begin(), requests.end(), random);
    auto got = cache.LockAll(requests, {.owner = Owner(), .deadline = absl::InfinitePast()});

    std::vector<Ref> held(requests.size(), model.records.end());
    std::vector<size_t> missing;
    int64_t bytes = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      held[i] = model.Find(requests[i].key);
      if (held[i] == model.records.end()) {
        missing.push_back(i);
        bytes += requests[i].loader.estimated_bytes;
      } else {
        ++model.hits;
        model.Hold(held[i]);
      }
    }
    std::string why = missing.empty() ? "" : model.Room(bytes);
    std::sort(missing.begin(), missing.end(),
              [&](size_t a, size_t b) { return requests[a].key < requests[b].key; });
    for (size_t i : missing) {
      if (!why.empty()) break;
      ++model.misses;
      held[i] = ModelLoad(requests[i].key, set[requests[i].key], &why);
    }
    ExpectReason(got.status(), why);
    for (size_t i = 0; i < requests.size(); ++i) {
      if (held[i] == model.records.end()) continue;
      if (!why.empty()) {
        model.LetGo(held[i]);
      } else if (got.ok()) {
        handles.push_back({std::move((*got)[i]), held[i]});
      }
    }
  }

  void TryLock() {
    const ModelKey key = Key();
    LockHandle got = cache.TryLock(key, Owner());
    Ref r = model.Find(key);
    if (bool(got) != (r != model.records.end())) return Wrong("TryLock");
    if (!got) return;
    ++model.hits;
    model.Hold(r);
    handles.push_back({std::move(got), r});
  }

  void Peek() {
    const ModelKey key = Key();
    LockHandle got = cache.Peek(key, Owner());
    Ref r = model.Find(key);
    if (bool(got) != (r != model.records.end())) return Wrong("Peek");
    if (!got) return;
    ++r->holders;
    handles.push_back({std::move(got), r, /*counts=*/false});
  }

  void Insert() {
    const ModelKey key = Key();
    const double seconds = static_cast<double>(Pick(5));
    auto memory =
        ram.TryReserve({.bytes = BytesOf(key) + kUnit, .use = MemoryUse::kMerged, .owner = Owner()});
    const std::string why = model.Room(BytesOf(key) + kUnit);
    ExpectReason(memory.status(), why);
    if (!memory.ok()) return;
    std::vector<std::string> sources;
    if (Chance(2)) sources.push_back(Key().id);
    auto blob = std::make_shared<const Blob>(BytesOf(key), &alive, BlocksOf(key));
    auto got = cache.Insert(key, "test", std::move(blob), std::move(*memory), seconds, Owner(), sources);
    if (!got.ok()) return Wrong("Insert");
    Ref r = model.Find(key);
    if (r == model.records.end()) {
      r = NewRecord(key, seconds, MemoryUse::kMerged);
      r->sources = sources;
    }
    model.Hold(r);
    handles.push_back({std::move(*got), r});
  }

  void Share() {
    const Held& from = handles[Pick(handles.size())];
    model.Hold(from.record);
    handles.push_back({from.handle.Share(Chance(2) ? Owner() : ""), from.record});
  }
  void Release() {
    std::swap(handles[Pick(handles.size())], handles.back());
    model.LetGo(handles.back().record, handles.back().counts);
    if (Chance(2)) handles.back().handle.Release();
    handles.pop_back();
  }
  void Move() {
    const size_t to = Pick(handles.size()), from = Pick(handles.size());
    if (to == from) return;
    model.LetGo(handles[to].record, handles[to].counts);
    handles[to] = std::move(handles[from]);
    handles.erase(handles.begin() + static_cast<std::ptrdiff_t>(from));
  }

  void LockOnDevice() {
    const size_t which = Pick(handles.size());
    const int d = static_cast<int>(Pick(kDevices));
    DeviceLockOptions options = {.owner = Chance(2) ? Owner() : "",
                                 .working_bytes = Chance(2) ? 0 : static_cast<int64_t>(Pick(70)) * kUnit,
                                 .mode = static_cast<ResidencyMode>(Pick(3)),
                                 .ring_slots = static_cast<int32_t>(Pick(4)),
                                 .deadline = absl::InfinitePast()};
    const bool breaks = Chance(10);
    if (breaks) sims[d]->FailAllocation(1);
    auto got = cache.LockOnDevice(handles[which].handle, *sims[d], options);
    sims[d]->FailAllocation(0);

    Ref r = handles[which].record;
    ModelCopy& copy = r->copies[d];
    int64_t promised = 0;
    model.Hold(r);
    ++copy.holders;
    const std::string why = ModelMove(r, d, options, breaks, &promised);
    ExpectReason(got.status(), why);
    if (!why.empty()) {
      model.LetGoOn(r, d, promised);
    } else if (got.ok()) {
      if (copy.resident != got->plan().resident) return Wrong("resident blocks");
      locks.push_back({std::move(*got), r, d, promised});
    }
  }

  std::string ModelMove(Ref r, int d, const DeviceLockOptions& options, bool breaks, int64_t* promised) {
    ModelCopy& copy = r->copies[d];
    auto promise = [&](int64_t bytes) {
      *promised += bytes;
      model.devices[d].reserved += bytes;
    };
    if (options.working_bytes > 0) {
      std::string why = model.RoomOn(d, options.working_bytes);
      if (!why.empty()) {
        --copy.holders;
        why = model.RoomOn(d, options.working_bytes);
        ++copy.holders;
      }
      if (!why.empty()) return why;
      promise(options.working_bytes);
    }
    int64_t full = 0;
    for (const ResourceBlock& block : r->blocks) full += block.bytes;
    const ResidencyPlan smallest = PlanResidency(r->blocks, 0, options.ring_slots);
    const bool streams = smallest.streams();

    std::vector<bool> wanted;
    if (options.mode != ResidencyMode::kStream || !streams) {
      const std::string why = model.RoomOn(d, full - copy.bytes);
      if (why.empty()) {
        wanted.assign(r->blocks.size(), true);
      } else if (options.mode == ResidencyMode::kFull || !streams) {
        return why;
      }
    } else if (copy.there && copy.holders == 1) {
      copy.LetGoOfMemory();
    }
    if (wanted.empty() && copy.there) {
      int32_t streamed = 0;
      int64_t slot = 0;
      for (size_t i = 0; i < r->blocks.size(); ++i) {
        if (copy.resident[i]) continue;
        ++streamed;
        slot = std::max(slot, r->blocks[i].bytes);
      }
      const int64_t ring = std::min(smallest.ring_slots, streamed) * slot;
      const std::string why = model.RoomOn(d, ring);
      if (why.empty()) {
        promise(ring);
        wanted = copy.resident;
      } else if (copy.holders > 1) {
        return why;
      } else {
        copy.LetGoOfMemory();
      }
    }
    if (wanted.empty()) {
      ResidencyPlan plan = smallest;
      if (options.mode == ResidencyMode::kAuto) {
        plan = PlanResidency(r->blocks, std::max<int64_t>(0, model.ObtainableOn(d)), options.ring_slots);
      }
      const std::string why = model.RoomOn(d, plan.bytes());
      if (!why.empty()) return why;
      promise(plan.ring_bytes());
      wanted = plan.resident;
    }
    if (wanted == copy.resident) return "";
    int64_t bytes = 0;
    bool allocates = false;
    for (size_t i = 0; i < wanted.size(); ++i) {
      bytes += wanted[i] ? r->blocks[i].bytes : 0;
      allocates |= wanted[i] && (!copy.there || !copy.resident[i]);
    }
    if (breaks && allocates) return "DEVICE_OUT_OF_MEMORY";
    copy.there = true;
    copy.bytes = bytes;
    copy.resident = wanted;
    return "";
  }

  void ModelLetGoOn(const HeldOn& lock) { model.LetGoOn(lock.record, lock.device, lock.reserved); }
  void ReleaseOnDevice() {
    std::swap(locks[Pick(locks.size())], locks.back());
    ModelLetGoOn(locks.back());
    if (Chance(2)) locks.back().lock.Release();
    locks.pop_back();
  }
  void MoveOnDevice() {
    const size_t to = Pick(locks.size()), from = Pick(locks.size());
    if (to == from) return;
    ModelLetGoOn(locks[to]);
    locks[to] = std::move(locks[from]);
    locks.erase(locks.begin() + static_cast<std::ptrdiff_t>(from));
  }

  void Drop() {
    const ModelKey pattern = Key();
    const bool only_idle = Chance(3);
    const DropResult got = only_idle ? cache.Unload(pattern) : cache.Drop(pattern);
    DropResult wanted;
    for (Ref r : model.Indexed(/*only_idle=*/false)) {
      const bool same_id = r->key.id == pattern.id || absl::c_linear_search(r->sources, pattern.id);
      const bool same_component = pattern.component.empty() || r->key == pattern;
      if (!same_id || !same_component) continue;
      if (only_idle && r->holders > 0) {
        ++wanted.busy_records;
        continue;
      }
      ++(r->holders > 0 ? wanted.stale_records : wanted.evicted_records);
      (r->holders > 0 ? wanted.stale_bytes : wanted.evicted_bytes) += r->bytes;
      model.Evict(r, EvictReason::kDrop);
    }
    if (std::tie(got.evicted_records, got.evicted_bytes, got.stale_records, got.stale_bytes,
                 got.busy_records) != std::tie(wanted.evicted_records, wanted.evicted_bytes,
                                               wanted.stale_records, wanted.stale_bytes,
                                               wanted.busy_records)) {
      Wrong("DropResult");
    }
  }
  void Trim() {
    const int64_t bytes = static_cast<int64_t>(Pick(40)) * kUnit;
    if (cache.Trim(bytes) != model.EvictIdle(bytes, EvictReason::kTrim)) Wrong("Trim");
  }
  void EvictUnused() {
    const absl::Time time = Now() - absl::Milliseconds(Pick(200'000));
    const int64_t got = cache.EvictUnusedSince(time);
    int64_t freed = 0;
    for (Ref r : model.Indexed(/*only_idle=*/true)) {
      if (r->last_used > time) continue;
      freed += r->bytes;
      model.Evict(r, EvictReason::kKeepAlive);
    }
    if (got != freed) Wrong("EvictUnusedSince");
  }
  void WouldEvict() {
    const int64_t bytes = static_cast<int64_t>(Pick(60)) * kUnit;
    std::vector<ModelKey> got, wanted;
    for (const RecordStats& r : cache.WouldEvict(bytes)) got.push_back(r.key);
    int64_t freed = 0;
    for (Ref r : model.Victims(bytes)) {
      wanted.push_back(r->key);
      freed += r->bytes;
    }
    if (freed < bytes) wanted.clear();
    if (got != wanted) Wrong("WouldEvict");
  }
  void SetCap() {
    const int d = static_cast<int>(Pick(kDevices + 1)) - 1;
    if (d < 0) {
      model.cap = Chance(2) ? kRamCap : static_cast<int64_t>(20 + Pick(100)) * kUnit;
      ram.set_cap(model.cap);
      model.EvictIdle(model.InUse() + model.reserved - model.cap, EvictReason::kRoom);
    } else {
      ModelDevice& device = model.devices[d];
      device.cap = Chance(2) ? kDeviceCap : static_cast<int64_t>(10 + Pick(70)) * kUnit;
      sims[d]->budget().set_cap(device.cap);
      model.Offload(d, model.InUseOn(d) + device.reserved - device.cap);
    }
  }
  void Offload() {
    const int d = static_cast<int>(Pick(kDevices));
    const int64_t bytes = static_cast<int64_t>(Pick(40)) * kUnit;
    if (cache.Offload(*sims[d], bytes) != model.Offload(d, bytes)) Wrong("Offload");
  }
  void Reserve() {
    const int d = static_cast<int>(Pick(kDevices + 1)) - 1;
    const int64_t bytes = static_cast<int64_t>(Pick(50)) * kUnit;
    MemoryBudget& budget = d < 0 ? static_cast<MemoryBudget&>(ram) : sims[d]->budget();
    const MemoryBudget::Request request = {
        .bytes = bytes, .owner = Owner(), .deadline = absl::InfinitePast()};
    auto got = Chance(2) ? budget.Reserve(request) : budget.TryReserve(request);
    const std::string why = d < 0 ? model.Room(bytes) : model.RoomOn(d, bytes);
    ExpectReason(got.status(), why);
    if (!got.ok()) return;
    (d < 0 ? model.reserved : model.devices[d].reserved) += bytes;
    promises.push_back({std::move(*got), d});
  }
  void GiveBack() {
    std::swap(promises[Pick(promises.size())], promises.back());
    const Promise& last = promises.back();
    (last.device < 0 ? model.reserved : model.devices[last.device].reserved) -= last.reservation.bytes();
    promises.pop_back();
  }
  void KeepPointer() {
    const Held& from = handles[Pick(handles.size())];
    ++from.record->pointers;
    pointers.emplace_back(from.handle.resource(), from.record);
  }
  void LetGoOfPointer() {
    std::swap(pointers[Pick(pointers.size())], pointers.back());
    const Ref r = pointers.back().second;
    pointers.pop_back();
    model.LetGoOfPointer(r);
  }

  void Step() {
    Tick(absl::Milliseconds(Pick(1000)));
    // Held things are let go sooner or later, so that there is always something that can be evicted.
    if (handles.size() > 8 || (!handles.empty() && Chance(6))) return Release();
    if (locks.size() > 5 || (!locks.empty() && Chance(8))) return ReleaseOnDevice();
    if (promises.size() > 3 || (!promises.empty() && Chance(8))) return GiveBack();
    if (pointers.size() > 2 || (!pointers.empty() && Chance(12))) return LetGoOfPointer();
    switch (Pick(25)) {
      case 0:
        return Drop();
      case 1:
        return Trim();
      case 2:
        return EvictUnused();
      case 3:
        return WouldEvict();
      case 4:
        return SetCap();
      case 5:
        return Offload();
      case 6:
      case 7:
        return Reserve();
      case 8:
        return LockAll();
      case 9:
        return TryLock();
      case 10:
        return Insert();
      case 11:
        return handles.empty() ? Lock() : Share();
      case 12:
        return handles.empty() ? Lock() : Move();
      case 13:
        return handles.empty() ? Lock() : KeepPointer();
      case 14:
        return locks.empty() ? Lock() : MoveOnDevice();
      case 15:
      case 16:
      case 17:
      case 18:
        return handles.empty() ? Lock() : LockOnDevice();
      case 19:
        return Peek();
      default:
        return Lock();
    }
  }

  // --------------------------------------------------------------------------------------------- comparing

  void Wrong(absl::string_view what) { wrong = std::string(what); }
  void ExpectReason(const absl::Status& status, const std::string& why) {
    if (ErrorReason(status) != why || status.ok() != why.empty()) {
      Wrong(absl::StrCat("got ", status.ToString(), ", wanted '", why, "'"));
    }
  }
  template <typename A, typename B>
  void Equal(absl::string_view what, const A& got, const B& wanted) {
    if (got != wanted) Wrong(absl::StrCat(what, ": got ", got, ", wanted ", wanted));
  }

  // One line for each thing that can be seen of a record.
  static std::string Line(const RecordStats& r) {
    std::string line = absl::StrCat(r.key.ToString(), " ", r.bytes, " ", r.lock_count,
                                    r.stale ? " stale " : " ", absl::ToUnixNanos(r.last_used));
    std::string there[kDevices];
    for (const ResidencyStats& s : r.residency) {
      there[s.device.back() - '0'] = absl::StrCat(" ", s.device, " ", s.bytes, " ", s.lock_count);
    }
    return absl::StrCat(line, there[0], there[1]);
  }
  std::string Line(const ModelRecord& r) const {
    std::string line =
        absl::StrCat(r.key.ToString(), " ", r.bytes, " ", r.holders, r.indexed ? " " : " stale ",
                     absl::ToUnixNanos(r.holders > 0 ? model.now : r.last_used));
    for (int d = 0; d < kDevices; ++d) {
      if (!r.copies[d].there) continue;
      absl::StrAppend(&line, " sim:", d, " ", r.copies[d].bytes, " ", r.copies[d].holders);
    }
    return line;
  }

  void Compare() {
    const CacheStats stats = cache.Stats();
    std::vector<std::string> got, wanted, stale_got, stale_wanted;
    for (const RecordStats& r : stats.records) (r.stale ? stale_got : got).push_back(Line(r));
    for (Ref r : model.Indexed(/*only_idle=*/true)) wanted.push_back(Line(*r));
    for (Ref r : model.Indexed(/*only_idle=*/false)) {
      if (r->holders > 0) wanted.push_back(Line(*r));
    }
    int64_t leaving = 0, living = 0;
    std::array<int64_t, kMemoryUses> uses{};
    for (const ModelRecord& r : model.records) {
      ++living;
      uses[static_cast<size_t>(r.use)] += r.bytes;
      if (r.gone) leaving += r.bytes;
      if (!r.indexed && !r.gone) stale_wanted.push_back(Line(r));
    }
    std::sort(stale_got.begin(), stale_got.end());
    std::sort(stale_wanted.begin(), stale_wanted.end());
    if (got != wanted || stale_got != stale_wanted) {
      Wrong(absl::StrCat(
          "records\n got: ", absl::StrJoin(got, "\n      "), "\n+", absl::StrJoin(stale_got, "\n      "),
          "\n wanted: ", absl::StrJoin(wanted, "\n      "), "\n+", absl::StrJoin(stale_wanted, "\n      ")));
    }
    Equal("alive", alive.load(), living);
    Equal("in use", stats.ram.in_use_bytes, model.InUse());
    Equal("reserved", stats.ram.reserved_bytes, model.reserved);
    Equal("leaving", stats.leaving_bytes, leaving);
    Equal("unaccounted", stats.unaccounted_bytes(), 0);
    for (size_t u = 0; u < kMemoryUses; ++u) Equal("use", stats.ram.uses[u].in_use_bytes, uses[u]);
    Equal("hits", stats.hits, model.hits);
    Equal("misses", stats.misses, model.misses);
    Equal("failures", stats.load_failures, model.failures);
    for (int d = 0; d < kDevices; ++d) {
      const DeviceStats& there = stats.devices.at(sims[d]->name());
      Equal("device in use", there.budget.in_use_bytes, model.InUseOn(d));
      Equal("device reserved", there.budget.reserved_bytes, model.devices[d].reserved);
      Equal("device allocated", there.allocated_bytes, model.InUseOn(d));
      Equal("residency", there.residency_bytes, model.InUseOn(d));
      Equal("offloads", there.offloads, model.devices[d].offloads);
    }
    if (stats.evictions != model.evictions) Wrong("evictions by reason");
    CompareEvictions(stats);
  }

  void CompareEvictions(const CacheStats& stats) {
    if (model.fresh.empty()) return;
    if (stats.recent_evictions.size() < model.fresh.size()) return Wrong("recent evictions are missing");
    std::vector<std::pair<ModelKey, EvictReason>> got;
    for (auto it = stats.recent_evictions.end() - static_cast<std::ptrdiff_t>(model.fresh.size());
         it != stats.recent_evictions.end(); ++it) {
      got.emplace_back(it->key, it->reason);
    }
    // What goes for room goes in its order; what goes for another reason goes all at once.
    const EvictReason reason = model.fresh[0].second;
    if (reason == EvictReason::kDrop || reason == EvictReason::kKeepAlive) {
      std::sort(got.begin(), got.end());
      std::sort(model.fresh.begin(), model.fresh.end());
    }
    if (got != model.fresh) Wrong("order of evictions");
    model.fresh.clear();
  }

  static int64_t FromEnvironment(const char* name, int64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::atoll(text);
  }

  std::array<SimDevice*, kDevices> sims = {&sim0, &sim1};
  std::mt19937_64 random;
  Model model;
  std::vector<Held> handles;
  std::vector<HeldOn> locks;
  std::vector<Promise> promises;
  std::vector<std::pair<std::shared_ptr<const Resource>, Ref>> pointers;
  std::string wrong;
};

TEST_F(ModelTest, TheCacheDoesWhatItsModelDoes) {
  const int64_t seed = FromEnvironment("LATENTD_MODEL_SEED", 20260801);
  const int64_t operations = FromEnvironment("LATENTD_MODEL_OPERATIONS", kSanitized ? 100'000 : 1'000'000);
  random.seed(static_cast<uint64_t>(seed));
  int64_t done = 0;
  for (; done < operations && wrong.empty(); ++done) {
    Step();
    Compare();
  }
  std::printf("seed %lld: %lld operations, %lld loads, %lld hits, %lld evictions, %lld offloads\n",
              static_cast<long long>(seed), static_cast<long long>(done),
              static_cast<long long>(model.misses), static_cast<long long>(model.hits),
              static_cast<long long>(model.evictions[0] + model.evictions[1] + model.evictions[2] +
                                     model.evictions[3]),
              static_cast<long long>(model.devices[0].offloads + model.devices[1].offloads));
  ASSERT_EQ(wrong, "") << "at operation " << done << " of seed " << seed;
  locks.clear();
  handles.clear();
  promises.clear();
  pointers.clear();
  cache.Trim(MemoryBudget::kUnlimited);
  ExpectEmpty();
}

}  // namespace
}  // namespace latentd
