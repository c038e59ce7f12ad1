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
#include "cache/cache_record.h"
#include "cache/error.h"
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

// One load in progress, or claimed and not begun; whoever else wants its key waits here.
struct ModelCache::Loading {
  struct Waiter {
    std::string owner;
    bool lasting = false;
    LockHandle handle = {};
  };

  std::atomic<int> wanted{0};   // callers that still want the result
  bool done = false;            // guarded by mu_
  absl::Status status;          // guarded by mu_
  bool others_try = false;      // guarded by mu_: the error is about the caller who loaded, not about the key
  bool drop_when_done = false;  // guarded by mu_: the key, or a source, was dropped meanwhile
  std::vector<std::string> sources;  // constant
  std::string loader;                // constant: the owner who loads
  std::set<std::string> names;       // guarded by mu_: of all who want it
  // Guarded by mu_. They get their locks together with the one who loads, and not when they get to run: until
  // then the record could be evicted.
  std::vector<Waiter*> waiters;
  Waiting waiting;                                                 // guarded by mu_
  std::map<int, std::function<void(int64_t, int64_t)>> listeners;  // guarded by listeners_mu
  Mutex listeners_mu;
  int next_listener = 0;
};

// Hears of a load's progress, until its end.
class Listening {
 public:
  template <typename L>
  Listening(const std::shared_ptr<L>& loading, const std::function<void(int64_t, int64_t)>& listener) {
    if (!listener) return;
    MutexLock lock(&loading->listeners_mu);
    const int number = loading->next_listener++;
    loading->listeners[number] = listener;
    stop_ = [loading, number] {
      MutexLock stop_lock(&loading->listeners_mu);
      loading->listeners.erase(number);
    };
  }
  ~Listening() {
    if (stop_) stop_();
  }
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;

 private:
  std::function<void()> stop_;
};

// A part in somebody else's load: from its making on it gets the lock with the end of the load.
class ModelCache::Joined {
 public:
  // `name`: as Loader::name.
  Joined(ModelCache* cache, const ModelKey& key, const std::string& name, std::shared_ptr<Loading> loading,
         const LockOptions& options) ABSL_EXCLUSIVE_LOCKS_REQUIRED(cache->mu_)
      : cache_(cache), key_(key), loading_(std::move(loading)), me_{options.owner, options.lasting} {
    if (!name.empty()) loading_->names.insert(name);
    ++loading_->wanted;
    loading_->waiters.push_back(&me_);
  }
  ~Joined() {
    MutexLock lock(&cache_->mu_);
    Leave();
  }
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;

  // Empty: whoever loads gave up, or got no memory, for its deadline or for what it holds.
  absl::StatusOr<std::optional<LockHandle>> Wait(const LockOptions& options) {
    const Listening listening(loading_, options.progress);
    std::optional<WaitRegistry::Entry> entry;  // ends after the mutex is let go
    MutexLock lock(&cache_->mu_);
    if (!loading_->done) {
      // What this owner holds meanwhile is in the way of the load, should that wait for memory.
      entry.emplace(cache_->ram_->waits(), me_.owner, absl::StrCat("the load of ", key_.ToString()),
                    loading_->loader);
      loading_->waiting.Add(&*entry);
    }
    absl::Status status;
    while (!loading_->done && status.ok()) {
      if (options.stop.stop_requested()) {
        status = MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while waiting for a load");
      } else if (cache_->changed_.WaitWithDeadline(&cache_->mu_, options.deadline) && !loading_->done) {
        status = MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                           absl::StrCat("deadline passed while ", key_.ToString(), " was being loaded"));
      }
    }
    if (entry) loading_->waiting.Remove(&*entry);
    Leave();
    if (!status.ok()) return status;
    if (loading_->status.ok()) {
      ++cache_->counters_.hits;
      return std::move(me_.handle);
    }
    if (loading_->others_try || absl::IsCancelled(loading_->status)) return std::nullopt;
    return loading_->status;
  }

  const ModelKey& key() const { return key_; }

 private:
  void Leave() ABSL_EXCLUSIVE_LOCKS_REQUIRED(cache_->mu_) {
    if (left_) return;
    left_ = true;
    std::erase(loading_->waiters, &me_);
    --loading_->wanted;
  }

  ModelCache* const cache_;
  const ModelKey key_;
  const std::shared_ptr<Loading> loading_;
  Loading::Waiter me_;
  bool left_ = false;
};

namespace {

constexpr size_t kRecentEvictions = 64;
constexpr int64_t kConditioningShare = 16;  // of the RAM's cap, one part of so many

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
  // What goes for another reason than its place in the order says nothing about the worth of the rest, and
  // conditioning's place is not by its worth.
  if ((reason == EvictReason::kRoom || reason == EvictReason::kTrim) &&
      record->use != MemoryUse::kConditioning) {
    order_.Evict(record->worth);
  }
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
  std::vector<RecordPtr> gone = records_->ConditioningBeyond(
      conditioning_cap_ > 0 ? conditioning_cap_ : ram_->cap_bytes() / kConditioningShare);
  EvictAll(gone, EvictReason::kRoom);
  return gone;
}

void ModelCache::set_conditioning_cap(int64_t bytes) {
  MutexLock lock(&mu_);
  conditioning_cap_ = bytes;
}

int64_t ModelCache::conditioning_cap() const {
  MutexLock lock(&mu_);
  return conditioning_cap_ > 0 ? conditioning_cap_ : ram_->cap_bytes() / kConditioningShare;
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

// -------------------------------------------------------------------------------------------------- locks

LockHandle ModelCache::TryLock(const ModelKey& key, const std::string& owner) {
  MutexLock lock(&mu_);
  const RecordPtr record = records_->Find(key);
  if (record == nullptr || shutting_down_) return {};
  ++counters_.hits;
  return AddLock(record, owner);
}

LockHandle ModelCache::Peek(const ModelKey& key, const std::string& owner) {
  MutexLock lock(&mu_);
  const RecordPtr record = records_->Find(key);
  if (record == nullptr || shutting_down_) return {};
  uint64_t number = 0;
  records_->Change(record, [&] { number = record->holders.Add(owner, /*lasting=*/false); });
  return LockHandle(this, record, owner, number, /*counts=*/false);
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
  std::vector<RecordPtr> gone;  // ends after the mutex is let go
  MutexLock lock(&mu_);
  if (shutting_down_) return ShuttingDown();
  if (const RecordPtr there = records_->Find(key); there != nullptr) return AddLock(there, owner);
  record->accounted.lock()->memory.Commit();
  records_->Insert(record, /*stale=*/false);
  LockHandle handle = AddLock(record, owner);
  gone = BoundConditioning(*record);
  return handle;
}

absl::StatusOr<LockHandle> ModelCache::Lock(const ModelKey& key, const Loader& loader,
                                            const LockOptions& options) {
  {
    MutexLock lock(&mu_);
    if (shutting_down_) return ShuttingDown();
    if (const RecordPtr record = records_->Find(key); record != nullptr) {
      ++counters_.hits;
      records_->AddName(record, loader.name);
      return AddLock(record, options.owner, options.lasting);
    }
  }
  return LockWith(key, loader, options);
}

absl::StatusOr<LockHandle> ModelCache::LockWith(const ModelKey& key, const Loader& loader,
                                                const LockOptions& options) {
  std::stop_callback wake(options.stop, [this] {
    MutexLock lock(&mu_);
    changed_.SignalAll();
  });
  while (true) {
    std::shared_ptr<Loading> mine;
    std::optional<Joined> joined;  // ends after the mutex is let go
    {
      MutexLock lock(&mu_);
      if (shutting_down_) return ShuttingDown();
      if (const RecordPtr record = records_->Find(key); record != nullptr) {
        ++counters_.hits;
        records_->AddName(record, loader.name);
        return AddLock(record, options.owner, options.lasting);
      }
      if (auto it = loading_.find(key); it != loading_.end()) {
        joined.emplace(this, key, loader.name, it->second, options);
      } else {
        mine = Claim(key, loader, options.owner);
      }
    }
    if (mine != nullptr) return Load(key, loader, options, mine, nullptr);
    ASSIGN_OR_RETURN(std::optional<LockHandle> handle, joined->Wait(options));
    if (handle) return *std::move(handle);
  }
}

std::shared_ptr<ModelCache::Loading> ModelCache::Claim(const ModelKey& key, const Loader& loader,
                                                       const std::string& owner) {
  auto loading = std::make_shared<Loading>();
  loading->sources = loader.sources;
  loading->loader = owner;
  if (!loader.name.empty()) loading->names.insert(loader.name);
  ++loading->wanted;
  loading_[key] = loading;
  return loading;
}

void ModelCache::LoadIsOver(const ModelKey& key, const absl::Status& status, bool others_try) {
  const std::shared_ptr<Loading> loading = loading_[key];
  loading_.erase(key);
  loading->done = true;
  loading->status = status;
  loading->others_try = others_try;
  loading->waiting.Over();
  changed_.SignalAll();
}

void ModelCache::Abandon(absl::Span<const ModelKey> keys, const absl::Status& why) {
  MutexLock lock(&mu_);
  for (const ModelKey& key : keys) LoadIsOver(key, why, /*others_try=*/true);
}

absl::StatusOr<ModelCache::RecordPtr> ModelCache::LoadRecord(const ModelKey& key, const Loader& loader,
                                                             const LockOptions& options,
                                                             const std::shared_ptr<Loading>& loading,
                                                             Reservation* promised, bool* promise_refused) {
  Reservation memory;
  if (promised != nullptr) {
    memory = promised->Split(loader.estimated_bytes, loader.use);
  } else {
    auto granted = ram_->Reserve({.bytes = loader.estimated_bytes,
                                  .use = loader.use,
                                  .owner = options.owner,
                                  .what = absl::StrCat(loader.kind, " ", key.ToString()),
                                  .deadline = options.deadline,
                                  .stop = options.stop});
    *promise_refused = !granted.ok();
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
  RecordPtr record = NewRecord(key, loader.kind, loader.use, std::move(resource), std::move(memory), seconds);
  record->sources = loader.sources;
  return record;
}

absl::StatusOr<LockHandle> ModelCache::Load(const ModelKey& key, const Loader& loader,
                                            const LockOptions& options,
                                            const std::shared_ptr<Loading>& loading, Reservation* promised) {
  {
    MutexLock lock(&mu_);
    ++counters_.misses;
  }
  bool promise_refused = false;
  absl::StatusOr<RecordPtr> record = [&] {
    const Listening listening(loading, options.progress);
    // The load goes on while anybody wants it; this caller stops wanting it when its stop is requested.
    std::stop_callback unwanted(options.stop, [&] { --loading->wanted; });
    return LoadRecord(key, loader, options, loading, promised, &promise_refused);
  }();

  std::vector<RecordPtr> gone;  // ends after the mutex is let go
  MutexLock lock(&mu_);
  LoadIsOver(key, record.status(), promise_refused);
  if (!record.ok()) {
    ++counters_.load_failures;
    return record.status();
  }
  (*record)->accounted.lock()->memory.Commit();
  (*record)->names = loading->names;
  counters_.bytes_loaded += (*record)->bytes;
  // Somebody else may have computed and inserted it meanwhile.
  records_->Insert(*record, /*stale=*/loading->drop_when_done || records_->Find(key) != nullptr);
  for (Loading::Waiter* waiter : loading->waiters)
    waiter->handle = AddLock(*record, waiter->owner, waiter->lasting);
  LockHandle handle = AddLock(*record, options.owner, options.lasting);
  gone = BoundConditioning(**record);
  return handle;
}

absl::StatusOr<std::vector<LockHandle>> ModelCache::LockAll(absl::Span<const LockRequest> requests,
                                                            const LockOptions& asked) {
  // Until all are had, none is lasting: should the rest be refused, they go.
  LockOptions options = asked;
  options.lasting = false;
  std::stop_callback wake(options.stop, [this] {
    MutexLock lock(&mu_);
    changed_.SignalAll();
  });
  // What is there is locked first, so that making room for the rest cannot evict it; what others load is
  // joined; what is left is claimed, so that nobody else loads it. Nobody waits for a claim who was there
  // before it.
  std::vector<LockHandle> handles(requests.size());
  std::vector<size_t> missing;
  std::vector<std::shared_ptr<Loading>> claims(requests.size());
  std::vector<std::unique_ptr<Joined>> joined(requests.size());
  int64_t missing_bytes = 0;
  {
    MutexLock lock(&mu_);
    if (shutting_down_) return ShuttingDown();
    for (size_t i = 0; i < requests.size(); ++i) {
      const ModelKey& key = requests[i].key;
      if (const RecordPtr record = records_->Find(key); record != nullptr) {
        ++counters_.hits;
        records_->AddName(record, requests[i].loader.name);
        handles[i] = AddLock(record, options.owner, options.lasting);
      } else if (auto it = loading_.find(key); it != loading_.end()) {
        joined[i] = std::make_unique<Joined>(this, key, requests[i].loader.name, it->second, options);
      } else {
        claims[i] = Claim(key, requests[i].loader, options.owner);
        missing.push_back(i);
        missing_bytes += requests[i].loader.estimated_bytes;
      }
    }
  }
  std::sort(missing.begin(), missing.end(),
            [&](size_t a, size_t b) { return requests[a].key < requests[b].key; });
  std::vector<ModelKey> keys;
  for (size_t i : missing) keys.push_back(requests[i].key);

  Reservation promised;
  if (!missing.empty()) {
    const Loader& first = requests[missing[0]].loader;
    auto granted =
        ram_->Reserve({.bytes = missing_bytes,
                       .use = first.use,
                       .owner = options.owner,
                       .what = missing.size() == 1 ? absl::StrCat(first.kind, " ", keys[0].ToString())
                                                   : absl::StrCat("a set of ", missing.size(), " records"),
                       .deadline = options.deadline,
                       .stop = options.stop});
    if (!granted.ok()) {
      Abandon(keys, granted.status());
      return granted.status();
    }
    promised = *std::move(granted);
  }
  for (size_t n = 0; n < missing.size(); ++n) {
    const size_t i = missing[n];
    auto handle = Load(keys[n], requests[i].loader, options, claims[i], &promised);
    if (!handle.ok()) {
      Abandon(absl::MakeConstSpan(keys).subspan(n + 1), handle.status());
      return handle.status();
    }
    handles[i] = *std::move(handle);
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    if (joined[i] == nullptr) continue;
    ASSIGN_OR_RETURN(std::optional<LockHandle> handle, joined[i]->Wait(options));
    if (!handle) {
      ASSIGN_OR_RETURN(handle, Lock(requests[i].key, requests[i].loader, options));
    }
    handles[i] = *std::move(handle);
  }
  if (asked.lasting) {
    for (LockHandle& handle : handles) HandOver(handle, options.owner, /*lasting=*/true);
  }
  return handles;
}

void ModelCache::HandOver(LockHandle& handle, const std::string& owner, bool lasting) {
  MutexLock lock(&mu_);
  records_->Change(handle.record_, [&] {
    handle.record_->holders.Remove(handle.number_);
    handle.number_ = handle.record_->holders.Add(owner, lasting);
  });
  handle.owner_ = owner;
  ram_->waits()->LookAgain();
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
