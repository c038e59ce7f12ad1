// Invariants, under mu_:
//  * a record is in records_ under its key, or as a stale one, or not (gone);
//  * a stale record has holders, and is gone with the last of them;
//  * a record that is gone and whose memory is not yet free is counted in leaving_.
// Records are let go outside of the mutex: freeing memory takes time.
#include "cache/model_cache.h"

#include <algorithm>
#include <atomic>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/cache_loading.h"
#include "cache/cache_record.h"
#include "cache/eviction_order.h"
#include "cache/record_index.h"

namespace latentd {

absl::string_view EvictReasonName(EvictReason reason) {
  switch (reason) {
    case EvictReason::kRoom:
      return "room";
    case EvictReason::kTrim:
      return "trim";
    case EvictReason::kDrop:
      return "drop";
    case EvictReason::kKeepAlive:
      return "keep_alive";
  }
  return "";
}

namespace {

constexpr size_t kRecentEvictions = 64;

// Records that one look describes before it lets others at the cache.
constexpr size_t kLookAtOnce = 128;

bool MadeFrom(const std::vector<std::string>& sources, const ModelKey& pattern) {
  return std::any_of(sources.begin(), sources.end(), [&](const std::string& id) {
    return pattern.Covers({id, ""});
  });
}

// Takes the name off that `pattern` covers. True when that leaves none.
bool TakeName(std::set<std::string>& names, const std::string& component, const ModelKey& pattern) {
  return pattern.Covers({pattern.id, component}) && names.erase(pattern.id) > 0 && names.empty();
}

}  // namespace

// ---------------------------------------------------------------------------------------------- handles

LockHandle& LockHandle::operator=(LockHandle&& other) noexcept {
  if (this != &other) {
    Release();
    cache_ = std::exchange(other.cache_, nullptr);
    record_ = std::move(other.record_);
    owner_ = std::move(other.owner_);
    number_ = other.number_;
    counts_ = other.counts_;
    other.record_ = nullptr;
  }
  return *this;
}

const ModelKey& LockHandle::key() const { return record_->key; }

const std::shared_ptr<const Resource>& LockHandle::resource() const { return record_->resource; }

LockHandle LockHandle::Share(std::string owner) const {
  MutexLock lock(&cache_->mu_);
  return cache_->AddLock(record_, owner.empty() ? owner_ : owner);
}

void LockHandle::Release() {
  if (record_ == nullptr) return;
  cache_->Unlock(std::move(record_), number_, counts_);
  record_ = nullptr;
  cache_ = nullptr;
}

// ------------------------------------------------------------------------------------------------ records

ModelCache::RecordPtr ModelCache::NewRecord(const ModelKey& key, const std::string& kind, MemoryUse use,
                                            std::shared_ptr<const Resource> resource, Reservation memory,
                                            double seconds) {
  auto accounted = std::make_shared<Accounted>();
  accounted->leaving = leaving_;
  accounted->memory = std::move(memory);
  accounted->resource = std::move(resource);
  auto record = std::make_shared<CacheRecord>();
  record->key = key;
  record->kind = kind;
  record->use = use;
  record->bytes = accounted->resource->bytes();
  record->turn = accounted->memory.turn();
  record->load_seconds = seconds;
  record->resource = Accounted::Pointer(accounted);
  record->accounted = accounted;
  return record;
}

LockHandle ModelCache::AddLock(const RecordPtr& record, const std::string& owner, bool lasting) {
  uint64_t number = 0;
  records_->Change(record, [&] {
    number = record->holders.Add(owner, lasting);
    order_.Use(record->worth, record->cost());
  });
  // Who waits may have counted on it.
  if (lasting) ram_->waits()->LookAgain();
  return LockHandle(this, record, owner, number, /*counts=*/true);
}

void ModelCache::Leaves(const RecordPtr& record) {
  auto accounted = record->accounted.lock();
  MutexLock leaving(&leaving_->mu);
  accounted->left = true;
  leaving_->bytes += record->bytes;
}

void ModelCache::Unlock(RecordPtr record, uint64_t number, bool counts) {
  bool free = false;
  {
    MutexLock lock(&mu_);
    records_->Change(record, [&] {
      record->holders.Remove(number);
      if (!counts) return;  // it was in use until now
      record->last_used = clock_();
      order_.Use(record->worth, record->cost());
    });
    if (record->holders.empty()) {
      free = true;
      if (!record->indexed) {
        records_->Forget(record);
        Leaves(record);
      }
      if (shutting_down_) changed_.SignalAll();
    }
  }
  record = nullptr;  // frees a stale record
  // One who leaves others behind may have been the only one of them who would let go by itself.
  free ? ram_->NotifyReclaimable() : ram_->waits()->LookAgain();
}

void ModelCache::Evict(const RecordPtr& record, EvictReason reason) {
  LearnFromEviction(order_, *record, reason);
  ++counters_.evictions[static_cast<size_t>(reason)];
  recent_.push_back(
      {record->key, {record->names.begin(), record->names.end()}, record->bytes, reason, clock_()});
  if (recent_.size() > kRecentEvictions) recent_.pop_front();
  records_->TakeOut(record);
  if (record->holders.empty()) Leaves(record);
}

int64_t ModelCache::EvictAll(const std::vector<RecordPtr>& records, EvictReason reason) {
  int64_t freed = 0;
  for (const RecordPtr& record : records) {
    freed += record->bytes;
    Evict(record, reason);
  }
  return freed;
}

int64_t ModelCache::EvictUnlocked(int64_t bytes, EvictReason reason) {
  std::vector<RecordPtr> gone;  // ends after the mutex is let go
  MutexLock lock(&mu_);
  gone = records_->Victims(bytes);
  return EvictAll(gone, reason);
}

std::vector<RecordPtr> ModelCache::BoundConditioning(const CacheRecord& came) {
  if (came.use != MemoryUse::kConditioning) return {};
  std::vector<RecordPtr> gone =
      records_->ConditioningBeyond(ConditioningCap(conditioning_cap_, ram_->cap_bytes()));
  EvictAll(gone, EvictReason::kRoom);
  return gone;
}

void ModelCache::set_conditioning_cap(int64_t bytes) {
  MutexLock lock(&mu_);
  conditioning_cap_ = bytes;
}

int64_t ModelCache::conditioning_cap() const {
  MutexLock lock(&mu_);
  return ConditioningCap(conditioning_cap_, ram_->cap_bytes());
}

int64_t ModelCache::Reclaim(int64_t bytes) {
  return bytes <= 0 ? 0 : EvictUnlocked(bytes, EvictReason::kRoom);
}

int64_t ModelCache::Trim(int64_t bytes) { return EvictUnlocked(bytes, EvictReason::kTrim); }

int64_t ModelCache::EvictUnusedSince(absl::Time time) {
  std::vector<RecordPtr> gone;  // ends after the mutex is let go
  MutexLock lock(&mu_);
  gone = records_->UnusedSince(time);
  return EvictAll(gone, EvictReason::kKeepAlive);
}

std::vector<RecordStats> ModelCache::WouldEvict(int64_t bytes) const {
  MutexLock lock(&mu_);
  std::vector<RecordStats> result;
  if (bytes > records_->idle_bytes()) return result;
  for (const RecordPtr& record : records_->Victims(bytes)) result.push_back(RecordIndex::Describe(*record));
  return result;
}

int64_t ModelCache::IdleBytes() const {
  MutexLock lock(&mu_);
  return records_->idle_bytes();
}

int64_t ModelCache::HeldBytes() const {
  MutexLock lock(&mu_);
  return records_->held_bytes();
}

Reclaimer::Held ModelCache::HeldByWhom() const {
  MutexLock lock(&mu_);
  return {.idle_bytes = records_->idle_bytes(), .groups = records_->HeldByWhom()};
}

void ModelCache::WillEnd(const std::string& owner) {
  {
    MutexLock lock(&mu_);
    for (const RecordPtr& record : records_->HeldBy(owner)) {
      record->holders.WillEnd(owner);
      for (auto& [device, there] : record->residency) there.holders.WillEnd(owner);
    }
  }
  ram_->waits()->LookAgain();
}

DropResult ModelCache::Drop(const ModelKey& pattern) {
  DropResult result;
  std::vector<RecordPtr> covered;  // ends after the mutex is let go
  MutexLock lock(&mu_);
  covered = records_->Covered(pattern, /*held_stay=*/false);
  for (const RecordPtr& record : covered) {
    const bool held = !record->holders.empty();
    ++(held ? result.stale_records : result.evicted_records);
    (held ? result.stale_bytes : result.evicted_bytes) += record->bytes;
    Evict(record, EvictReason::kDrop);
  }
  for (auto& [key, loading] : loading_) {
    if (pattern.Covers(key) || MadeFrom(loading->sources, pattern) ||
        TakeName(loading->names, key.component, pattern)) {
      loading->drop_when_done = true;
    }
  }
  return result;
}

DropResult ModelCache::Unload(const ModelKey& pattern) {
  DropResult result;
  std::vector<RecordPtr> covered;
  MutexLock lock(&mu_);
  covered = records_->Covered(pattern, /*held_stay=*/true);
  for (const RecordPtr& record : covered) {
    if (!record->holders.empty()) {
      ++result.busy_records;
      continue;
    }
    ++result.evicted_records;
    result.evicted_bytes += record->bytes;
    Evict(record, EvictReason::kDrop);
  }
  return result;
}

DropResult ModelCache::DropUnfit() {
  DropResult sum;
  size_t next = 0;
  for (bool more = true; more;) {
    std::vector<RecordPtr> part;  // ends after the mutex is let go
    {
      MutexLock lock(&mu_);
      more = records_->Next(&next, kLookAtOnce, &part);
    }
    for (RecordPtr& record : part) {
      const ModelKey key = record->key;
      const bool changed = !record->resource->Check().ok();
      const bool gone = !changed && !record->resource->at_its_place();
      record = nullptr;  // what is dropped is freed then
      if (!changed && !gone) continue;
      const DropResult one = changed ? Drop({key.id, ""}) : Unload(key);
      sum.evicted_records += one.evicted_records;
      sum.evicted_bytes += one.evicted_bytes;
      sum.stale_records += one.stale_records;
      sum.stale_bytes += one.stale_bytes;
      sum.busy_records += one.busy_records;
    }
  }
  return sum;
}

// ------------------------------------------------------------------------------------------ stats and end

CacheStats ModelCache::Stats() const {
  MutexLock one(&looking_);
  CacheStats stats;
  RecordIndex::Look look;
  {
    MutexLock lock(&mu_);
    stats = counters_;
    stats.record_bytes = records_->bytes();
    stats.recent_evictions.assign(recent_.begin(), recent_.end());
    for (Device* device : devices_) {
      if (device->uses_host_memory()) continue;
      DeviceStats& there = stats.devices[device->name()];
      there.budget = device->budget().stats();
      there.allocated_bytes = device->allocated_bytes();
      there.residency_bytes = records_->BytesOn(device);
      if (auto it = device_counters_.find(device); it != device_counters_.end()) {
        there.copies = it->second.copies;
        there.copied_bytes = it->second.copied_bytes;
        there.offloads = it->second.offloads;
        there.streamed_locks = it->second.streamed_locks;
      }
    }
    MutexLock leaving(&leaving_->mu);
    stats.leaving_bytes = leaving_->bytes;
    stats.ram = ram_->stats();
    stats.uses = order_;
    stats.conditioning_cap = ConditioningCap(conditioning_cap_, stats.ram.cap_bytes);
    records_->Begin(&look);
  }
  const absl::Time now = clock_();
  for (bool more = true; more;) {
    MutexLock lock(&mu_);
    more = records_->Continue(&look, kLookAtOnce);
  }
  for (RecordStats& record : look.records) {
    if (record.lock_count > 0) record.last_used = now;
  }
  RecordIndex::Sort(&look.records);
  stats.records = std::move(look.records);
  return stats;
}

std::optional<RecordStats> ModelCache::Find(const ModelKey& key) const {
  MutexLock lock(&mu_);
  const RecordPtr record = records_->Find(key);
  if (record == nullptr) return std::nullopt;
  return RecordIndex::Describe(*record);
}

std::vector<std::string> ModelCache::IdsThatBegin(const std::string& prefix) const {
  MutexLock lock(&mu_);
  return records_->IdsThatBegin(prefix);
}

int64_t ModelCache::longest_walk() const {
  MutexLock lock(&mu_);
  return records_->longest_walk();
}

absl::Status ModelCache::Shutdown(absl::Time deadline) {
  size_t held = 0;
  {
    MutexLock lock(&mu_);
    shutting_down_ = true;
    auto count_held = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return records_->held_records() + loading_.size();
    };
    while ((held = count_held()) > 0) {
      if (changed_.WaitWithDeadline(&mu_, deadline)) {
        held = count_held();
        break;
      }
    }
  }
  Trim(MemoryBudget::kUnlimited);
  if (held > 0) {
    return MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                     absl::StrCat(held, " records are still held at shutdown"),
                     {{"held_records", absl::StrCat(held)}});
  }
  return absl::OkStatus();
}

}  // namespace latentd
