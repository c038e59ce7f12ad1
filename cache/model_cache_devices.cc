// The part of ModelCache that has to do with devices: residency, locks on it, and room for it.
//
// Work on the residency of one record on one device is done by one caller at a time (moving_in); the others
// wait. A copy is immutable: growing a partly resident one makes a new copy that takes over the old one's
// tensors, so whoever computes with the old one is not disturbed.
#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
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

absl::StatusOr<Reservation> ModelCache::PromiseOnDevice(const RecordPtr& record, Device& device,
                                                        bool may_wait, const MemoryBudget::Request& request) {
  if (!may_wait) return device.budget().TryReserve(request);
  auto waits = [&](bool now) {
    MutexLock lock(&mu_);
    record->residency[&device].waits_for_room = now;
    changed_.SignalAll();
  };
  waits(true);
  auto promised = device.budget().Reserve(request);
  waits(false);
  return promised;
}

absl::Status ModelCache::MoveIn(const RecordPtr& record, Device& device, const DeviceLockOptions& options,
                                DeviceLock& lock) {
  MemoryBudget& budget = device.budget();
  auto request = [&](int64_t bytes, MemoryUse use, const std::string& what) {
    return MemoryBudget::Request{.bytes = bytes,
                                 .use = use,
                                 .owner = options.owner,
                                 .what = what,
                                 .deadline = options.deadline,
                                 .stop = options.stop};
  };
  auto reserve = [&](const MemoryBudget::Request& wanted) {
    return PromiseOnDevice(record, device, options.may_wait, wanted);
  };
  const std::string what = absl::StrCat(record->kind, " ", record->key.ToString());
  const std::vector<ResourceBlock> blocks = record->resource->device_blocks();
  const int64_t full = Sum(blocks);

  // Working memory first: without it nothing can run, and weights can be streamed.
  if (options.working_bytes > 0) {
    const auto working =
        request(options.working_bytes, MemoryUse::kWorking, absl::StrCat("working memory of ", record->kind));
    auto promised = budget.TryReserve(working);
    if (!promised.ok()) {
      // This record's own copy may be in the way; it can come again, whole or in part.
      {
        MutexLock unpinned(&mu_);
        records_->ChangeOn(&device, record, [&](Residency& there) { there.holders.Remove(lock.number_); });
      }
      promised = reserve(working);
      MutexLock pinned(&mu_);
      records_->ChangeOn(&device, record, [&](Residency& there) {
        lock.number_ = there.holders.Add(options.owner, options.lasting);
      });
    }
    if (!promised.ok()) return promised.status();
    lock.working_ = std::move(*promised);
  }

  std::shared_ptr<const Resource> have;
  std::vector<bool> resident;
  int64_t have_bytes = 0;
  {
    MutexLock held(&mu_);
    Residency& there = record->residency[&device];
    have = there.copy;
    have_bytes = there.bytes;
    resident = there.resident;
  }

  ResidencyPlan plan = PlanResidency(blocks, MemoryBudget::kUnlimited, options.ring_slots);
  const ResidencyPlan smallest = PlanResidency(blocks, 0, options.ring_slots);
  Reservation memory;
  auto take = [&](Reservation promised) {
    lock.ring_ = promised.Split(plan.ring_bytes(), MemoryUse::kStaging);
    memory = std::move(promised);
  };
  // A copy that is there keeps its blocks; the ring serves the rest.
  auto keep_what_is_there = [&] {
    plan = smallest;
    plan.resident = resident;
    plan.resident_bytes = have_bytes;
    int32_t streamed = 0;
    plan.slot_bytes = 0;
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (resident[i]) continue;
      ++streamed;
      plan.slot_bytes = std::max(plan.slot_bytes, blocks[i].bytes);
    }
    plan.ring_slots = std::min(plan.ring_slots, streamed);
  };
  // False when others use it.
  auto let_go_of_what_is_there = [&] {
    {
      MutexLock held(&mu_);
      if (record->residency[&device].holders.size() > 1) return false;
      records_->ChangeOn(&device, record, [](Residency& there) { there.LetGoOfMemory(); });
      have_bytes = 0;
    }
    have = nullptr;
    resident.clear();
    return true;
  };
  bool done = false;
  if (!options.blocks.empty()) {
    plan.resident_bytes = 0;
    for (size_t i = 0; i < blocks.size(); ++i) {
      plan.resident[i] = blocks[i].stays || options.blocks[i] || (have != nullptr && resident[i]);
      if (plan.resident[i]) plan.resident_bytes += blocks[i].bytes;
    }
    ASSIGN_OR_RETURN(Reservation promised,
                     reserve(request(plan.resident_bytes - have_bytes, record->use, what)));
    take(std::move(promised));
    done = true;
  } else if (options.mode != ResidencyMode::kStream || !smallest.streams()) {
    auto promised = budget.TryReserve(request(full - have_bytes, record->use, what));
    if (!promised.ok() && (options.mode == ResidencyMode::kFull || !smallest.streams())) {
      promised = reserve(request(full - have_bytes, record->use, what));
      if (!promised.ok()) return promised.status();
    }
    if (promised.ok()) {
      take(std::move(*promised));
      done = true;
    }
  } else if (have != nullptr) {
    // Forced streaming counts from an empty device, so that a test sees what it asked for.
    let_go_of_what_is_there();
  }
  if (!done && have != nullptr) {
    keep_what_is_there();
    const auto wanted = request(plan.ring_bytes(), record->use, what);
    auto promised = budget.TryReserve(wanted);
    // The copy may be what the ring has no room beside.
    if (promised.ok() || !let_go_of_what_is_there()) {
      if (!promised.ok()) promised = reserve(wanted);
      if (!promised.ok()) return promised.status();
      take(std::move(*promised));
      done = true;
    }
  }
  for (int tries = 0; !done; ++tries) {
    constexpr int kTries = 3;  // somebody else may take what was seen to be there
    const bool last = tries == kTries || options.mode == ResidencyMode::kStream;
    plan = last ? smallest : PlanResidency(blocks, budget.ObtainableBytes(), options.ring_slots);
    const auto wanted = request(plan.bytes(), record->use, what);
    auto promised = last ? reserve(wanted) : budget.TryReserve(wanted);
    if (last && !promised.ok()) return promised.status();
    if (!promised.ok()) continue;
    take(std::move(*promised));
    done = true;
  }

  if (have == nullptr || plan.resident != resident) {
    auto accounted = std::make_shared<Accounted>();
    ASSIGN_OR_RETURN(accounted->resource,
                     record->resource->CopyTo(device, plan.resident, have.get(), options.stop));
    const int64_t copied = memory.bytes();
    const uint64_t turn = memory.turn();
    memory.Commit();
    accounted->memory = std::move(memory);
    accounted->base = have;
    have = Accounted::Pointer(accounted);
    MutexLock held(&mu_);
    records_->ChangeOn(&device, record, [&](Residency& there) {
      there.copy = have;
      there.bytes = have_bytes + copied;
      there.resident = plan.resident;
      there.turn = turn;
    });
    DeviceCounters& counters = device_counters_[&device];
    ++counters.copies;
    counters.copied_bytes += copied;
  }
  if (plan.streams()) {
    MutexLock held(&mu_);
    ++device_counters_[&device].streamed_locks;
  }
  lock.resource_ = std::move(have);
  lock.plan_ = std::move(plan);
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
                                            .what = absl::StrCat("working memory of ", record->kind),
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
