// The registry of everything that is loaded: components, patches. One for all devices.
//
// Whoever uses a record owns a handle to it. Look-up and lock are one step, so that between the two nothing
// can be evicted; there is no way to get at a record without a lock.
//
//        Lock (absent)            loaded                last handle goes
//   absent ────────────▶ loading ────────▶ locked ◀───────────────────▶ idle
//     ▲                     │ failed         │ Drop         Lock          │ evicted, Trim, Drop
//     │◀────────────────────┘                ▼                           │
//     │                                    stale                         │
//     │◀──────── last handle goes ───────────┘                           │
//     └◀─────────────────────────────────────────────────────────────────┘
//
// A stale record is out of the index: its holders keep it, a new Lock loads anew. Its bytes are counted
// until the last holder lets go. So at all times, with no load in progress:
//
//     RamBudget in_use_bytes  =  Σ bytes of the records in Stats()
//
// Thread-safe. Lock() may block (disk, memory): call it from a loader thread, never from an executor or an
// RPC thread. The cache must outlive its handles, the budget and the devices must outlive the cache.
//
//   ASSIGN_OR_RETURN(LockHandle h, cache.Lock(key, loader, {.owner = session}));
//   const WeightSet& weights = h.As<WeightSet>();
//   ASSIGN_OR_RETURN(DeviceLock d, cache.LockOnDevice(h, device, {.working_bytes = n, .owner = session}));
#ifndef LATENTD_CACHE_MODEL_CACHE_H_
#define LATENTD_CACHE_MODEL_CACHE_H_

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "cache/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cache/device.h"
#include "cache/memory_budget.h"
#include "cache/model_key.h"
#include "cache/resource.h"

namespace latentd {

class ModelCache;
struct CacheRecord;

// What a load gets from the cache, and reports to it. Used on the loading thread only.
class LoadContext {
 public:
  LoadContext(std::function<bool()> cancelled, std::function<void(int64_t, int64_t)> progress)
      : cancelled_(std::move(cancelled)), progress_(std::move(progress)) {}

  // True when nobody wants the result any more. A loader checks it at least once per tensor and then
  // returns CANCELLED.
  bool cancelled() const { return cancelled_(); }

  // Bytes read so far, of how many.
  void Progress(int64_t done, int64_t total) const { progress_(done, total); }

 private:
  std::function<bool()> cancelled_;
  std::function<void(int64_t, int64_t)> progress_;
};

// How to make a record that is not there.
struct Loader {
  std::string kind;             // "transformer", "lora", …; shown in statistics
  int64_t estimated_bytes = 0;  // upper bound of the resource's bytes(); reserved before `load` runs
  std::function<absl::StatusOr<std::shared_ptr<const Resource>>(const LoadContext&)> load;
};

struct LockOptions {
  std::string owner = {};  // who holds the lock: shown as a holder, and decides who waits for whom
  absl::Time deadline = absl::InfiniteFuture();
  std::stop_token stop = {};
  std::function<void(int64_t done, int64_t total)> progress = {};  // called while loading; may be empty
};

struct LockRequest {
  ModelKey key;
  Loader loader;
};

struct DeviceLockOptions {
  std::string owner = {};
  int64_t working_bytes = 0;  // activations of the work that the lock is for
  absl::Time deadline = absl::InfiniteFuture();
  std::stop_token stop = {};
};

// Keeps a record in memory. Move-only. An empty one holds nothing.
class LockHandle {
 public:
  LockHandle() = default;
  LockHandle(LockHandle&& other) noexcept { *this = std::move(other); }
  LockHandle& operator=(LockHandle&& other) noexcept;
  LockHandle(const LockHandle&) = delete;
  LockHandle& operator=(const LockHandle&) = delete;
  ~LockHandle() { Release(); }

  explicit operator bool() const { return record_ != nullptr; }
  const ModelKey& key() const;
  const std::shared_ptr<const Resource>& resource() const;

  // REQUIRES: the record holds a T.
  template <typename T>
  const T& As() const {
    return static_cast<const T&>(*resource());
  }

  // A second lock on the same record, for the same or another owner. REQUIRES: not empty.
  LockHandle Share(std::string owner = "") const;

  void Release();

 private:
  friend class ModelCache;
  friend class DeviceLock;
  LockHandle(ModelCache* cache, std::shared_ptr<CacheRecord> record, std::string owner)
      : cache_(cache), record_(std::move(record)), owner_(std::move(owner)) {}

  ModelCache* cache_ = nullptr;
  std::shared_ptr<CacheRecord> record_;
  std::string owner_;
};

// Keeps a record usable on one device, and the working memory of what is done with it promised. Holds a
// lock on the record too, so handle and device lock may end in any order.
class DeviceLock {
 public:
  DeviceLock() = default;
  DeviceLock(DeviceLock&& other) noexcept { *this = std::move(other); }
  DeviceLock& operator=(DeviceLock&& other) noexcept;
  ~DeviceLock() { Release(); }

  explicit operator bool() const { return device_ != nullptr; }
  Device& device() const { return *device_; }

  // The record as it is on the device; for a device that uses host memory, the host's own.
  const std::shared_ptr<const Resource>& resource() const { return resource_; }
  template <typename T>
  const T& As() const {
    return static_cast<const T&>(*resource_);
  }

  void Release();

 private:
  friend class ModelCache;
  LockHandle handle_;
  Device* device_ = nullptr;
  std::shared_ptr<const Resource> resource_;
  Reservation working_;
};

struct ResidencyStats {
  std::string device;
  int64_t bytes = 0;
  int64_t lock_count = 0;
};

struct RecordStats {
  ModelKey key;
  std::string kind;
  int64_t bytes = 0;
  int64_t lock_count = 0;
  std::vector<std::string> holders;  // one entry per lock, sorted
  bool stale = false;
  std::vector<ResidencyStats> residency;
};

struct CacheStats {
  std::vector<RecordStats> records;  // least recently used first; stale ones last
  MemoryBudget::Stats ram;
  std::map<std::string, MemoryBudget::Stats> devices;  // those with a budget of their own
  int64_t record_bytes = 0;                            // Σ bytes of `records`
  int64_t hits = 0;
  int64_t misses = 0;    // loads started
  int64_t load_failures = 0;
  int64_t evictions = 0;  // to make room
  int64_t trimmed = 0;    // by Trim
  int64_t dropped = 0;    // by Drop
  int64_t bytes_loaded = 0;
};

struct DropResult {
  int64_t evicted_records = 0;
  int64_t evicted_bytes = 0;
  int64_t stale_records = 0;  // locked ones: they go at their last unlock
  int64_t stale_bytes = 0;
};

class ModelCache : public Reclaimer {
 public:
  // `ram` is charged for every record. `devices` are those of the process.
  ModelCache(RamBudget* ram, std::vector<Device*> devices);
  ~ModelCache() override;

  // Finds or loads a record and locks it. Concurrent calls for one absent key load once; a load goes on as
  // long as one of its callers wants it. Errors: those of the loader, of MemoryBudget::Reserve, CANCELLED,
  // DEADLINE_EXCEEDED, UNAVAILABLE SHUTTING_DOWN.
  absl::StatusOr<LockHandle> Lock(const ModelKey& key, const Loader& loader, const LockOptions& options);

  // All or nothing, in the order of `requests`. Memory for what is missing is promised up front and records
  // are taken in key order, so that two callers cannot block each other.
  absl::StatusOr<std::vector<LockHandle>> LockAll(absl::Span<const LockRequest> requests,
                                                  const LockOptions& options);

  // Makes the handle's record usable on `device`. Errors: those of Reserve on the device's budget and of
  // Device; UNAVAILABLE SHUTTING_DOWN.
  absl::StatusOr<DeviceLock> LockOnDevice(const LockHandle& handle, Device& device,
                                          const DeviceLockOptions& options);

  // Removes what `pattern` covers (ModelKey::Covers): unlocked records now, locked ones when their last
  // handle goes.
  DropResult Drop(const ModelKey& pattern);

  // Evicts unlocked records, least recently used first, until `bytes` are freed. Returns the bytes freed.
  int64_t Trim(int64_t bytes);

  CacheStats Stats() const;
  RamBudget& ram() const { return *ram_; }

  // Refuses new locks, waits for handles to end until `deadline`, then evicts everything. Errors:
  // DEADLINE_EXCEEDED with the number of records that are still held.
  absl::Status Shutdown(absl::Time deadline);

  // Reclaimer of the RamBudget.
  int64_t Reclaim(int64_t bytes) override;
  Held HeldBytes() const override;

 private:
  friend class LockHandle;
  friend class DeviceLock;
  class DeviceReclaimer;
  struct Loading;

  using RecordPtr = std::shared_ptr<CacheRecord>;

  absl::StatusOr<LockHandle> LockWith(const ModelKey& key, const Loader& loader, const LockOptions& options,
                                      Reservation* promised);
  absl::StatusOr<LockHandle> Load(const ModelKey& key, const Loader& loader, const LockOptions& options,
                                  const std::shared_ptr<Loading>& loading, Reservation* promised);
  LockHandle AddLock(const RecordPtr& record, const std::string& owner) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Unlock(RecordPtr record, const std::string& owner);
  void UnlockDevice(const RecordPtr& record, Device* device);
  // Takes an unlocked record out of the cache; the caller lets the pointers go after the mutex.
  void Evict(const RecordPtr& record, std::vector<RecordPtr>& gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t EvictUnlocked(int64_t bytes, int64_t CacheStats::*counter);
  int64_t ReclaimDevice(Device* device, int64_t bytes);
  Held HeldOnDevice(Device* device) const;

  RamBudget* const ram_;
  const std::vector<Device*> devices_;
  std::vector<std::unique_ptr<DeviceReclaimer>> device_reclaimers_;

  mutable Mutex mu_;
  CondVar changed_;
  bool shutting_down_ ABSL_GUARDED_BY(mu_) = false;
  absl::flat_hash_map<ModelKey, RecordPtr> index_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<ModelKey, std::shared_ptr<Loading>> loading_ ABSL_GUARDED_BY(mu_);
  std::list<RecordPtr> lru_ ABSL_GUARDED_BY(mu_);  // everything in index_, least recently used first
  std::set<RecordPtr> stale_ ABSL_GUARDED_BY(mu_);
  CacheStats counters_ ABSL_GUARDED_BY(mu_);  // only the counters are used
};

}  // namespace latentd

#endif  // LATENTD_CACHE_MODEL_CACHE_H_
