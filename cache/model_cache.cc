// Invariants, under mu_:
//  * a record is in index_, or in stale_, or in neither (gone); never in both;
//  * a record outside of index_ with holders is in stale_, and leaves it with its last holder;
//  * a record that is gone and whose memory is not yet free is counted in leaving_.
// Records are let go outside of the mutex: freeing memory takes time.
#include "cache/model_cache.h"

#include <algorithm>
#include <atomic>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/cache_record.h"
#include "cache/error.h"

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

// One load in progress; whoever wants its key waits here.
struct ModelCache::Loading {
  struct Waiter {
    const std::string& owner;
    bool lasting = false;
    LockHandle handle = {};
  };

  std::atomic<int> wanted{0};   // callers that still want the result
  bool done = false;            // guarded by mu_
  absl::Status status;          // guarded by mu_
  bool others_try = false;      // guarded by mu_: the error is about the caller who loaded, not about the key
  bool drop_when_done = false;  // guarded by mu_: the key, or a source, was dropped meanwhile
  std::vector<std::string> sources;  // constant
  std::set<std::string> names;       // guarded by mu_: of all who want it
  // Guarded by mu_. They get their locks together with the one who loads, and not when they get to run: until
  // then the record could be evicted.
  std::vector<Waiter*> waiters;
  Waiting waiting;                                                 // guarded by mu_
  std::map<int, std::function<void(int64_t, int64_t)>> listeners;  // guarded by listeners_mu
  Mutex listeners_mu;
  int next_listener = 0;
};

namespace {

constexpr size_t kRecentEvictions = 64;

// Loaders do not throw. Should one all the same, those who wait for it must hear of it.
absl::StatusOr<std::shared_ptr<const Resource>> LoadWithoutThrowing(const Loader& loader,
                                                                    const LoadContext& context) {
  try {
    return loader.load(context);
  } catch (const std::bad_alloc&) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat("there was no memory to load a ", loader.kind));
  } catch (const std::exception& e) {
    // LibTorch says so in words.
    const absl::string_view text = e.what();
    if (absl::StrContains(text, "DefaultCPUAllocator")) {
      return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                       absl::StrCat("there was no memory to load a ", loader.kind));
    }
    return MakeError(absl::StatusCode::kInternal, "LOAD_FAILED",
                     absl::StrCat("loading a ", loader.kind, " failed: ", text.substr(0, text.find('\n'))));
  }
}

bool MadeFrom(const std::vector<std::string>& sources, const ModelKey& pattern) {
  return std::any_of(sources.begin(), sources.end(), [&](const std::string& id) {
    return pattern.Covers({id, ""});
  });
}

void AddName(std::set<std::string>& names, const std::string& name) {
  if (!name.empty()) names.insert(name);
}

// Takes off the names that `pattern` covers. True when that leaves none.
bool TakeNames(std::set<std::string>& names, const std::string& component, const ModelKey& pattern) {
  return std::erase_if(names,
                       [&](const std::string& name) {
                         return pattern.Covers({name, component});
                       }) > 0 &&
         names.empty();
}

absl::Status ShuttingDown() {
  return MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the server is shutting down");
}

}  // namespace

// ---------------------------------------------------------------------------------------------- handles

LockHandle& LockHandle::operator=(LockHandle&& other) noexcept {
  if (this != &other) {
    Release();
    cache_ = std::exchange(other.cache_, nullptr);
    record_ = std::move(other.record_);
    owner_ = std::move(other.owner_);
    lasting_ = other.lasting_;
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
  cache_->Unlock(std::move(record_), owner_, lasting_, counts_);
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
  record->load_seconds = seconds;
  record->resource = Accounted::Pointer(accounted);
  record->accounted = accounted;
  return record;
}

void ModelCache::Index(const RecordPtr& record) {
  record->indexed = true;
  index_.emplace(record->key, record);
}

LockHandle ModelCache::AddLock(const RecordPtr& record, const std::string& owner, bool lasting) {
  record->holders.Add(owner, lasting);
  order_.Use(record->worth, record->cost());
  return LockHandle(this, record, owner, lasting, /*counts=*/true);
}

void ModelCache::Unlock(RecordPtr record, const std::string& owner, bool lasting, bool counts) {
  bool free = false;
  {
    MutexLock lock(&mu_);
    record->holders.Remove(owner, lasting);
    if (counts) {  // it was in use until now
      record->last_used = clock_();
      order_.Use(record->worth, record->cost());
    }
    if (record->holders.empty()) {
      free = true;
      if (!record->indexed && stale_.erase(record) != 0) {
        auto accounted = record->accounted.lock();
        MutexLock leaving(&leaving_->mu);
        accounted->left = true;
        leaving_->bytes += record->bytes;
      }
      if (shutting_down_) changed_.SignalAll();
    }
  }
  record = nullptr;  // frees a stale record
  if (free) ram_->NotifyReclaimable();
}

void ModelCache::Evict(const RecordPtr& record, EvictReason reason) {
  record->indexed = false;
  index_.erase(record->key);
  // What goes for another reason than its place in the order says nothing about the worth of the rest.
  if (reason == EvictReason::kRoom || reason == EvictReason::kTrim) order_.Evict(record->worth);
  ++counters_.evictions[static_cast<size_t>(reason)];
  recent_.push_back(
      {record->key, {record->names.begin(), record->names.end()}, record->bytes, reason, clock_()});
  if (recent_.size() > kRecentEvictions) recent_.pop_front();
  if (!record->holders.empty()) {
    stale_.insert(record);
    return;
  }
  auto accounted = record->accounted.lock();
  MutexLock leaving(&leaving_->mu);
  accounted->left = true;
  leaving_->bytes += record->bytes;
}

std::vector<ModelCache::RecordPtr> ModelCache::Victims(int64_t bytes) const {
  std::vector<RecordPtr> unlocked;
  for (const auto& [key, record] : index_) {
    if (record->holders.empty()) unlocked.push_back(record);
  }
  std::sort(unlocked.begin(), unlocked.end(),
            [](const RecordPtr& a, const RecordPtr& b) { return a->worth < b->worth; });
  int64_t freed = 0;
  size_t n = 0;
  while (n < unlocked.size() && freed < bytes) freed += unlocked[n++]->bytes;
  unlocked.resize(n);
  return unlocked;
}

int64_t ModelCache::EvictUnlocked(int64_t bytes, EvictReason reason) {
  int64_t freed = 0;
  std::vector<RecordPtr> gone;
  {
    MutexLock lock(&mu_);
    gone = Victims(bytes);
    for (const RecordPtr& record : gone) {
      freed += record->bytes;
      Evict(record, reason);
    }
  }
  return freed;
}

int64_t ModelCache::Reclaim(int64_t bytes) {
  return bytes <= 0 ? 0 : EvictUnlocked(bytes, EvictReason::kRoom);
}

int64_t ModelCache::Trim(int64_t bytes) { return EvictUnlocked(bytes, EvictReason::kTrim); }

int64_t ModelCache::EvictUnusedSince(absl::Time time) {
  int64_t freed = 0;
  std::vector<RecordPtr> gone;
  MutexLock lock(&mu_);
  for (const auto& [key, record] : index_) {
    if (record->holders.empty() && record->last_used <= time) gone.push_back(record);
  }
  for (const RecordPtr& record : gone) {
    freed += record->bytes;
    Evict(record, EvictReason::kKeepAlive);
  }
  return freed;
}

std::vector<RecordStats> ModelCache::WouldEvict(int64_t bytes) const {
  MutexLock lock(&mu_);
  std::vector<RecordStats> result;
  if (bytes <= 0) return result;
  int64_t freed = 0;
  for (const RecordPtr& record : Victims(bytes)) {
    freed += record->bytes;
    result.push_back(Describe(*record, /*stale=*/false));
  }
  if (freed < bytes) result.clear();
  return result;
}

Reclaimer::Held ModelCache::HeldBytes() const {
  MutexLock lock(&mu_);
  Held held;
  ForEachRecord([&](const RecordPtr& record, bool) {
    if (record->holders.empty()) return;
    held.bytes += record->bytes;
    for (const Holders::Holder& holder : record->holders.all()) held.owners.insert(holder.owner);
  });
  return held;
}

void ModelCache::WillEnd(const std::string& owner) {
  {
    MutexLock lock(&mu_);
    ForEachRecord([&](const RecordPtr& record, bool) {
      record->holders.WillEnd(owner);
      for (auto& [device, there] : record->residency) there.holders.WillEnd(owner);
    });
  }
  ram_->NotifyReclaimable();
}

std::vector<ModelCache::RecordPtr> ModelCache::Covered(const ModelKey& pattern, bool held_stay) {
  std::vector<RecordPtr> covered;
  for (const auto& [key, record] : index_) {
    if (pattern.Covers(key) || MadeFrom(record->sources, pattern)) {
      covered.push_back(record);
    } else if (!record->names.empty()) {
      std::set<std::string> left = record->names;
      const bool last = TakeNames(left, key.component, pattern);
      if (last) covered.push_back(record);
      if (!last || !held_stay || record->holders.empty()) record->names = std::move(left);
    }
  }
  return covered;
}

DropResult ModelCache::Drop(const ModelKey& pattern) {
  DropResult result;
  std::vector<RecordPtr> covered;  // ends after the mutex is let go
  MutexLock lock(&mu_);
  covered = Covered(pattern, /*held_stay=*/false);
  for (const RecordPtr& record : covered) {
    const bool held = !record->holders.empty();
    ++(held ? result.stale_records : result.evicted_records);
    (held ? result.stale_bytes : result.evicted_bytes) += record->bytes;
    Evict(record, EvictReason::kDrop);
  }
  for (auto& [key, loading] : loading_) {
    if (pattern.Covers(key) || MadeFrom(loading->sources, pattern) ||
        TakeNames(loading->names, key.component, pattern)) {
      loading->drop_when_done = true;
    }
  }
  return result;
}

DropResult ModelCache::Unload(const ModelKey& pattern) {
  DropResult result;
  std::vector<RecordPtr> covered;
  MutexLock lock(&mu_);
  covered = Covered(pattern, /*held_stay=*/true);
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
  std::vector<std::pair<ModelKey, std::shared_ptr<const Resource>>> all;
  {
    MutexLock lock(&mu_);
    for (const auto& [key, record] : index_) all.emplace_back(key, record->resource);
  }
  DropResult sum;
  for (auto& [key, resource] : all) {
    const bool changed = !resource->Check().ok();
    const bool gone = !changed && !resource->at_its_place();
    resource = nullptr;
    if (!changed && !gone) continue;
    const DropResult one = changed ? Drop({key.id, ""}) : Unload(key);
    sum.evicted_records += one.evicted_records;
    sum.evicted_bytes += one.evicted_bytes;
    sum.stale_records += one.stale_records;
    sum.stale_bytes += one.stale_bytes;
    sum.busy_records += one.busy_records;
  }
  return sum;
}

// -------------------------------------------------------------------------------------------------- locks

LockHandle ModelCache::TryLock(const ModelKey& key, const std::string& owner) {
  MutexLock lock(&mu_);
  auto it = index_.find(key);
  if (it == index_.end() || shutting_down_) return {};
  ++counters_.hits;
  return AddLock(it->second, owner);
}

LockHandle ModelCache::Peek(const ModelKey& key, const std::string& owner) {
  MutexLock lock(&mu_);
  auto it = index_.find(key);
  if (it == index_.end() || shutting_down_) return {};
  it->second->holders.Add(owner, /*lasting=*/false);
  return LockHandle(this, it->second, owner, /*lasting=*/false, /*counts=*/false);
}

absl::StatusOr<LockHandle> ModelCache::Insert(const ModelKey& key, const std::string& kind,
                                              std::shared_ptr<const Resource> resource, Reservation memory,
                                              double seconds, const std::string& owner,
                                              std::vector<std::string> sources) {
  if (resource->bytes() > memory.bytes()) {
    return MakeError(
        absl::StatusCode::kInternal, "ESTIMATE_TOO_LOW",
        absl::StrCat(key.ToString(), " is ", resource->bytes(), " bytes, promised ", memory.bytes()));
  }
  memory.ShrinkTo(resource->bytes());
  const MemoryUse use = memory.use();
  RecordPtr record = NewRecord(key, kind, use, std::move(resource), std::move(memory), seconds);
  record->sources = std::move(sources);
  MutexLock lock(&mu_);
  if (shutting_down_) return ShuttingDown();
  if (auto it = index_.find(key); it != index_.end()) return AddLock(it->second, owner);
  record->accounted.lock()->memory.Commit();
  Index(record);
  return AddLock(record, owner);
}

absl::StatusOr<LockHandle> ModelCache::Lock(const ModelKey& key, const Loader& loader,
                                            const LockOptions& options) {
  {
    MutexLock lock(&mu_);
    if (shutting_down_) return ShuttingDown();
    if (auto it = index_.find(key); it != index_.end()) {
      ++counters_.hits;
      AddName(it->second->names, loader.name);
      return AddLock(it->second, options.owner, options.lasting);
    }
  }
  return LockWith(key, loader, options, nullptr);
}

absl::StatusOr<LockHandle> ModelCache::LockWith(const ModelKey& key, const Loader& loader,
                                                const LockOptions& options, Reservation* promised) {
  std::stop_callback wake(options.stop, [this] {
    MutexLock lock(&mu_);
    changed_.SignalAll();
  });

  std::shared_ptr<Loading> loading;
  Loading::Waiter me{options.owner, options.lasting};
  std::optional<WaitRegistry::Entry> entry;  // ends after the mutex is let go
  bool mine = false;
  {
    MutexLock lock(&mu_);
    if (shutting_down_) return ShuttingDown();
    if (auto it = index_.find(key); it != index_.end()) {
      ++counters_.hits;
      AddName(it->second->names, loader.name);
      return AddLock(it->second, options.owner, options.lasting);
    }
    auto [it, inserted] = loading_.try_emplace(key);
    if (inserted) {
      it->second = std::make_shared<Loading>();
      it->second->sources = loader.sources;
      ++counters_.misses;
      mine = true;
    }
    loading = it->second;
    AddName(loading->names, loader.name);
    ++loading->wanted;
    if (!mine) {
      // What this owner holds meanwhile is in the way of the load, should that wait for memory.
      entry.emplace(ram_->waits(), options.owner, absl::StrCat("the load of ", key.ToString()),
                    /*refusable=*/false);
      loading->waiters.push_back(&me);
      loading->waiting.Add(&*entry);
    }
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
    loading->waiting.Remove(&*entry);
    std::erase(loading->waiters, &me);
    --loading->wanted;
    if (loading->done) {
      if (loading->status.ok()) {
        ++counters_.hits;
        result = std::move(me.handle);
      } else if (loading->others_try || absl::IsCancelled(loading->status)) {
        again = true;  // whoever loaded it gave up, or got no memory: for its deadline or for what it holds
      } else {
        result = loading->status;
      }
    }
  }
  stop_listening();
  entry.reset();
  if (again) return LockWith(key, loader, options, promised);
  return result;
}

absl::StatusOr<LockHandle> ModelCache::Load(const ModelKey& key, const Loader& loader,
                                            const LockOptions& options,
                                            const std::shared_ptr<Loading>& loading, Reservation* promised) {
  bool promise_refused = false;
  auto load = [&]() -> absl::StatusOr<RecordPtr> {
    Reservation memory;
    if (promised != nullptr && promised->bytes() >= loader.estimated_bytes) {
      memory = promised->Split(loader.estimated_bytes, loader.use);
    } else {
      auto granted = ram_->Reserve({.bytes = loader.estimated_bytes,
                                    .use = loader.use,
                                    .owner = options.owner,
                                    .what = absl::StrCat(loader.kind, " ", key.ToString()),
                                    .deadline = options.deadline,
                                    .stop = options.stop});
      promise_refused = !granted.ok();
      ASSIGN_OR_RETURN(memory, std::move(granted));
    }
    LoadContext context([&] { return loading->wanted.load() <= 0; },
                        [&](int64_t done, int64_t total) {
                          MutexLock lock(&loading->listeners_mu);
                          for (auto& [id, listener] : loading->listeners) listener(done, total);
                        });
    const absl::Time start = clock_();
    ASSIGN_OR_RETURN(std::shared_ptr<const Resource> resource, LoadWithoutThrowing(loader, context));
    const double seconds = absl::ToDoubleSeconds(clock_() - start);
    if (resource->bytes() > memory.bytes()) {
      return MakeError(absl::StatusCode::kInternal, "ESTIMATE_TOO_LOW",
                       absl::StrCat(key.ToString(), " is larger than its files said: ", resource->bytes(),
                                    " bytes, promised ", memory.bytes()));
    }
    memory.ShrinkTo(resource->bytes());
    RecordPtr record =
        NewRecord(key, loader.kind, loader.use, std::move(resource), std::move(memory), seconds);
    record->sources = loader.sources;
    return record;
  };

  absl::StatusOr<RecordPtr> record = load();

  MutexLock lock(&mu_);
  loading_.erase(key);
  loading->done = true;
  loading->status = record.status();
  loading->others_try = promise_refused;
  loading->waiting.Over();
  changed_.SignalAll();
  if (!record.ok()) {
    ++counters_.load_failures;
    return record.status();
  }
  (*record)->accounted.lock()->memory.Commit();
  (*record)->names = loading->names;
  counters_.bytes_loaded += (*record)->bytes;
  if (loading->drop_when_done) {
    stale_.insert(*record);
  } else if (index_.count(key) != 0) {
    stale_.insert(*record);  // computed and inserted by somebody else meanwhile
  } else {
    Index(*record);
  }
  for (Loading::Waiter* waiter : loading->waiters)
    waiter->handle = AddLock(*record, waiter->owner, waiter->lasting);
  return AddLock(*record, options.owner, options.lasting);
}

absl::StatusOr<std::vector<LockHandle>> ModelCache::LockAll(absl::Span<const LockRequest> requests,
                                                            const LockOptions& options) {
  // What is there is locked first, so that making room for the rest cannot evict it.
  std::vector<LockHandle> handles(requests.size());
  std::vector<size_t> missing;
  int64_t missing_bytes = 0;
  {
    MutexLock lock(&mu_);
    if (shutting_down_) return ShuttingDown();
    for (size_t i = 0; i < requests.size(); ++i) {
      auto it = index_.find(requests[i].key);
      if (it != index_.end()) {
        ++counters_.hits;
        AddName(it->second->names, requests[i].loader.name);
        handles[i] = AddLock(it->second, options.owner, options.lasting);
      } else {
        missing.push_back(i);
        missing_bytes += requests[i].loader.estimated_bytes;
      }
    }
  }
  if (missing.empty()) return handles;

  std::string what = missing.size() == 1 ? absl::StrCat(requests[missing[0]].loader.kind, " ",
                                                        requests[missing[0]].key.ToString())
                                         : absl::StrCat("a set of ", missing.size(), " records");
  ASSIGN_OR_RETURN(Reservation promised, ram_->Reserve({.bytes = missing_bytes,
                                                        .use = requests[missing[0]].loader.use,
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

// ------------------------------------------------------------------------------------------ stats and end

RecordStats ModelCache::Describe(const CacheRecord& record, bool stale) const {
  RecordStats r;
  r.key = record.key;
  r.names.assign(record.names.begin(), record.names.end());
  r.kind = record.kind;
  r.use = record.use;
  r.bytes = record.bytes;
  r.lock_count = static_cast<int64_t>(record.holders.size());
  r.holders = record.holders.Owners();
  r.stale = stale;
  r.load_seconds = record.load_seconds;
  r.last_used = record.holders.empty() ? record.last_used : clock_();
  for (const auto& [device, there] : record.residency) {
    if (there.copy == nullptr) continue;
    int64_t full = 0;
    for (const ResourceBlock& block : record.resource->device_blocks()) full += block.bytes;
    r.residency.push_back({device->name(), there.bytes, full, static_cast<int64_t>(there.holders.size())});
  }
  return r;
}

CacheStats ModelCache::Stats() const {
  MutexLock lock(&mu_);
  CacheStats stats = counters_;
  std::vector<std::pair<GreedyDual::Worth, RecordStats>> sorted;
  std::vector<RecordStats> stale;
  ForEachRecord([&](const RecordPtr& record, bool is_stale) ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    RecordStats r = Describe(*record, is_stale);
    stats.record_bytes += r.bytes;
    for (const ResidencyStats& there : r.residency)
      stats.devices[there.device].residency_bytes += there.bytes;
    if (is_stale) {
      stale.push_back(std::move(r));
    } else {
      sorted.emplace_back(record->worth, std::move(r));
    }
  });
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [worth, r] : sorted) stats.records.push_back(std::move(r));
  std::move(stale.begin(), stale.end(), std::back_inserter(stats.records));
  stats.recent_evictions.assign(recent_.begin(), recent_.end());
  for (Device* device : devices_) {
    if (device->uses_host_memory()) continue;
    DeviceStats& there = stats.devices[device->name()];
    there.budget = device->budget().stats();
    there.allocated_bytes = device->allocated_bytes();
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
  return stats;
}

absl::Status ModelCache::Shutdown(absl::Time deadline) {
  size_t held = 0;
  {
    MutexLock lock(&mu_);
    shutting_down_ = true;
    auto count_held = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      size_t n = stale_.size() + loading_.size();
      for (const auto& [key, record] : index_) n += record->holders.empty() ? 0 : 1;
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
