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
//     RamBudget in_use_bytes  =  Σ bytes of the records in Stats()  +  of those whose memory is being freed
//
// Records go in the order of GreedyDual (greedy_dual.h): by what it costs to load them again, against how
// long ago they were used. Conditioning goes when it is the least recently used, or beyond a share of its
// own. On a device with memory of its own a record's copy is its residency: none, part, all. One host copy
// serves all devices.
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
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cache/base/greedy_dual.h"
#include "cache/base/mutex.h"
#include "cache/cache_stats.h"
#include "cache/device.h"
#include "cache/lock_handle.h"
#include "cache/memory_budget.h"
#include "cache/model_key.h"
#include "cache/residency_choice.h"
#include "cache/resource.h"

namespace latentd {

struct LeavingBytes;
class RecordIndex;

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
  std::function<absl::StatusOr<std::shared_ptr<const Resource>>(const LoadContext&)> load = {};
  MemoryUse use = MemoryUse::kWeights;    // one of those that records are made of
  std::vector<std::string> sources = {};  // ids of what it was made from: dropping one of them drops it too
  // Of a record that several models may share: the id of the one that asks. Dropping it drops the record when
  // nobody else has asked for it by another name. Empty: the record's key is its only name.
  std::string name = {};
};

struct LockOptions {
  std::string owner = {};  // who holds the lock: shown as a holder, and decides who waits for whom
  absl::Time deadline = absl::InfiniteFuture();
  std::stop_token stop = {};
  std::function<void(int64_t done, int64_t total)> progress = {};  // called while loading; may be empty
  // The lock is kept until somebody from outside says otherwise: a pin, the LoRAs of a session. Who waits for
  // memory cannot count on it. Locks of running work are not: they go at its end.
  bool lasting = false;
};

struct LockRequest {
  ModelKey key;
  Loader loader;
};

struct DeviceLockOptions {
  std::string owner = {};
  int64_t working_bytes = 0;  // activations of the work that the lock is for
  ResidencyMode mode = ResidencyMode::kAuto;
  int32_t ring_slots = 2;         // blocks in the ring of what is streamed
  std::vector<bool> blocks = {};  // when not empty: these (and what stays) instead of `mode`, and no ring
  absl::Time deadline = absl::InfiniteFuture();
  std::stop_token stop = {};
  // Without, what cannot be had at once is refused with BUDGET_EXHAUSTED: for callers that have another way.
  // Copies are still waited for; somebody else's wait for memory is not.
  bool may_wait = true;
  bool lasting = false;  // of what is held on the device, as in LockOptions
};

class ModelCache : public Reclaimer {
 public:
  using Clock = std::function<absl::Time()>;

  // `ram` is charged for every record. `devices` are those of the process. `clock` measures loads and ages.
  ModelCache(RamBudget* ram, std::vector<Device*> devices, Clock clock = absl::Now);
  ~ModelCache() override;

  // Finds or loads a record and locks it. Concurrent calls for one absent key load once; a load goes on as
  // long as one of its callers wants it. Errors: those of the loader, of MemoryBudget::Reserve, CANCELLED,
  // DEADLINE_EXCEEDED, UNAVAILABLE SHUTTING_DOWN.
  absl::StatusOr<LockHandle> Lock(const ModelKey& key, const Loader& loader, const LockOptions& options);

  // All or nothing, in the order of `requests`. What others load already is waited for; memory for the rest
  // is promised up front, and nobody else loads it from then on, so that two callers cannot block each other.
  absl::StatusOr<std::vector<LockHandle>> LockAll(absl::Span<const LockRequest> requests,
                                                  const LockOptions& options);

  // Locks a record that is there; an empty handle when it is not. Never blocks.
  LockHandle TryLock(const ModelKey& key, const std::string& owner);

  // The same for a look at it: counts as no use, neither as a hit nor in the order of eviction.
  LockHandle Peek(const ModelKey& key, const std::string& owner);

  // Makes a record of something that was computed, and locks it; when there is one of that key already, that
  // one is locked instead. `memory` is its promise, of at least its bytes; `seconds` is what it cost. Never
  // blocks. Errors: UNAVAILABLE SHUTTING_DOWN; INTERNAL ESTIMATE_TOO_LOW.
  absl::StatusOr<LockHandle> Insert(const ModelKey& key, const std::string& kind,
                                    std::shared_ptr<const Resource> resource, Reservation memory,
                                    double seconds, const std::string& owner,
                                    std::vector<std::string> sources = {});

  // Makes the handle's record usable on `device`, as `options.mode` says. Errors: those of Reserve on the
  // device's budget and of Device; UNAVAILABLE SHUTTING_DOWN.
  absl::StatusOr<DeviceLock> LockOnDevice(const LockHandle& handle, Device& device,
                                          const DeviceLockOptions& options);

  // From now on the lock is `owner`'s, and lasting or not (LockOptions::lasting). REQUIRES: not empty.
  void HandOver(LockHandle& handle, const std::string& owner, bool lasting);
  void HandOver(DeviceLock& lock, const std::string& owner, bool lasting);

  // `owner` comes to its end by itself: its locks are not lasting any more.
  void WillEnd(const std::string& owner);

  // Removes what `pattern` covers (ModelKey::Covers), and what was made from it: unlocked records now, locked
  // ones when their last handle goes. Of records with names (Loader::name), those that it leaves none.
  DropResult Drop(const ModelKey& pattern);

  // Removes what `pattern` covers and nobody holds; the rest stays, and can be locked again.
  DropResult Unload(const ModelKey& pattern);

  // Drops what cannot be trusted any more (Resource::Check), and what was made from it; unloads what is not
  // at its place. Looks at files: not from an RPC or executor thread.
  DropResult DropUnfit();

  // Evicts unlocked records in order until `bytes` are freed. Returns the bytes freed.
  int64_t Trim(int64_t bytes);

  // Evicts unlocked records that nobody took or let go of since `time`. Returns the bytes freed.
  int64_t EvictUnusedSince(absl::Time time);

  // Takes unlocked copies off a device, until `bytes` are freed there: the least recently used, less those
  // that are not needed for that after all. Returns the bytes freed.
  int64_t Offload(Device& device, int64_t bytes) { return ReclaimDevice(&device, bytes); }

  // What making room for so many bytes would evict from host memory, in order; nothing when that cannot be
  // made. Changes nothing.
  std::vector<RecordStats> WouldEvict(int64_t bytes) const;

  // A snapshot of one moment. Made in pieces, so that nobody waits for all of it.
  CacheStats Stats() const;

  // The record that Lock would find, as it is in Stats.
  std::optional<RecordStats> Find(const ModelKey& key) const;
  // Ids of records, stale ones aside, that begin with `prefix`; sorted.
  std::vector<std::string> IdsThatBegin(const std::string& prefix) const;

  // Conditioning of more bytes than this goes when it is not held, whatever else is there. 0, as in the
  // beginning: a sixteenth of the RAM's cap.
  void set_conditioning_cap(int64_t bytes);
  int64_t conditioning_cap() const;

  // The most records that anything looked at while it kept others from the cache, apart from those that it
  // evicted or locked. For tests.
  int64_t longest_walk() const;

  RamBudget& ram() const { return *ram_; }
  const std::vector<Device*>& devices() const { return devices_; }

  // Refuses new locks, waits for handles to end until `deadline`, then evicts everything. Errors:
  // DEADLINE_EXCEEDED with the number of records that are still held.
  absl::Status Shutdown(absl::Time deadline);

  // Reclaimer of the RamBudget.
  int64_t Reclaim(int64_t bytes) override;
  int64_t IdleBytes() const override;
  int64_t HeldBytes() const override;
  Held HeldByWhom() const override;

 private:
  friend class LockHandle;
  friend class DeviceLock;
  class DeviceReclaimer;
  class Joined;
  class MovingIn;
  struct Loading;
  struct DeviceCounters {
    int64_t copies = 0, copied_bytes = 0, offloads = 0, streamed_locks = 0;
  };

  using RecordPtr = std::shared_ptr<CacheRecord>;

  absl::StatusOr<LockHandle> LockWith(const ModelKey& key, const Loader& loader, const LockOptions& options);
  std::shared_ptr<Loading> Claim(const ModelKey& key, const Loader& loader, const std::string& owner)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<LockHandle> Load(const ModelKey& key, const Loader& loader, const LockOptions& options,
                                  const std::shared_ptr<Loading>& loading, Reservation* promised);
  absl::StatusOr<RecordPtr> LoadRecord(const ModelKey& key, const Loader& loader, const LockOptions& options,
                                       const std::shared_ptr<Loading>& loading, Reservation* promised,
                                       bool* promise_refused);
  // The loads of claims that come to nothing; whoever waits for them tries for itself.
  void Abandon(absl::Span<const ModelKey> keys, const absl::Status& why);
  void LoadIsOver(const ModelKey& key, const absl::Status& status, bool others_try)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  RecordPtr NewRecord(const ModelKey& key, const std::string& kind, MemoryUse use,
                      std::shared_ptr<const Resource> resource, Reservation memory, double seconds);
  LockHandle AddLock(const RecordPtr& record, const std::string& owner, bool lasting = false)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `number`: the lock's among the record's holders.
  void Unlock(RecordPtr record, uint64_t number, bool counts);

  // Takes a record out of the index; the caller lets the pointer go after the mutex.
  void Evict(const RecordPtr& record, EvictReason reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Of many, the bytes.
  int64_t EvictAll(const std::vector<RecordPtr>& records, EvictReason reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t EvictUnlocked(int64_t bytes, EvictReason reason);
  // What goes because of the conditioning that came, for the caller to let go of.
  std::vector<RecordPtr> BoundConditioning(const CacheRecord& came) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Leaves(const RecordPtr& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Devices, in model_cache_devices.cc.
  // Sets result.number_ to the one among the holders of what is on the device.
  absl::Status TakeTurn(const RecordPtr& record, Device& device, const DeviceLockOptions& options,
                        DeviceLock& result);
  absl::Status MoveIn(const RecordPtr& record, Device& device, const DeviceLockOptions& options,
                      DeviceLock& lock);
  void UnlockDevice(const RecordPtr& record, Device* device, uint64_t number);
  int64_t ReclaimDevice(Device* device, int64_t bytes);
  int64_t IdleBytesOn(Device* device) const;
  int64_t HeldBytesOn(Device* device) const;
  Held HeldByWhomOn(Device* device) const;

  RamBudget* const ram_;
  const std::vector<Device*> devices_;
  const Clock clock_;
  std::vector<std::unique_ptr<DeviceReclaimer>> device_reclaimers_;
  const std::shared_ptr<LeavingBytes> leaving_;

  mutable Mutex mu_;
  CondVar changed_;
  bool shutting_down_ ABSL_GUARDED_BY(mu_) = false;
  const std::unique_ptr<RecordIndex> records_ ABSL_PT_GUARDED_BY(mu_);
  absl::flat_hash_map<ModelKey, std::shared_ptr<Loading>> loading_ ABSL_GUARDED_BY(mu_);
  int64_t conditioning_cap_ ABSL_GUARDED_BY(mu_) = 0;
  GreedyDual order_ ABSL_GUARDED_BY(mu_);
  std::deque<Eviction> recent_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<Device*, DeviceCounters> device_counters_ ABSL_GUARDED_BY(mu_);
  CacheStats counters_ ABSL_GUARDED_BY(mu_);  // only the counters are used
  mutable Mutex looking_;                     // one look at all records at a time; taken before mu_
};

}  // namespace latentd

#endif  // LATENTD_CACHE_MODEL_CACHE_H_
