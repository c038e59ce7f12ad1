// How records get into the cache, and locks are taken on them: who loads, who waits for whose load, and what
// sets of records promise for each other.
#include <algorithm>
#include <atomic>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/admission.h"
#include "cache/base/error.h"
#include "cache/cache_loading.h"
#include "cache/cache_record.h"
#include "cache/load_set.h"
#include "cache/model_cache.h"
#include "cache/record_index.h"

namespace latentd {
namespace {

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

absl::Status ShuttingDown() {
  return MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the server is shutting down");
}

}  // namespace

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
                                  .what = PurposeOfRecord(loader.kind, key.ToString()),
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
      }
    }
  }
  const LoadSet set = SetToLoad(requests, std::move(missing));
  std::vector<ModelKey> keys;
  for (size_t i : set.order) keys.push_back(requests[i].key);

  Reservation promised;
  if (!set.order.empty()) {
    auto granted = ram_->Reserve({.bytes = set.bytes,
                                  .use = requests[set.order[0]].loader.use,
                                  .owner = options.owner,
                                  .what = set.what,
                                  .deadline = options.deadline,
                                  .stop = options.stop});
    if (!granted.ok()) {
      Abandon(keys, granted.status());
      return granted.status();
    }
    promised = *std::move(granted);
  }
  for (size_t n = 0; n < set.order.size(); ++n) {
    const size_t i = set.order[n];
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

}  // namespace latentd
