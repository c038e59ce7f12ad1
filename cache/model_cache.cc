// Invariants, under mu_:
//  * a record is in index_ and lru_, or in stale_, or in neither (gone); never in two of these;
//  * a record outside of index_ with holders is in stale_, and leaves it with its last holder;
//  * a record's Reservation lives exactly as long as the record, so the budget counts it until nobody can
//    reach it any more. Records are let go outside of the mutex: freeing memory takes time.
#include "cache/model_cache.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "cache/error.h"

namespace latentd {

// A record's copy on a device that does not use host memory.
struct Residency {
  Reservation reservation;  // before `copy`: the bytes are given back after they are free
  std::shared_ptr<const Resource> copy;
  int64_t locks = 0;
  uint64_t last_used = 0;
  bool moving_in = false;  // being copied; whoever else wants it waits
};

struct CacheRecord {
  ModelKey key;
  std::string kind;
  Reservation reservation;  // before `resource`: the bytes are given back after they are free
  std::shared_ptr<const Resource> resource;

  // The rest is guarded by ModelCache::mu_.
  std::multiset<std::string> holders;  // one entry per lock
  std::map<Device*, Residency> residency;
  std::list<std::shared_ptr<CacheRecord>>::iterator lru;
  bool indexed = false;

  int64_t bytes() const { return resource->bytes(); }
};

// One load in progress; whoever wants its key waits here.
struct ModelCache::Loading {
  std::atomic<int> wanted{0};  // callers that still want the result
  bool done = false;           // guarded by mu_
  absl::Status status;         // guarded by mu_
  bool drop_when_done = false;  // guarded by mu_: the key was dropped meanwhile
  RecordPtr record;            // guarded by mu_
  std::map<int, std::function<void(int64_t, int64_t)>> listeners;  // guarded by listeners_mu
  Mutex listeners_mu;
  int next_listener = 0;
};

class ModelCache::DeviceReclaimer : public Reclaimer {
 public:
  DeviceReclaimer(ModelCache* cache, Device* device) : cache_(cache), device_(device) {}
  int64_t Reclaim(int64_t bytes) override { return cache_->ReclaimDevice(device_, bytes); }
  Held HeldBytes() const override { return cache_->HeldOnDevice(device_); }

 private:
  ModelCache* const cache_;
  Device* const device_;
};

// ---------------------------------------------------------------------------------------------- handles

LockHandle& LockHandle::operator=(LockHandle&& other) noexcept {
  if (this != &other) {
    Release();
    cache_ = std::exchange(other.cache_, nullptr);
    record_ = std::move(other.record_);
    owner_ = std::move(other.owner_);
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
  cache_->Unlock(std::move(record_), owner_);
  record_ = nullptr;
  cache_ = nullptr;
}

DeviceLock& DeviceLock::operator=(DeviceLock&& other) noexcept {
  if (this != &other) {
    Release();
    handle_ = std::move(other.handle_);
    device_ = std::exchange(other.device_, nullptr);
    resource_ = std::move(other.resource_);
    working_ = std::move(other.working_);
  }
  return *this;
}

void DeviceLock::Release() {
  if (device_ == nullptr) return;
  working_.Release();
  resource_ = nullptr;
  if (!device_->uses_host_memory()) handle_.cache_->UnlockDevice(handle_.record_, device_);
  device_ = nullptr;
  handle_.Release();
}

// ------------------------------------------------------------------------------------------------ cache

ModelCache::ModelCache(RamBudget* ram, std::vector<Device*> devices)
    : ram_(ram), devices_(std::move(devices)) {
  ram_->set_reclaimer(this);
  for (Device* device : devices_) {
    if (device->uses_host_memory()) continue;
    device_reclaimers_.push_back(std::make_unique<DeviceReclaimer>(this, device));
    device->budget().set_reclaimer(device_reclaimers_.back().get());
    device->budget().ShareWaits(*ram_);
  }
}

ModelCache::~ModelCache() {
  Trim(MemoryBudget::kUnlimited);
  ram_->set_reclaimer(nullptr);
  for (Device* device : devices_) {
    if (!device->uses_host_memory()) device->budget().set_reclaimer(nullptr);
  }
}

LockHandle ModelCache::AddLock(const RecordPtr& record, const std::string& owner) {
  record->holders.insert(owner);
  if (record->indexed) lru_.splice(lru_.end(), lru_, record->lru);
  return LockHandle(this, record, owner);
}

void ModelCache::Unlock(RecordPtr record, const std::string& owner) {
  bool reclaimable = false;
  {
    MutexLock lock(&mu_);
    record->holders.erase(record->holders.find(owner));
    if (record->holders.empty()) {
      reclaimable = true;
      if (!record->indexed) stale_.erase(record);
      changed_.SignalAll();
    }
  }
  record = nullptr;  // frees a stale record
  if (reclaimable) ram_->NotifyReclaimable();
}

void ModelCache::UnlockDevice(const RecordPtr& record, Device* device) {
  {
    MutexLock lock(&mu_);
    --record->residency[device].locks;
  }
  device->budget().NotifyReclaimable();
}

absl::StatusOr<LockHandle> ModelCache::Lock(const ModelKey& key, const Loader& loader,
                                            const LockOptions& options) {
  return LockWith(key, loader, options, nullptr);
}

absl::StatusOr<LockHandle> ModelCache::LockWith(const ModelKey& key, const Loader& loader,
                                                const LockOptions& options, Reservation* promised) {
  std::stop_callback wake(options.stop, [this] {
    MutexLock lock(&mu_);
    changed_.SignalAll();
  });

  std::shared_ptr<Loading> loading;
  bool mine = false;
  {
    MutexLock lock(&mu_);
    if (shutting_down_) {
      return MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the server is shutting down");
    }
    if (auto it = index_.find(key); it != index_.end()) {
      ++counters_.hits;
      return AddLock(it->second, options.owner);
    }
    auto [it, inserted] = loading_.try_emplace(key);
    if (inserted) {
      it->second = std::make_shared<Loading>();
      ++counters_.misses;
      mine = true;
    }
    loading = it->second;
    ++loading->wanted;
  }
  int listener = -1;
  if (options.progress) {
    MutexLock lock(&loading->listeners_mu);
    listener = loading->next_listener++;
    loading->listeners[listener] = options.progress;
  }
  auto stop_listening = [&] {
    if (listener < 0) return;
    MutexLock lock(&loading->listeners_mu);
    loading->listeners.erase(listener);
  };

  if (mine) {
    // The load goes on while anybody wants it; this caller stops wanting it when its stop is requested.
    absl::StatusOr<LockHandle> result = [&] {
      std::stop_callback unwanted(options.stop, [&] { --loading->wanted; });
      return Load(key, loader, options, loading, promised);
    }();
    stop_listening();
    return result;
  }

  absl::StatusOr<LockHandle> result = absl::CancelledError();
  bool again = false;
  {
    // What this owner holds meanwhile is in the way of the load, should that wait for memory.
    const WaitRegistry::Entry entry(ram_->waits(), options.owner, /*refusable=*/false);
    MutexLock lock(&mu_);
    while (!loading->done) {
      if (options.stop.stop_requested()) {
        result = MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while waiting for a load");
        break;
      }
      if (changed_.WaitWithDeadline(&mu_, options.deadline) && !loading->done) {
        result = MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                           absl::StrCat("deadline passed while ", key.ToString(), " was being loaded"));
        break;
      }
    }
    --loading->wanted;
    if (loading->done) {
      if (loading->status.ok()) {
        ++counters_.hits;
        result = AddLock(loading->record, options.owner);
      } else if (absl::IsCancelled(loading->status)) {
        again = true;  // whoever loaded it gave up just before this caller came
      } else {
        result = loading->status;
      }
    }
  }
  stop_listening();
  if (again) return LockWith(key, loader, options, promised);
  return result;
}

absl::StatusOr<LockHandle> ModelCache::Load(const ModelKey& key, const Loader& loader,
                                            const LockOptions& options,
                                            const std::shared_ptr<Loading>& loading, Reservation* promised) {
  auto load = [&]() -> absl::StatusOr<RecordPtr> {
    Reservation reservation;
    if (promised != nullptr && promised->bytes() >= loader.estimated_bytes) {
      reservation = promised->Split(loader.estimated_bytes);
    } else {
      auto reserved = ram_->Reserve({.bytes = loader.estimated_bytes,
                                     .owner = options.owner,
                                     .what = absl::StrCat(loader.kind, " ", key.ToString()),
                                     .deadline = options.deadline,
                                     .stop = options.stop});
      if (!reserved.ok()) return reserved.status();
      reservation = std::move(*reserved);
    }
    LoadContext context([&] { return loading->wanted.load() <= 0; },
                        [&](int64_t done, int64_t total) {
                          MutexLock lock(&loading->listeners_mu);
                          for (auto& [id, listener] : loading->listeners) listener(done, total);
                        });
    absl::StatusOr<std::shared_ptr<const Resource>> resource = loader.load(context);
    if (!resource.ok()) return resource.status();
    if ((*resource)->bytes() > reservation.bytes()) {
      return MakeError(absl::StatusCode::kInternal, "ESTIMATE_TOO_LOW",
                       absl::StrCat(key.ToString(), " is larger than its files said: ", (*resource)->bytes(),
                                    " bytes, promised ", reservation.bytes()));
    }
    reservation.ShrinkTo((*resource)->bytes());
    auto record = std::make_shared<CacheRecord>();
    record->key = key;
    record->kind = loader.kind;
    record->reservation = std::move(reservation);
    record->resource = std::move(*resource);
    return record;
  };

  absl::StatusOr<RecordPtr> record = load();

  MutexLock lock(&mu_);
  loading_.erase(key);
  loading->done = true;
  loading->status = record.status();
  changed_.SignalAll();
  if (!record.ok()) {
    ++counters_.load_failures;
    return record.status();
  }
  loading->record = *record;
  (*record)->reservation.Commit();
  counters_.bytes_loaded += (*record)->bytes();
  if (loading->drop_when_done) {
    stale_.insert(*record);
  } else {
    (*record)->indexed = true;
    (*record)->lru = lru_.insert(lru_.end(), *record);
    index_.emplace(key, *record);
  }
  return AddLock(*record, options.owner);
}

absl::StatusOr<std::vector<LockHandle>> ModelCache::LockAll(absl::Span<const LockRequest> requests,
                                                            const LockOptions& options) {
  // What is there is locked first, so that making room for the rest cannot evict it.
  std::vector<LockHandle> handles(requests.size());
  std::vector<size_t> missing;
  int64_t missing_bytes = 0;
  {
    MutexLock lock(&mu_);
    if (shutting_down_) {
      return MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the server is shutting down");
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      auto it = index_.find(requests[i].key);
      if (it != index_.end()) {
        ++counters_.hits;
        handles[i] = AddLock(it->second, options.owner);
      } else {
        missing.push_back(i);
        missing_bytes += requests[i].loader.estimated_bytes;
      }
    }
  }
  if (missing.empty()) return handles;

  std::string what = missing.size() == 1
                         ? absl::StrCat(requests[missing[0]].loader.kind, " ", requests[missing[0]].key.ToString())
                         : absl::StrCat("a set of ", missing.size(), " records");
  ASSIGN_OR_RETURN(Reservation promised, ram_->Reserve({.bytes = missing_bytes,
                                                        .owner = options.owner,
                                                        .what = std::move(what),
                                                        .deadline = options.deadline,
                                                        .stop = options.stop}));
  std::sort(missing.begin(), missing.end(),
            [&](size_t a, size_t b) { return requests[a].key < requests[b].key; });
  for (size_t i : missing) {
    ASSIGN_OR_RETURN(handles[i], LockWith(requests[i].key, requests[i].loader, options, &promised));
  }
  return handles;
}

absl::StatusOr<DeviceLock> ModelCache::LockOnDevice(const LockHandle& handle, Device& device,
                                                    const DeviceLockOptions& options) {
  DeviceLock result;
  result.handle_ = handle.Share(options.owner);
  const RecordPtr record = result.handle_.record_;
  RETURN_IF_ERROR(record->resource->Check());

  auto reserve = [&](int64_t bytes, const std::string& what) {
    return device.budget().Reserve({.bytes = bytes,
                                    .owner = options.owner,
                                    .what = what,
                                    .deadline = options.deadline,
                                    .stop = options.stop});
  };
  if (options.working_bytes > 0) {
    ASSIGN_OR_RETURN(result.working_, reserve(options.working_bytes,
                                              absl::StrCat("working memory of ", record->kind)));
  }
  if (device.uses_host_memory()) {
    result.resource_ = record->resource;
    result.device_ = &device;
    return result;
  }

  // Single flight per record and device: the first caller copies, the others wait.
  {
    MutexLock lock(&mu_);
    std::optional<WaitRegistry::Entry> entry;
    while (record->residency[&device].moving_in) {
      if (!entry) entry.emplace(ram_->waits(), options.owner, /*refusable=*/false);
      if (options.stop.stop_requested()) {
        return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while weights moved to a device");
      }
      changed_.WaitWithTimeout(&mu_, absl::Milliseconds(50));  // a stop does not signal this
    }
    Residency& there = record->residency[&device];
    if (there.copy != nullptr) {
      ++there.locks;
      result.resource_ = there.copy;
      result.device_ = &device;
      return result;
    }
    there.moving_in = true;
  }
  auto copy = [&]() -> absl::StatusOr<Residency> {
    Residency there;
    ASSIGN_OR_RETURN(there.reservation, reserve(record->resource->device_bytes(),
                                                absl::StrCat(record->kind, " ", record->key.ToString())));
    ASSIGN_OR_RETURN(there.copy, record->resource->CopyTo(device, options.stop));
    there.reservation.Commit();
    there.locks = 1;
    return there;
  }();

  MutexLock lock(&mu_);
  changed_.SignalAll();
  if (!copy.ok()) {
    record->residency.erase(&device);
    return copy.status();
  }
  result.resource_ = copy->copy;
  result.device_ = &device;
  record->residency[&device] = std::move(*copy);
  return result;
}

void ModelCache::Evict(const RecordPtr& record, std::vector<RecordPtr>& gone) {
  gone.push_back(record);
  record->indexed = false;
  lru_.erase(record->lru);
  index_.erase(record->key);
}

int64_t ModelCache::EvictUnlocked(int64_t bytes, int64_t CacheStats::*counter) {
  std::vector<RecordPtr> gone;
  int64_t freed = 0;
  {
    MutexLock lock(&mu_);
    for (auto it = lru_.begin(); it != lru_.end() && freed < bytes;) {
      RecordPtr record = *it++;
      if (!record->holders.empty()) continue;
      freed += record->bytes();
      Evict(record, gone);
      ++(counters_.*counter);
    }
  }
  return freed;
}

int64_t ModelCache::Reclaim(int64_t bytes) { return EvictUnlocked(bytes, &CacheStats::evictions); }

int64_t ModelCache::Trim(int64_t bytes) { return EvictUnlocked(bytes, &CacheStats::trimmed); }

Reclaimer::Held ModelCache::HeldBytes() const {
  MutexLock lock(&mu_);
  Held held;
  auto add = [&](const RecordPtr& record) {
    if (record->holders.empty()) return;
    held.bytes += record->bytes();
    held.owners.insert(record->holders.begin(), record->holders.end());
  };
  for (const RecordPtr& record : lru_) add(record);
  for (const RecordPtr& record : stale_) add(record);
  return held;
}

int64_t ModelCache::ReclaimDevice(Device* device, int64_t bytes) {
  std::vector<Residency> gone;
  int64_t freed = 0;
  MutexLock lock(&mu_);
  std::vector<RecordPtr> there;
  for (const RecordPtr& record : lru_) {
    auto it = record->residency.find(device);
    if (it != record->residency.end() && it->second.locks == 0 && !it->second.moving_in) there.push_back(record);
  }
  std::stable_sort(there.begin(), there.end(), [](const RecordPtr& a, const RecordPtr& b) {
    return a->resource->device_bytes() < b->resource->device_bytes();
  });
  for (const RecordPtr& record : there) {
    if (freed >= bytes) break;
    auto it = record->residency.find(device);
    freed += it->second.reservation.bytes();
    gone.push_back(std::move(it->second));
    record->residency.erase(it);
  }
  return freed;
}

Reclaimer::Held ModelCache::HeldOnDevice(Device* device) const {
  MutexLock lock(&mu_);
  Held held;
  auto add = [&](const RecordPtr& record) {
    auto it = record->residency.find(device);
    if (it == record->residency.end() || it->second.locks == 0) return;
    held.bytes += it->second.reservation.bytes();
    held.owners.insert(record->holders.begin(), record->holders.end());
  };
  for (const RecordPtr& record : lru_) add(record);
  for (const RecordPtr& record : stale_) add(record);
  return held;
}

DropResult ModelCache::Drop(const ModelKey& pattern) {
  DropResult result;
  std::vector<RecordPtr> gone;
  MutexLock lock(&mu_);
  for (auto it = lru_.begin(); it != lru_.end();) {
    RecordPtr record = *it++;
    if (!pattern.Covers(record->key)) continue;
    if (record->holders.empty()) {
      ++result.evicted_records;
      result.evicted_bytes += record->bytes();
      Evict(record, gone);
    } else {
      ++result.stale_records;
      result.stale_bytes += record->bytes();
      Evict(record, gone);
      stale_.insert(record);
    }
    ++counters_.dropped;
  }
  for (auto& [key, loading] : loading_) {
    if (pattern.Covers(key)) loading->drop_when_done = true;
  }
  return result;
}

CacheStats ModelCache::Stats() const {
  MutexLock lock(&mu_);
  CacheStats stats = counters_;
  auto add = [&](const RecordPtr& record, bool stale) {
    RecordStats r;
    r.key = record->key;
    r.kind = record->kind;
    r.bytes = record->bytes();
    r.lock_count = static_cast<int64_t>(record->holders.size());
    r.holders.assign(record->holders.begin(), record->holders.end());
    r.stale = stale;
    for (const auto& [device, there] : record->residency) {
      if (there.copy == nullptr) continue;
      r.residency.push_back({device->name(), there.reservation.bytes(), there.locks});
    }
    stats.record_bytes += r.bytes;
    stats.records.push_back(std::move(r));
  };
  for (const RecordPtr& record : lru_) add(record, false);
  for (const RecordPtr& record : stale_) add(record, true);
  stats.ram = ram_->stats();
  for (Device* device : devices_) {
    if (!device->uses_host_memory()) stats.devices[device->name()] = device->budget().stats();
  }
  return stats;
}

absl::Status ModelCache::Shutdown(absl::Time deadline) {
  size_t held = 0;
  {
    MutexLock lock(&mu_);
    shutting_down_ = true;
    auto count_held = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      size_t n = stale_.size() + loading_.size();
      for (const RecordPtr& record : lru_) n += record->holders.empty() ? 0 : 1;
      return n;
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
