// The two ways to hold a record of a ModelCache: in host memory, and on a device.
//
// Both are move-only and give back what they hold when they end, in any order; one belongs to one thread at a
// time. They must not outlive the cache.
#ifndef LATENTD_CACHE_LOCK_HANDLE_H_
#define LATENTD_CACHE_LOCK_HANDLE_H_

#include <algorithm>
#include <memory>
#include <string>

#include "cache/device.h"
#include "cache/memory_budget.h"
#include "cache/model_key.h"
#include "cache/residency_plan.h"
#include "cache/resource.h"

namespace latentd {

class ModelCache;
struct CacheRecord;

// Keeps a record in memory. An empty one holds nothing.
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

  // A copy of this pointer that outlives the handle keeps the memory, and keeps it counted.
  const std::shared_ptr<const Resource>& resource() const;

  // REQUIRES: the record holds a T.
  template <typename T>
  const T& As() const {
    return static_cast<const T&>(*resource());
  }

  // A second lock on the same record, for the same or another owner; not a lasting one. REQUIRES: not empty.
  LockHandle Share(std::string owner = "") const;

  void Release();

 private:
  friend class ModelCache;
  friend class DeviceLock;
  LockHandle(ModelCache* cache, std::shared_ptr<CacheRecord> record, std::string owner, uint64_t number,
             bool counts)
      : cache_(cache),
        record_(std::move(record)),
        owner_(std::move(owner)),
        number_(number),
        counts_(counts) {}

  ModelCache* cache_ = nullptr;
  std::shared_ptr<CacheRecord> record_;
  std::string owner_;
  uint64_t number_ = 0;  // among the record's holders
  bool counts_ = true;   // as a use of the record
};

// Keeps a record usable on one device, and the working memory of what is done with it promised. Holds a lock
// on the record in host memory too.
class DeviceLock {
 public:
  DeviceLock() = default;
  DeviceLock(DeviceLock&& other) noexcept { *this = std::move(other); }
  DeviceLock& operator=(DeviceLock&& other) noexcept;
  ~DeviceLock() { Release(); }

  explicit operator bool() const { return device_ != nullptr; }
  Device& device() const { return *device_; }

  // The record as it is on the device: all of it, or what `plan` says is resident. For a device that uses
  // host memory, the host's own.
  const std::shared_ptr<const Resource>& resource() const { return resource_; }
  template <typename T>
  const T& As() const {
    return static_cast<const T&>(*resource_);
  }

  // The record in host memory, where what is not resident is copied from.
  const std::shared_ptr<const Resource>& host() const { return handle_.resource(); }

  // What is resident, and the ring for the rest, whose bytes on the device this lock has promised.
  const ResidencyPlan& plan() const { return plan_; }
  int64_t working_bytes() const { return working_.bytes(); }
  // Takes so much of the promise of working memory as what is left behind needs, at most all of it.
  Reservation TakeWorking(int64_t bytes) { return working_.Split(std::min(bytes, working_.bytes())); }

  void Release();

 private:
  friend class ModelCache;
  LockHandle handle_;
  uint64_t number_ = 0;  // among the holders of what is on the device
  Device* device_ = nullptr;
  std::shared_ptr<const Resource> resource_;
  ResidencyPlan plan_;
  Reservation working_;
  Reservation ring_;
};

}  // namespace latentd

#endif  // LATENTD_CACHE_LOCK_HANDLE_H_
