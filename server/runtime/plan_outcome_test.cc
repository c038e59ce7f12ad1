// What is worked out on ImaginedMemory is what a cache then does: random states of a cache with two devices,
// on each of which a random job is first gone through in the imagination, and then really done. Loads,
// evictions with their order, what is resident where, what can be had, and refusals with all their numbers
// are compared after every step.
//
// LATENTD_PLAN_SEED and LATENTD_PLAN_STATES change what is run.
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "cache/device.h"
#include "cache/model_cache.h"
#include "gtest/gtest.h"
#include "server/runtime/imagined_memory.h"
#include "server/runtime/plan_outcome_job.h"

namespace latentd {
namespace {

constexpr char kJob[] = "job";

// How often things happened, over all states: that they did is a part of the test.
struct Tally {
  int64_t loads = 0, evictions = 0, offloads = 0, streamed = 0, grown = 0;
  int64_t never = 0, refused = 0, hopeless = 0, refused_on_device = 0;
};

// What becomes of copies, as the cache lets go of them.
struct CopyLog {
  std::vector<std::pair<std::string, std::string>> freed;  // device, key
  int64_t grown = 0;
};

// A copy on a device that takes no memory.
class ThingCopy : public Resource {
 public:
  ThingCopy(std::shared_ptr<CopyLog> log, std::string device, std::string key)
      : log_(std::move(log)), device_(std::move(device)), key_(std::move(key)) {}
  ~ThingCopy() override {
    if (!superseded) log_->freed.emplace_back(device_, key_);
  }
  int64_t bytes() const override { return 0; }
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device&, const std::vector<bool>&, const Resource*,
                                                         std::stop_token) const override {
    return absl::UnimplementedError("a copy is not copied again");
  }
  mutable bool superseded = false;  // a larger copy took it over

 private:
  const std::shared_ptr<CopyLog> log_;
  const std::string device_, key_;
};

class Thing : public Resource {
 public:
  Thing(std::shared_ptr<CopyLog> log, std::string key, int64_t bytes, std::vector<ResourceBlock> blocks)
      : log_(std::move(log)), key_(std::move(key)), bytes_(bytes), blocks_(std::move(blocks)) {}
  int64_t bytes() const override { return bytes_; }
  std::vector<ResourceBlock> device_blocks() const override { return blocks_; }
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device& device, const std::vector<bool>&,
                                                         const Resource* have,
                                                         std::stop_token) const override {
    if (have != nullptr) {
      static_cast<const ThingCopy*>(have)->superseded = true;
      ++log_->grown;
    }
    return std::make_shared<const ThingCopy>(log_, device.name(), key_);
  }

 private:
  const std::shared_ptr<CopyLog> log_;
  const std::string key_;
  const int64_t bytes_;
  const std::vector<ResourceBlock> blocks_;
};

// A cache with a past.
class World {
 public:
  World(uint64_t seed, Tally& tally) : dice_(seed), tally_(tally) {
    while (items_.size() < kKeys) items_.push_back(RandomItem(static_cast<int>(items_.size()), dice_));
    if (dice_.Chance(2)) cache_.set_conditioning_cap(dice_.From(1, 40));
    for (int64_t i = dice_.From(0, 80); i > 0; --i) Happen();
    for (SimDevice* sim : sims_) {
      if (dice_.Chance(4)) sim->SetForeignBytes(dice_.From(1, 20));
      EXPECT_TRUE(sim->budget().TryReserve({.what = "a look at what others take"}).ok());
      if (dice_.Chance(5)) sim->budget().set_cap(sim->budget().cap_bytes() * dice_.From(3, 9) / 10);
    }
    if (dice_.Chance(5)) ram_.set_cap(ram_.cap_bytes() * dice_.From(3, 9) / 10);
  }

  void PlanAndDo() {
    std::vector<Step> steps;
    for (int64_t i = dice_.From(1, 50); i > 0; --i) steps.push_back(RandomStep(dice_));
    // In the end, whatever can go does, and shows its order.
    for (const char* device : {"sim:0", "sim:1", "cpu"}) {
      Step all;
      all.kind = Step::kPromise;
      all.items = {0};
      all.bytes = -1;
      all.device = device;
      steps.push_back(all);
    }
    const CacheStats before = cache_.Stats();
    Planned planned(items_, before);
    const std::vector<std::string> plan = planned.Do(steps);
    const CacheStats after = cache_.Stats();
    ASSERT_EQ(after.ram.in_use_bytes, before.ram.in_use_bytes) << "a plan changes nothing";
    log_->freed.clear();
    const int64_t grown = log_->grown;
    Done done(*this);
    const std::vector<std::string> outcome = done.Do(steps);
    std::string past = "\nbefore:\n";
    for (const RecordStats& r : before.records) {
      absl::StrAppend(&past, "  ", r.key.ToString(), " ", r.kind, " ", r.bytes, " locks ", r.lock_count,
                      r.lasting ? " lasting" : "", r.stale ? " stale" : "", "\n");
    }
    for (size_t i = 0; i < steps.size(); ++i) {
      ASSERT_EQ(plan[i], outcome[i]) << "in step " << i << ", after\n" << (i > 0 ? plan[i - 1] : past);
    }
    const CacheStats end = cache_.Stats();
    for (const auto& [device, offloads] : planned.Offloads()) {
      EXPECT_EQ(offloads, end.devices.at(device).offloads - before.devices.at(device).offloads) << device;
      tally_.offloads += offloads;
      tally_.streamed += end.devices.at(device).streamed_locks - before.devices.at(device).streamed_locks;
    }
    EXPECT_EQ(end.unaccounted_bytes(), 0);
    tally_.loads += end.misses - before.misses;
    tally_.evictions += end.evicted(EvictReason::kRoom) - before.evicted(EvictReason::kRoom);
    tally_.grown += log_->grown - grown;
    for (const std::string& text : outcome) Count(text);
  }

 private:
  // The job, really.
  class Done : public Doer {
   public:
    explicit Done(World& world)
        : Doer(world.items_), world_(world), evictions_(Evictions(world.cache_.Stats())) {
      world.loaded_.clear();
    }

   private:
    static int64_t Evictions(const CacheStats& stats) { return stats.evicted(EvictReason::kRoom); }

    LockRequest Request(const Item& item) const override { return world_.Request(item); }
    absl::Status Lock(const Item& item) override {
      const LockRequest request = Request(item);
      auto handle = world_.cache_.Lock(request.key, request.loader, Impatient());
      if (handle.ok()) handles_.push_back(*std::move(handle));
      return handle.status();
    }
    absl::Status LockAll(const std::vector<LockRequest>& requests) override {
      ASSIGN_OR_RETURN(auto handles, world_.cache_.LockAll(requests, Impatient()));
      for (LockHandle& handle : handles) handles_.push_back(std::move(handle));
      return absl::OkStatus();
    }
    bool TryLock(const Item& item) override {
      LockHandle handle = world_.cache_.TryLock(item.key, kJob);
      if (!handle) return false;
      handles_.push_back(std::move(handle));
      return true;
    }
    absl::Status Insert(const Item& item) override {
      ASSIGN_OR_RETURN(Reservation memory, world_.ram_.Reserve({.bytes = item.bytes,
                                                                .use = item.use,
                                                                .owner = kJob,
                                                                .what = "an insert",
                                                                .deadline = absl::InfinitePast()}));
      ASSIGN_OR_RETURN(LockHandle handle,
                       world_.cache_.Insert(item.key, item.kind, world_.Make(item), std::move(memory),
                                            absl::ToDoubleSeconds(TimeToLoad(item.kind, item.bytes)), kJob));
      handles_.push_back(std::move(handle));
      return absl::OkStatus();
    }
    void Unlock(size_t i) override { handles_.erase(handles_.begin() + static_cast<std::ptrdiff_t>(i)); }
    absl::StatusOr<ResidencyPlan> LockOn(size_t i, const Step& step, ResidencyWish wish) override {
      ASSIGN_OR_RETURN(DeviceLock lock,
                       world_.cache_.LockOnDevice(handles_[i], world_.DeviceNamed(step.device),
                                                  {.owner = kJob,
                                                   .working_bytes = wish.working_bytes,
                                                   .mode = wish.mode,
                                                   .ring_slots = wish.ring_slots,
                                                   .blocks = wish.chosen,
                                                   .deadline = absl::InfinitePast(),
                                                   .may_wait = step.may_wait}));
      const ResidencyPlan plan = lock.plan();
      locks_.push_back(std::move(lock));
      return plan;
    }
    void UnlockOn(size_t i) override { locks_.erase(locks_.begin() + static_cast<std::ptrdiff_t>(i)); }
    absl::Status Promise(const std::string& device, int64_t bytes) override {
      ASSIGN_OR_RETURN(
          Reservation promised,
          world_.DeviceNamed(device).budget().Reserve(
              {.bytes = bytes, .owner = kJob, .what = "a promise", .deadline = absl::InfinitePast()}));
      promised_.push_back(std::move(promised));
      return absl::OkStatus();
    }
    void GiveBack(size_t i) override { promised_.erase(promised_.begin() + static_cast<std::ptrdiff_t>(i)); }
    int64_t Obtainable(const std::string& device) override {
      return world_.DeviceNamed(device).budget().ObtainableBytes();
    }
    std::map<ModelKey, ImaginedMemory::There> Contents() override {
      std::map<ModelKey, ImaginedMemory::There> contents;
      for (const RecordStats& r : world_.cache_.Stats().records) {
        if (r.stale) continue;
        ImaginedMemory::There& there = contents[r.key];
        there.bytes = r.bytes;
        for (const ResidencyStats& on : r.residency) there.copies[on.device] = {true, on.bytes, on.resident};
      }
      return contents;
    }
    std::vector<Event> HostEvents() override {
      std::vector<Event> events;
      for (const auto& [key, more] : std::exchange(world_.loaded_, {}))
        events.push_back({"loaded", key, more});
      const CacheStats stats = world_.cache_.Stats();
      const auto n = static_cast<size_t>(Evictions(stats) - std::exchange(evictions_, Evictions(stats)));
      for (size_t i = stats.recent_evictions.size() - n; i < stats.recent_evictions.size(); ++i) {
        const Eviction& e = stats.recent_evictions[i];
        events.push_back(
            {"evicted", e.key.ToString(), absl::StrCat(e.bytes, " ", absl::StrJoin(e.names, ","))});
      }
      return events;
    }
    std::vector<Event> DeviceEvents() override {
      std::vector<Event> events;
      for (const auto& [device, key] : std::exchange(world_.log_->freed, {}))
        events.push_back({"offloaded", key, device});
      return events;
    }

    static LockOptions Impatient() { return {.owner = kJob, .deadline = absl::InfinitePast()}; }

    World& world_;
    int64_t evictions_;
    std::vector<LockHandle> handles_;
    std::vector<DeviceLock> locks_;
    std::vector<Reservation> promised_;
  };

  std::shared_ptr<const Resource> Make(const Item& item) {
    return std::make_shared<const Thing>(log_, item.key.ToString(), item.bytes, item.blocks);
  }
  LockRequest Request(const Item& item) {
    return {item.key,
            {.kind = item.kind,
             .estimated_bytes = item.bytes + item.scratch,
             .load = [this, item](const LoadContext&) -> absl::StatusOr<std::shared_ptr<const Resource>> {
               now_ += TimeToLoad(item.kind, item.bytes);
               loaded_.emplace_back(item.key.ToString(), absl::StrCat(item.kind, " ", item.bytes));
               return Make(item);
             },
             .use = item.use,
             .name = item.name}};
  }
  Device& DeviceNamed(const std::string& name) {
    if (name == sim0_.name()) return sim0_;
    if (name == sim1_.name()) return sim1_;
    return cpu_;
  }

  // One thing that others do. What is refused to them is no matter.
  void Happen() {
    const std::string owner = absl::StrCat("other-", dice_.From(0, 3));
    const Item& item = items_[dice_.Pick(kKeys)];
    const absl::Time past = absl::InfinitePast();
    switch (dice_.From(0, 9)) {
      case 0:
      case 1:
      case 2:
      case 3: {
        const LockRequest request = Request(item);
        auto handle = cache_.Lock(request.key, request.loader,
                                  {.owner = owner, .deadline = past, .lasting = dice_.Chance(6)});
        if (handle.ok() && dice_.Chance(3)) handles_.push_back(*std::move(handle));
        break;
      }
      case 4:
      case 5:
      case 6: {
        const LockHandle handle = cache_.TryLock(item.key, owner);
        if (!handle) break;
        const Step step = RandomStep(dice_);
        auto lock = cache_.LockOnDevice(handle, DeviceNamed(step.device),
                                        {.owner = owner,
                                         .working_bytes = step.bytes,
                                         .mode = step.mode,
                                         .ring_slots = step.ring_slots,
                                         .deadline = past,
                                         .may_wait = step.may_wait,
                                         .lasting = dice_.Chance(8)});
        if (lock.ok() && dice_.Chance(4)) locks_.push_back(*std::move(lock));
        break;
      }
      case 7:
        if (!handles_.empty() && dice_.Chance(2)) {
          handles_.erase(handles_.begin() + static_cast<std::ptrdiff_t>(dice_.Pick(handles_.size())));
        } else if (!locks_.empty()) {
          locks_.erase(locks_.begin() + static_cast<std::ptrdiff_t>(dice_.Pick(locks_.size())));
        }
        break;
      case 8: {
        auto promised = DeviceNamed(RandomStep(dice_).device)
                            .budget()
                            .TryReserve({.bytes = dice_.From(1, 12), .owner = owner, .what = "others' work"});
        if (promised.ok() && dice_.Chance(2)) promised_.push_back(*std::move(promised));
        break;
      }
      case 9:
        if (dice_.Chance(4)) cache_.Drop(item.key);
        if (dice_.Chance(4)) cache_.Trim(dice_.From(1, 20));
        if (dice_.Chance(4)) cache_.Offload(sim0_, dice_.From(1, 20));
        break;
    }
  }

  void Count(const std::string& text) {
    const bool refused = text.find("BUDGET_EXHAUSTED") != std::string::npos;
    tally_.refused += refused;
    tally_.refused_on_device += refused && text.find("budget=sim") != std::string::npos;
    tally_.hopeless += text.find("hopeless=true") != std::string::npos;
    tally_.never += text.find("MODEL_EXCEEDS_BUDGET") != std::string::npos;
  }

  Dice dice_;
  Tally& tally_;
  const std::shared_ptr<CopyLog> log_ = std::make_shared<CopyLog>();
  std::vector<Item> items_;
  std::vector<std::pair<std::string, std::string>> loaded_;  // key, and what it is
  absl::Time now_ = absl::UnixEpoch();
  RamBudget ram_{dice_.From(40, 300)};
  CpuDevice cpu_{&ram_};
  SimDevice sim0_{{.index = 0, .memory_bytes = dice_.From(12, 60)}};
  SimDevice sim1_{{.index = 1, .memory_bytes = dice_.From(12, 60)}};
  const std::vector<SimDevice*> sims_ = {&sim0_, &sim1_};
  ModelCache cache_{&ram_, {&cpu_, &sim0_, &sim1_}, [this] { return now_; }};
  std::vector<LockHandle> handles_;
  std::vector<DeviceLock> locks_;
  std::vector<Reservation> promised_;
};

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

TEST(PlanOutcome, WhatIsPlannedIsWhatHappensInRandomStates) {
  const uint64_t first = FromEnvironment("LATENTD_PLAN_SEED", 1);
  const uint64_t states = FromEnvironment("LATENTD_PLAN_STATES", 1000);
  Tally tally;
  for (uint64_t seed = first; seed < first + states; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    World(seed, tally).PlanAndDo();
    if (testing::Test::HasFailure()) return;
  }
  std::printf(
      "loads %ld, evictions %ld, offloads %ld, streamed %ld, grown %ld, refused %ld (on devices %ld, "
      "hopeless %ld), never %ld\n",
      static_cast<long>(tally.loads), static_cast<long>(tally.evictions), static_cast<long>(tally.offloads),
      static_cast<long>(tally.streamed), static_cast<long>(tally.grown), static_cast<long>(tally.refused),
      static_cast<long>(tally.refused_on_device), static_cast<long>(tally.hopeless),
      static_cast<long>(tally.never));
  if (states < 1000) return;
  for (const int64_t n : {tally.loads, tally.evictions, tally.offloads, tally.streamed, tally.grown,
                          tally.refused, tally.refused_on_device, tally.hopeless, tally.never}) {
    EXPECT_GT(n, 50) << "the states are not what they are meant to be";
  }
}

}  // namespace
}  // namespace latentd
