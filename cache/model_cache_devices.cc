// The part of ModelCache that has to do with devices: residency, locks on it, and room for it.
//
// Work on the residency of one record on one device is done by one caller at a time (moving_in); the others
// wait. A copy is immutable: growing a partly resident one makes a new copy that takes over the old one's
// tensors, so whoever computes with the old one is not disturbed.
#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "cache/admission.h"
#include "cache/base/error.h"
#include "cache/cache_record.h"
#include "cache/model_cache.h"
#include "cache/record_index.h"

namespace latentd {
namespace {

template <typename T>
int64_t Sum(const std::vector<T>& parts) {
  return std::accumulate(parts.begin(), parts.end(), int64_t{0},
                         [](int64_t sum, const T& part) { return sum + part.bytes; });
}

}  // namespace

class ModelCache::DeviceReclaimer : public Reclaimer {
 public:
  DeviceReclaimer(ModelCache* cache, Device* device) : cache_(cache), device_(device) {}
  int64_t Reclaim(int64_t bytes) override { return bytes <= 0 ? 0 : cache_->ReclaimDevice(device_, bytes); }
  int64_t IdleBytes() const override { return cache_->IdleBytesOn(device_); }
  int64_t HeldBytes() const override { return cache_->HeldBytesOn(device_); }
  Held HeldByWhom() const override { return cache_->HeldByWhomOn(device_); }

 private:
  ModelCache* const cache_;
  Device* const device_;
};

ModelCache::ModelCache(RamBudget* ram, std::vector<Device*> devices, Clock clock)
    : ram_(ram),
      devices_(std::move(devices)),
      clock_(std::move(clock)),
      leaving_(std::make_shared<LeavingBytes>()),
      records_(std::make_unique<RecordIndex>()) {
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

DeviceLock& DeviceLock::operator=(DeviceLock&& other) noexcept {
  if (this != &other) {
    Release();
    handle_ = std::move(other.handle_);
    number_ = other.number_;
    device_ = std::exchange(other.device_, nullptr);
    resource_ = std::move(other.resource_);
    plan_ = std::move(other.plan_);
    working_ = std::move(other.working_);
    ring_ = std::move(other.ring_);
  }
  return *this;
}

void DeviceLock::Release() {
  if (device_ == nullptr) return;
  working_.Release();
  ring_.Release();
  resource_ = nullptr;
  if (!device_->uses_host_memory()) handle_.cache_->UnlockDevice(handle_.record_, device_, number_);
  device_ = nullptr;
  handle_.Release();
}

absl::Status ModelCache::TakeTurn(const RecordPtr& record, Device& device, const DeviceLockOptions& options,
                                  DeviceLock& result) {
  std::stop_callback wake(options.stop, [this] {
    MutexLock lock(&mu_);
    changed_.SignalAll();
  });
  std::optional<WaitRegistry::Entry> entry;  // ends after the mutex is let go
  MutexLock lock(&mu_);
  while (true) {
    if (shutting_down_)
      return MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the server is shutting down");
    Residency& there = record->residency[&device];
    if (!there.moving_in) {
      records_->ChangeOn(&device, record, [&](Residency& mine) {
        mine.moving_in = true;
        mine.mover = options.owner;
        // What is there stays there, for now.
        result.number_ = mine.holders.Add(options.owner, options.lasting);
      });
      return absl::OkStatus();
    }
    if (there.waits_for_room && !options.may_wait) {
      return MakeError(
          absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED",
          absl::StrCat("somebody else waits for room for ", record->key.ToString(), " on ", device.name()),
          {{"budget", device.budget().name()}, {"what", record->key.ToString()}});
    }
    if (!entry) {
      entry.emplace(ram_->waits(), options.owner,
                    absl::StrCat("the move of ", record->key.ToString(), " to ", device.name()), there.mover);
    }
    there.waiting.Add(&*entry);
    const bool late = changed_.WaitWithDeadline(&mu_, options.deadline);
    // That work is over, and who waits for somebody else's next waits anew.
    if (!record->residency[&device].waiting.Remove(&*entry)) entry.reset();
    if (options.stop.stop_requested()) {
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED",
                       "cancelled while weights moved to a device");
    }
    if (late && record->residency[&device].moving_in) {
      return MakeError(
          absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
          absl::StrCat("deadline passed while ", record->key.ToString(), " moved to ", device.name()));
    }
  }
}

// One caller's turn at what is there of a record on a device.
class ModelCache::MovingIn : public MoversRoom {
 public:
  MovingIn(ModelCache* cache, const RecordPtr& record, Device& device, const DeviceLockOptions& options,
           DeviceLock& lock)
      : cache_(cache), record_(record), device_(device), options_(options), lock_(lock) {}

  absl::Status TryPromise(For purpose, int64_t bytes) override {
    return Keep(purpose, device_.budget().TryReserve(Request(purpose, bytes)));
  }
  // Others who come for the record meanwhile are told that somebody waits for room.
  absl::Status Promise(For purpose, int64_t bytes) override {
    if (!options_.may_wait) return TryPromise(purpose, bytes);
    WaitsForRoom(true);
    auto promised = device_.budget().Reserve(Request(purpose, bytes));
    WaitsForRoom(false);
    return Keep(purpose, std::move(promised));
  }
  int64_t ObtainableBytes() override { return device_.budget().ObtainableBytes(); }

  ResidentPart WhatIsThere() override {
    MutexLock lock(&cache_->mu_);
    const Residency& there = record_->residency[&device_];
    have_ = there.copy;
    return {.any = have_ != nullptr, .bytes = there.bytes, .resident = there.resident};
  }
  void Unpin() override {
    Change([&](Residency& there) { there.holders.Remove(lock_.number_); });
  }
  void Pin() override {
    Change([&](Residency& there) { lock_.number_ = there.holders.Add(options_.owner, options_.lasting); });
  }
  bool LetGo() override {
    {
      MutexLock lock(&cache_->mu_);
      if (record_->residency[&device_].holders.size() > 1) return false;
      cache_->records_->ChangeOn(&device_, record_, [](Residency& there) { there.LetGoOfMemory(); });
    }
    have_ = nullptr;
    return true;
  }

  // Makes what was promised true. `there`: what is kept.
  absl::Status CopyIn(const ResidencyPlan& plan, const ResidentPart& there) {
    lock_.ring_ = weights_.Split(plan.ring_bytes(), MemoryUse::kStaging);
    if (!there.any || plan.resident != there.resident) {
      auto accounted = std::make_shared<Accounted>();
      ASSIGN_OR_RETURN(accounted->resource,
                       record_->resource->CopyTo(device_, plan.resident, have_.get(), options_.stop));
      const int64_t copied = weights_.bytes();
      const uint64_t turn = weights_.turn();
      weights_.Commit();
      accounted->memory = std::move(weights_);
      accounted->base = have_;
      have_ = Accounted::Pointer(accounted);
      MutexLock lock(&cache_->mu_);
      cache_->records_->ChangeOn(&device_, record_, [&](Residency& now) {
        now.copy = have_;
        now.bytes = there.bytes + copied;
        now.resident = plan.resident;
        now.turn = turn;
      });
      DeviceCounters& counters = cache_->device_counters_[&device_];
      ++counters.copies;
      counters.copied_bytes += copied;
    }
    lock_.resource_ = std::move(have_);
    return absl::OkStatus();
  }

 private:
  MemoryBudget::Request Request(For purpose, int64_t bytes) const {
    const bool work = purpose == For::kWork;
    return {
        .bytes = bytes,
        .use = work ? MemoryUse::kWorking : record_->use,
        .owner = options_.owner,
        .what = work ? PurposeOfWork(record_->kind) : PurposeOfRecord(record_->kind, record_->key.ToString()),
        .deadline = options_.deadline,
        .stop = options_.stop};
  }
  absl::Status Keep(For purpose, absl::StatusOr<Reservation> promised) {
    if (promised.ok()) (purpose == For::kWork ? lock_.working_ : weights_) = *std::move(promised);
    return promised.status();
  }
  template <typename F>
  void Change(F f) {
    MutexLock lock(&cache_->mu_);
    cache_->records_->ChangeOn(&device_, record_, f);
  }
  void WaitsForRoom(bool now) {
    MutexLock lock(&cache_->mu_);
    record_->residency[&device_].waits_for_room = now;
    cache_->changed_.SignalAll();
  }

  ModelCache* const cache_;
  const RecordPtr& record_;
  Device& device_;
  const DeviceLockOptions& options_;
  DeviceLock& lock_;
  std::shared_ptr<const Resource> have_;
  Reservation weights_;
};

absl::Status ModelCache::MoveIn(const RecordPtr& record, Device& device, const DeviceLockOptions& options,
                                DeviceLock& lock) {
  MovingIn moving(this, record, device, options, lock);
  ResidentPart there;
  ASSIGN_OR_RETURN(lock.plan_, ChooseResidency({.blocks = record->resource->device_blocks(),
                                                .working_bytes = options.working_bytes,
                                                .mode = options.mode,
                                                .ring_slots = options.ring_slots,
                                                .chosen = options.blocks},
                                               moving, &there));
  RETURN_IF_ERROR(moving.CopyIn(lock.plan_, there));
  if (lock.plan_.streams()) {
    MutexLock held(&mu_);
    ++device_counters_[&device].streamed_locks;
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceLock> ModelCache::LockOnDevice(const LockHandle& handle, Device& device,
                                                    const DeviceLockOptions& asked) {
  DeviceLock result;
  result.handle_ = handle.Share(asked.owner);
  DeviceLockOptions options = asked;
  options.owner = result.handle_.owner_;  // the handle's, where none was given
  const RecordPtr record = result.handle_.record_;
  RETURN_IF_ERROR(record->resource->Check());
  RETURN_IF_ERROR(device.Check());

  if (device.uses_host_memory()) {
    if (options.working_bytes > 0) {
      const MemoryBudget::Request wanted = {.bytes = options.working_bytes,
                                            .use = MemoryUse::kWorking,
                                            .owner = options.owner,
                                            .what = PurposeOfWork(record->kind),
                                            .deadline = options.deadline,
                                            .stop = options.stop};
      ASSIGN_OR_RETURN(result.working_, options.may_wait ? device.budget().Reserve(wanted)
                                                         : device.budget().TryReserve(wanted));
    }
    result.plan_ =
        PlanResidency(record->resource->device_blocks(), MemoryBudget::kUnlimited, options.ring_slots);
    result.resource_ = record->resource;
    result.device_ = &device;
    return result;
  }

  RETURN_IF_ERROR(TakeTurn(record, device, options, result));
  const absl::Status status = MoveIn(record, device, options, result);
  {
    MutexLock lock(&mu_);
    records_->ChangeOn(&device, record, [&](Residency& there) {
      there.moving_in = false;
      there.waiting.Over();
      if (!status.ok()) there.holders.Remove(result.number_);
    });
    changed_.SignalAll();
  }
  if (!status.ok()) {
    result.working_.Release();
    result.ring_.Release();
    device.budget().NotifyReclaimable();
    return status;
  }
  result.device_ = &device;
  if (options.lasting) ram_->waits()->LookAgain();
  return result;
}

void ModelCache::HandOver(DeviceLock& lock, const std::string& owner, bool lasting) {
  if (!lock.device_->uses_host_memory()) {
    MutexLock held(&mu_);
    records_->ChangeOn(lock.device_, lock.handle_.record_, [&](Residency& there) {
      there.holders.Remove(lock.number_);
      lock.number_ = there.holders.Add(owner, lasting);
    });
  }
  HandOver(lock.handle_, owner, lasting);
  lock.working_.PassTo(owner);
  lock.ring_.PassTo(owner);
}

void ModelCache::UnlockDevice(const RecordPtr& record, Device* device, uint64_t number) {
  {
    MutexLock lock(&mu_);
    records_->ChangeOn(device, record, [&](Residency& there) { there.holders.Remove(number); });
  }
  device->budget().NotifyReclaimable();
}

int64_t ModelCache::ReclaimDevice(Device* device, int64_t bytes) {
  std::vector<std::shared_ptr<const Resource>> gone;
  int64_t freed = 0;
  {
    MutexLock lock(&mu_);
    for (const RecordPtr& record : records_->VictimsOn(device, bytes)) {
      // Somebody whose turn it is may wait for room right now, and finds nothing there when it is made.
      records_->ChangeOn(device, record, [&](Residency& there) {
        freed += there.bytes;
        gone.push_back(there.copy);
        there.LetGoOfMemory();
      });
      ++device_counters_[device].offloads;
    }
  }
  const bool any = !gone.empty();
  gone.clear();
  if (any) device->ReleaseUnused();
  return freed;
}

Reclaimer::Held ModelCache::HeldByWhomOn(Device* device) const {
  MutexLock lock(&mu_);
  Held held;
  held.groups = records_->HeldByWhomOn(device);
  held.idle_bytes = records_->BytesOn(device) - Sum(held.groups);
  return held;
}

int64_t ModelCache::HeldBytesOn(Device* device) const {
  MutexLock lock(&mu_);
  return Sum(records_->HeldByWhomOn(device));
}

int64_t ModelCache::IdleBytesOn(Device* device) const {
  MutexLock lock(&mu_);
  return records_->BytesOn(device) - Sum(records_->HeldByWhomOn(device));
}

}  // namespace latentd
