// Residency: what of a record is on a device, while others use it and while there is no room.
#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "cache/cache_test_util.h"
#include "cache/model_cache.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class DevicesTest : public CacheTest {
 protected:
  // 6 units that stay and 9 blocks of 6: 60 units in all, at least 6 + 2 * 6.
  Loader Streamable() { return Load(60, Blocks(6, std::vector<int64_t>(9, 6))); }
  // Bytes of `device` that somebody else holds, promised.
  Reservation Occupy(SimDevice& device, int64_t units) {
    auto r = device.budget().TryReserve({.bytes = units * kUnit, .owner = "occupant", .what = "occupied"});
    EXPECT_TRUE(r.ok()) << r.status();
    return r.ok() ? std::move(*r) : Reservation();
  }
  ResidencyStats There(const std::string& id, const std::string& device = "sim:0") {
    for (const ResidencyStats& there : Record(id).residency) {
      if (there.device == device) return there;
    }
    return {};
  }
  DeviceStats Of(SimDevice& device) { return cache.Stats().devices.at(device.name()); }
  static int64_t ResidentBlocks(const DeviceLock& lock) {
    int64_t n = 0;
    for (const auto& memory : lock.As<BlobCopy>().memory()) n += memory != nullptr ? 1 : 0;
    return n;
  }
};

// ------------------------------------------------------------------------------------------- all of it

TEST_F(DevicesTest, ALockOnADeviceCopiesOnceAndKeepsWhatItCopied) {
  LockHandle a = MustLock("a", 20);
  {
    DeviceLock first = MustLockOn(sim0, a, {.owner = "x", .working_bytes = 10 * kUnit});
    DeviceLock second = MustLockOn(sim0, a, {.owner = "y"});
    EXPECT_EQ(first.resource(), second.resource());
    EXPECT_EQ(&first.device(), &sim0);
    EXPECT_EQ(first.host(), a.resource());
    EXPECT_EQ(first.working_bytes(), 10 * kUnit);
    EXPECT_FALSE(first.plan().streams());
    EXPECT_EQ(There("a").lock_count, 2);
    EXPECT_EQ(Record("a").lock_count, 3);
    const auto& memory = first.As<BlobCopy>().memory();
    EXPECT_EQ(static_cast<const char*>(memory[0].get())[20 * kUnit - 1], 1);  // the bytes themselves came too
  }
  EXPECT_EQ(There("a").bytes, 20 * kUnit);
  EXPECT_EQ(There("a").full_bytes, 20 * kUnit);
  EXPECT_EQ(There("a").lock_count, 0);
  EXPECT_EQ(Of(sim0).copies, 1);
  EXPECT_EQ(Of(sim0).copied_bytes, 20 * kUnit);
  EXPECT_EQ(Of(sim0).streamed_locks, 0);
  EXPECT_EQ(sim0.budget().stats().reserved_bytes, 0);
  ExpectBalanced();
}

TEST_F(DevicesTest, HandlesAndDeviceLocksEndInAnyOrder) {
  for (bool handle_first : {true, false}) {
    LockHandle h = MustLock("a", 30);
    DeviceLock d = MustLockOn(sim0, h, {.owner = "me", .working_bytes = 10 * kUnit});
    EXPECT_EQ(sim0.allocated_bytes(), 30 * kUnit);
    EXPECT_EQ(sim0.budget().stats().use(MemoryUse::kWorking).reserved_bytes, 10 * kUnit);
    if (handle_first) {
      h.Release();
      EXPECT_EQ(cache.Trim(MemoryBudget::kUnlimited), 0);  // the device lock alone keeps it
      d.Release();
    } else {
      d.Release();
      EXPECT_EQ(cache.Trim(MemoryBudget::kUnlimited), 0);
      h.Release();
    }
    EXPECT_EQ(cache.Trim(MemoryBudget::kUnlimited), 30 * kUnit);
    ExpectEmpty();
  }
}

TEST_F(DevicesTest, ADeviceLockCanBeMovedAndReleasedTwice) {
  LockHandle a = MustLock("a", 10), b = MustLock("b", 10);
  DeviceLock empty;
  EXPECT_FALSE(empty);
  empty.Release();
  DeviceLock first = MustLockOn(sim0, a, {.owner = "me", .working_bytes = kUnit});
  DeviceLock second = MustLockOn(sim0, b, {.owner = "me", .working_bytes = kUnit});
  second = std::move(first);  // what it had is given back
  EXPECT_FALSE(first);
  EXPECT_EQ(There("b").lock_count, 0);
  EXPECT_EQ(There("a").lock_count, 1);
  EXPECT_EQ(sim0.budget().stats().reserved_bytes, kUnit);
  DeviceLock& same = second;
  second = std::move(same);
  EXPECT_TRUE(second);
  second.Release();
  second.Release();
  EXPECT_EQ(There("a").lock_count, 0);
  EXPECT_EQ(sim0.budget().stats().reserved_bytes, 0);
}

TEST_F(DevicesTest, WithoutAnOwnerOfItsOwnALockHasThatOfItsHandle) {
  LockHandle a = MustLock("a", 50, "session-1");
  DeviceLock d = MustLockOn(sim0, a);
  EXPECT_THAT(Record("a").holders, ElementsAre("session-1", "session-1"));
  d.Release();
  EXPECT_EQ(There("a").lock_count, 0);
  EXPECT_EQ(cache.Offload(sim0, kUnit), 50 * kUnit);  // nobody holds it
}

// The least recently used, and of those only what is needed.
TEST_F(DevicesTest, ADeviceMakesRoomFromItsUnlockedCopiesAndNoMoreThanIsNeeded) {
  LockHandle a = MustLock("a", 20), b = MustLock("b", 40), c = MustLock("c", 30);
  MustLockOn(sim0, a).Release();
  MustLockOn(sim0, b).Release();
  DeviceLock d = MustLockOn(sim0, c);  // 20 + 40 + 30 > 80
  EXPECT_EQ(There("a").bytes, 0);
  EXPECT_EQ(There("b").bytes, 40 * kUnit);
  EXPECT_EQ(There("c").bytes, 30 * kUnit);
  EXPECT_EQ(Of(sim0).offloads, 1);
  ExpectBalanced();
}

// Whatever the order in which they were used: the large one that does it alone goes, and not all small ones
// beside it.
TEST_F(DevicesTest, AnIdleDenoiserGoesAloneWhereThatWillDo) {
  ram.set_cap(200 * kUnit);
  const std::vector<std::pair<std::string, int64_t>> small = {
      {"lora", 1}, {"vae", 2}, {"clip", 3}, {"t5", 20}};
  for (size_t before = 0; before <= small.size(); ++before) {
    SCOPED_TRACE(before);
    cache.Drop({"old", ""});
    cache.Drop({"new", ""});
    const int64_t offloads = Of(sim0).offloads;
    auto use = [&](const std::string& id, int64_t units) {
      LockHandle handle = MustLock(id, units);
      MustLockOn(sim0, handle).Release();
    };
    for (size_t i = 0; i < before; ++i) use(small[i].first, small[i].second);
    use("old", 50);
    for (size_t i = before; i < small.size(); ++i) use(small[i].first, small[i].second);
    use("new", 50);  // 4 are free
    for (const auto& [id, units] : small) EXPECT_EQ(There(id).bytes, units * kUnit) << id;
    EXPECT_EQ(There("old").bytes, 0);
    EXPECT_EQ(Of(sim0).offloads - offloads, 1);
  }
}

TEST_F(DevicesTest, OfCopiesOfOneSizeTheLeastRecentlyUsedGoesFirst) {
  LockHandle a = MustLock("a", 30), b = MustLock("b", 30), c = MustLock("c", 30);
  MustLockOn(sim0, a).Release();
  MustLockOn(sim0, b).Release();
  MustLockOn(sim0, a).Release();
  MustLockOn(sim0, c).Release();
  EXPECT_EQ(There("a").bytes, 30 * kUnit);
  EXPECT_EQ(There("b").bytes, 0);
}

TEST_F(DevicesTest, WhatIsLockedOnADeviceIsNeverTakenOffIt) {
  LockHandle a = MustLock("a", 50), b = MustLock("b", 50);
  DeviceLock d = MustLockOn(sim0, a, {.owner = "me"});
  const auto refused = cache.LockOnDevice(b, sim0, {.owner = "me"});
  EXPECT_EQ(ErrorReason(refused.status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(GetErrorDetails(refused.status()).at("budget"), "sim:0");
  EXPECT_EQ(cache.Offload(sim0, MemoryBudget::kUnlimited), 0);
  sim0.budget().set_cap(40 * kUnit);
  EXPECT_EQ(There("a").bytes, 50 * kUnit);
  EXPECT_EQ(Record("b").lock_count, 1);  // only ours
  d.Release();
  EXPECT_EQ(There("a").bytes, 0);  // it is too much still
  ExpectBalanced();
}

TEST_F(DevicesTest, OneHostCopyServesAllDevicesAndGoesWithThemAll) {
  LockHandle a = MustLock("a", 30);
  DeviceLock d0 = MustLockOn(sim0, a), d1 = MustLockOn(sim1, a);
  EXPECT_EQ(alive, 1);
  EXPECT_EQ(d0.host(), d1.host());
  EXPECT_NE(d0.resource(), d1.resource());
  a.Release();
  d0.Release();
  EXPECT_EQ(cache.Drop({"a", ""}).stale_records, 1);
  EXPECT_EQ(There("a", "sim:1").bytes, 0);  // Record() shows no stale ones
  EXPECT_EQ(Of(sim1).residency_bytes, 30 * kUnit);
  ExpectBalanced();
  d1.Release();
  ExpectEmpty();
}

TEST_F(DevicesTest, TheHostItselfTakesNoCopyAndChargesItsWorkToTheRam) {
  CpuDevice cpu(&ram);
  LockHandle a = MustLock("a", Streamable());
  {
    DeviceLock d = MustLockOn(cpu, a, {.owner = "me", .working_bytes = 40 * kUnit});
    EXPECT_EQ(d.resource(), a.resource());
    EXPECT_FALSE(d.plan().streams());
    EXPECT_EQ(d.plan().resident_bytes, 60 * kUnit);
    EXPECT_EQ(ram.stats().use(MemoryUse::kWorking).reserved_bytes, 40 * kUnit);
    EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, cpu, {.owner = "me", .working_bytes = kUnit}).status()),
              "BUDGET_EXHAUSTED");
    EXPECT_THAT(Record("a").residency, IsEmpty());
  }
  EXPECT_EQ(ram.stats().reserved_bytes, 0);
  EXPECT_EQ(Record("a").lock_count, 1);
}

// ------------------------------------------------------------------------------------------- part of it

TEST_F(DevicesTest, WhereThereIsNoRoomForAllAPartIsResidentAndTheRestStreams) {
  LockHandle a = MustLock("a", Streamable());
  Reservation other = Occupy(sim0, 30);
  DeviceLock d = MustLockOn(sim0, a, {.owner = "me", .working_bytes = 10 * kUnit});
  // 80 - 30 - 10 leaves 40: 6 stay, 12 for the ring, 18 for three more blocks.
  EXPECT_TRUE(d.plan().streams());
  EXPECT_EQ(d.plan().ring_slots, 2);
  EXPECT_EQ(d.plan().slot_bytes, 6 * kUnit);
  EXPECT_EQ(d.plan().resident_bytes, 24 * kUnit);
  EXPECT_TRUE(d.plan().resident[0]);
  EXPECT_EQ(ResidentBlocks(d), 4);
  const auto budget = sim0.budget().stats();
  EXPECT_EQ(budget.use(MemoryUse::kStaging).reserved_bytes, 12 * kUnit);
  EXPECT_EQ(budget.use(MemoryUse::kWorking).reserved_bytes, 40 * kUnit);  // with the occupant's
  EXPECT_EQ(budget.use(MemoryUse::kWeights).in_use_bytes, 24 * kUnit);
  EXPECT_EQ(There("a").bytes, 24 * kUnit);
  EXPECT_EQ(There("a").full_bytes, 60 * kUnit);
  EXPECT_EQ(Of(sim0).streamed_locks, 1);
  ExpectBalanced();
  {
    // With the ring that was promised, the device's own count is that of the records and the rings.
    auto ring = *sim0.Allocate(d.plan().ring_bytes());
    EXPECT_EQ(sim0.allocated_bytes(), Of(sim0).residency_bytes + d.plan().ring_bytes());
  }
  d.Release();
  EXPECT_EQ(sim0.budget().stats().use(MemoryUse::kStaging).reserved_bytes, 0);
}

TEST_F(DevicesTest, APartialCopyGrowsWhenThereIsRoomAndWhoeverUsesTheOldOneKeepsIt) {
  LockHandle a = MustLock("a", Streamable());
  Reservation other = Occupy(sim0, 40);
  DeviceLock part = MustLockOn(sim0, a, {.owner = "x"});
  const std::vector<std::shared_ptr<void>> memory = part.As<BlobCopy>().memory();
  const int64_t had = part.plan().resident_bytes;
  other.Release();
  DeviceLock all = MustLockOn(sim0, a, {.owner = "y"});
  EXPECT_FALSE(all.plan().streams());
  EXPECT_EQ(ResidentBlocks(all), 10);
  EXPECT_EQ(There("a").bytes, 60 * kUnit);
  EXPECT_EQ(part.As<BlobCopy>().memory(), memory);  // as it was
  EXPECT_NE(part.resource(), all.resource());
  for (size_t i = 0; i < memory.size(); ++i) {
    EXPECT_TRUE(memory[i] == nullptr ||
                all.As<BlobCopy>().memory()[i] == memory[i]);  // taken over, not copied
  }
  EXPECT_EQ(Of(sim0).copied_bytes, had + (60 * kUnit - had));
  EXPECT_EQ(sim0.budget().stats().use(MemoryUse::kWeights).in_use_bytes, 60 * kUnit);
  ExpectBalanced();
  part.Release();
  all.Release();
  EXPECT_EQ(cache.Offload(sim0, kUnit), 60 * kUnit);
  EXPECT_EQ(sim0.budget().stats().in_use_bytes, 0);
}

TEST_F(DevicesTest, TwoLocksShareOnePartialCopyAndHaveARingEach) {
  LockHandle a = MustLock("a", Streamable());
  Reservation other = Occupy(sim0, 40);
  DeviceLock first = MustLockOn(sim0, a, {.owner = "x"});
  EXPECT_EQ(first.plan().resident_bytes, 24 * kUnit);
  other.Release();
  other = Occupy(sim0, 30);
  // 80 - 30 - 36 leaves 14: not the missing 36, but a ring.
  DeviceLock second = MustLockOn(sim0, a, {.owner = "y"});
  EXPECT_EQ(first.resource(), second.resource());
  EXPECT_EQ(second.plan().resident, first.plan().resident);
  EXPECT_EQ(second.plan().resident_bytes, 24 * kUnit);
  EXPECT_EQ(second.plan().slot_bytes, 6 * kUnit);
  EXPECT_EQ(sim0.budget().stats().use(MemoryUse::kStaging).reserved_bytes, 24 * kUnit);
  EXPECT_EQ(Of(sim0).copies, 1);
  EXPECT_EQ(Of(sim0).streamed_locks, 2);
  EXPECT_EQ(
      ErrorReason(cache.LockOnDevice(a, sim0, {.owner = "z", .deadline = absl::InfinitePast()}).status()),
      "BUDGET_EXHAUSTED");  // no room for a third ring
  ExpectBalanced();
}

// Nobody else uses the copy, and it leaves no room for the ring: it is made anew, smaller.
TEST_F(DevicesTest, APartialCopyThatIsInItsOwnWayIsMadeAnew) {
  LockHandle a = MustLock("a", Streamable());
  Reservation other = Occupy(sim0, 30);
  MustLockOn(sim0, a).Release();
  EXPECT_EQ(There("a").bytes, 36 * kUnit);
  Reservation more = Occupy(sim0, 8);  // 80 - 38 - 36 leaves 6, and a ring needs 12
  DeviceLock d = MustLockOn(sim0, a);
  EXPECT_TRUE(d.plan().streams());
  EXPECT_EQ(d.plan().resident_bytes, 30 * kUnit);
  ExpectBalanced();
}

TEST_F(DevicesTest, WorkingMemoryComesBeforeTheWeightsAndMayTakeTheirPlace) {
  LockHandle a = MustLock("a", Streamable());
  MustLockOn(sim0, a).Release();
  EXPECT_EQ(There("a").bytes, 60 * kUnit);
  DeviceLock d = MustLockOn(sim0, a, {.owner = "me", .working_bytes = 50 * kUnit});
  EXPECT_TRUE(d.plan().streams());
  EXPECT_EQ(d.plan().bytes(), 30 * kUnit);
  EXPECT_EQ(Of(sim0).offloads, 1);
  ExpectBalanced();
}

TEST_F(DevicesTest, WorkingMemoryThatCanNeverFitIsAnErrorAndLeavesTheCopy) {
  LockHandle a = MustLock("a", Streamable());
  MustLockOn(sim0, a).Release();
  const auto refused = cache.LockOnDevice(a, sim0, {.owner = "me", .working_bytes = 81 * kUnit});
  EXPECT_EQ(ErrorReason(refused.status()), "MODEL_EXCEEDS_BUDGET");
  EXPECT_EQ(There("a").bytes, 60 * kUnit);
  EXPECT_EQ(There("a").lock_count, 0);
  EXPECT_EQ(Record("a").lock_count, 1);
}

TEST_F(DevicesTest, ForcedStreamingKeepsOnlyWhatHasToStay) {
  LockHandle a = MustLock("a", Streamable());
  MustLockOn(sim0, a).Release();  // all of it is there
  DeviceLock d = MustLockOn(sim0, a, {.owner = "me", .mode = ResidencyMode::kStream, .ring_slots = 3});
  EXPECT_EQ(d.plan().resident_bytes, 6 * kUnit);
  EXPECT_EQ(ResidentBlocks(d), 1);
  EXPECT_EQ(sim0.allocated_bytes(), 6 * kUnit);
  EXPECT_TRUE(d.plan().streams());
  ExpectBalanced();
  // What others use stays as it is.
  DeviceLock all = MustLockOn(sim0, a, {.owner = "you", .mode = ResidencyMode::kFull});
  DeviceLock again = MustLockOn(sim0, a, {.owner = "me", .mode = ResidencyMode::kStream});
  EXPECT_EQ(again.resource(), all.resource());
  EXPECT_FALSE(again.plan().streams());
  ExpectBalanced();
}

TEST_F(DevicesTest, WhatHasNothingToStreamIsResidentWhateverWasAskedFor) {
  LockHandle a = MustLock("a", 20);
  DeviceLock d = MustLockOn(sim0, a, {.owner = "me", .mode = ResidencyMode::kStream});
  EXPECT_FALSE(d.plan().streams());
  EXPECT_EQ(sim0.allocated_bytes(), 20 * kUnit);
}

TEST_F(DevicesTest, AllOfItOrAnErrorMeansThat) {
  LockHandle a = MustLock("a", Streamable());
  Reservation other = Occupy(sim0, 30);
  const DeviceLockOptions full = {
      .owner = "me", .mode = ResidencyMode::kFull, .deadline = absl::InfinitePast()};
  EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, sim0, full).status()), "BUDGET_EXHAUSTED");
  MustLockOn(sim0, a).Release();  // a part
  EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, sim0, full).status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(There("a").bytes, 36 * kUnit);
  other.Release();
  DeviceLock d = MustLockOn(sim0, a, full);
  EXPECT_EQ(d.plan().resident_bytes, 60 * kUnit);
  ExpectBalanced();
}

TEST_F(DevicesTest, TheSmallestPartThatDoesNotFitIsAnError) {
  LockHandle a = MustLock("a", Streamable());
  Reservation other = Occupy(sim0, 70);
  EXPECT_EQ(
      ErrorReason(cache.LockOnDevice(a, sim0, {.owner = "me", .deadline = absl::InfinitePast()}).status()),
      "BUDGET_EXHAUSTED");
  sim0.budget().set_cap(17 * kUnit);
  EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, sim0, {.owner = "me"}).status()), "MODEL_EXCEEDS_BUDGET");
  EXPECT_EQ(There("a").bytes, 0);
  EXPECT_EQ(Record("a").lock_count, 1);
}

TEST_F(DevicesTest, TheBlocksThatAreNamedAreThereAndNoOthers) {
  LockHandle a = MustLock("a", Streamable());
  std::vector<bool> named(10, false);
  named[3] = named[7] = true;
  DeviceLock d = MustLockOn(sim0, a, {.owner = "me", .blocks = named});
  EXPECT_EQ(ResidentBlocks(d), 3);  // and what stays
  EXPECT_FALSE(d.plan().streams());
  EXPECT_EQ(sim0.allocated_bytes(), 18 * kUnit);
  std::vector<bool> more(10, false);
  more[4] = true;
  DeviceLock e = MustLockOn(sim0, a, {.owner = "me", .blocks = more});
  EXPECT_EQ(ResidentBlocks(e), 4);  // what was there stays
  EXPECT_EQ(ResidentBlocks(d), 3);
  Reservation other = Occupy(sim0, 55);
  EXPECT_EQ(ErrorReason(cache
                            .LockOnDevice(a, sim0,
                                          {.owner = "me",
                                           .blocks = std::vector<bool>(10, true),
                                           .deadline = absl::InfinitePast()})
                            .status()),
            "BUDGET_EXHAUSTED");
  ExpectBalanced();
}

TEST_F(DevicesTest, ACopyThatIsThereIsUsedAtOnceWhoeverElseWaitsForRoom) {
  LockHandle a = MustLock("a", 50), b = MustLock("b", 50);
  DeviceLock first = MustLockOn(sim0, a, {.owner = "x"});
  std::thread waiter([&] { MustLockOn(sim0, b, {.owner = "y"}); });
  WaitUntil([&] { return sim0.budget().stats().waiting == 1; });
  DeviceLock second = MustLockOn(sim0, a, {.owner = "z", .deadline = absl::InfinitePast()});
  EXPECT_TRUE(second);
  first.Release();
  second.Release();
  waiter.join();
  ExpectBalanced();
}

// ------------------------------------------------------------------------------------------------ faults

// Breaks the move to a device at every place where it can break, and looks at what is left behind.
TEST_F(DevicesTest, WhoMayNotWaitIsRefusedAtOnceAndTakesWhatIsThere) {
  for (bool may_wait : {true, false}) {
    LockHandle a = MustLock("a", Streamable());
    Reservation occupied = Occupy(sim0, 40);
    const DeviceLockOptions all = {.owner = "me",
                                   .working_bytes = 1,
                                   .mode = ResidencyMode::kFull,
                                   .deadline = absl::Now() + absl::Milliseconds(may_wait ? 1 : 3600'000),
                                   .may_wait = may_wait};
    const int64_t waits = sim0.budget().stats().waits;
    EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, sim0, all).status()), "BUDGET_EXHAUSTED");
    EXPECT_EQ(sim0.budget().stats().waits - waits, may_wait ? 1 : 0);
    DeviceLock part = MustLockOn(sim0, a, {.owner = "me", .may_wait = may_wait});
    EXPECT_TRUE(part.plan().streams());
    part.Release();
    // Of the host, too.
    Reservation ram_taken =
        *ram.TryReserve({.bytes = ram.ObtainableBytes(), .owner = "occupant", .what = "occupied"});
    CpuDevice cpu(&ram);
    EXPECT_EQ(
        ErrorReason(
            cache
                .LockOnDevice(
                    a, cpu,
                    {.owner = "me", .working_bytes = kUnit, .deadline = all.deadline, .may_wait = may_wait})
                .status()),
        "BUDGET_EXHAUSTED");
  }
}

TEST_F(DevicesTest, AMoveThatFailsLeavesEverythingAsItWas) {
  LockHandle a = MustLock("a", Streamable());
  for (bool part_is_there : {false, true}) {
    for (FaultPoint point : {FaultPoint::kAllocate, FaultPoint::kCopy}) {
      for (int n = 1;; ++n) {
        cache.Offload(sim0, MemoryBudget::kUnlimited);
        if (part_is_there) {
          Reservation other = Occupy(sim0, 40);
          MustLockOn(sim0, a).Release();
        }
        const int64_t before = sim0.allocated_bytes();
        FaultInjector::Arm(point, n);
        const auto lock = cache.LockOnDevice(a, sim0, {.owner = "me", .working_bytes = 5 * kUnit});
        const bool reached = FaultInjector::Disarm();
        EXPECT_EQ(lock.ok(), !reached) << n;
        if (!reached) {
          EXPECT_EQ(n, part_is_there ? 10 - 4 + 1 : 10 + 1);  // one for each block that was copied
          break;
        }
        EXPECT_EQ(ErrorReason(lock.status()),
                  point == FaultPoint::kCopy ? "COPY_FAILED" : "DEVICE_OUT_OF_MEMORY");
        EXPECT_EQ(sim0.allocated_bytes(), before);
        EXPECT_EQ(sim0.budget().stats().in_use_bytes, before);
        EXPECT_EQ(sim0.budget().stats().reserved_bytes, 0);
        EXPECT_EQ(There("a").bytes, before);
        EXPECT_EQ(There("a").lock_count, 0);
        EXPECT_EQ(Record("a").lock_count, 1);
        ExpectBalanced();
      }
    }
  }
}

TEST_F(DevicesTest, APromiseThatFailsLeavesEverythingAsItWas) {
  LockHandle a = MustLock("a", Streamable());
  // The first try of each promise has a second behind it; both have to fail.
  sim0.budget().set_cap(10 * kUnit);
  EXPECT_FALSE(cache.LockOnDevice(a, sim0, {.owner = "me", .working_bytes = 11 * kUnit}).ok());
  EXPECT_FALSE(cache.LockOnDevice(a, sim0, {.owner = "me", .working_bytes = 5 * kUnit}).ok());
  EXPECT_EQ(sim0.budget().stats().reserved_bytes, 0);
  EXPECT_EQ(Record("a").lock_count, 1);
  EXPECT_THAT(Record("a").residency, IsEmpty());
}

TEST_F(DevicesTest, ALostDeviceAndABrokenFileAreErrorsBeforeAnythingIsPromised) {
  LockHandle a = MustLock("a", 20);
  MustLockOn(sim0, a).Release();
  sim0.Lose();
  EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, sim0, {.owner = "me"}).status()), "DEVICE_LOST");
  EXPECT_TRUE(cache.LockOnDevice(a, sim1, {.owner = "me"}).ok());
  const_cast<Blob&>(a.As<Blob>()).broken = true;
  EXPECT_EQ(cache.LockOnDevice(a, sim1, {.owner = "me"}).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Record("a").lock_count, 1);
  ExpectBalanced();
}

TEST_F(DevicesTest, ACancelledMoveStopsBetweenBlocks) {
  std::stop_source stop;
  Loader loader{"test", 60 * kUnit, [&](const LoadContext&) -> Loaded {
                  auto blob = std::make_shared<Blob>(60 * kUnit, &alive);
                  blob->on_copy = [&] {
                    stop.request_stop();
                    return absl::OkStatus();
                  };
                  return blob;
                }};
  LockHandle a = MustLock("a", loader);
  EXPECT_TRUE(
      absl::IsCancelled(cache.LockOnDevice(a, sim0, {.owner = "me", .stop = stop.get_token()}).status()));
  EXPECT_EQ(sim0.allocated_bytes(), 0);
  EXPECT_EQ(sim0.budget().stats().reserved_bytes, 0);
}

// ------------------------------------------------------------------------------------------------- turns

class TurnsTest : public DevicesTest {
 protected:
  // A resource whose copies begin when they are told to.
  Loader CopiedWhenTold(int64_t units) {
    return {"test", units * kUnit, [this, units](const LoadContext&) -> Loaded {
              auto blob = std::make_shared<Blob>(units * kUnit, &alive);
              blob->on_copy = [this] {
                ++copying;
                WaitUntil([this] { return copying <= allowed; });
                return fail ? MakeError(absl::StatusCode::kInternal, "COPY_FAILED", "told to")
                            : absl::OkStatus();
              };
              return blob;
            }};
  }
  std::atomic<int> copying = 0;
  std::atomic<int> allowed = 0;
  std::atomic<bool> fail = false;
};

TEST_F(TurnsTest, OnlyOneMovesARecordToADeviceAndTheOthersWaitAndUseIt) {
  LockHandle a = MustLock("a", CopiedWhenTold(20));
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] { MustLockOn(sim0, a, {.owner = absl::StrCat(t)}); });
  }
  WaitUntil([&] {
    int waiting = 0;
    for (int t = 0; t < 8; ++t) waiting += Waits(absl::StrCat(t));
    return waiting == 7;
  });
  EXPECT_EQ(
      ErrorReason(cache.LockOnDevice(a, sim0, {.owner = "late", .deadline = absl::InfinitePast()}).status()),
      "DEADLINE_EXCEEDED");
  std::stop_source stop;
  stop.request_stop();
  EXPECT_TRUE(absl::IsCancelled(
      cache
          .LockOnDevice(
              a, sim0,
              {.owner = "gone", .deadline = absl::Now() + absl::Milliseconds(1), .stop = stop.get_token()})
          .status()));
  allowed = 1;
  for (auto& t : threads) t.join();
  EXPECT_EQ(copying, 1);
  EXPECT_EQ(Of(sim0).copies, 1);
  EXPECT_EQ(There("a").lock_count, 0);
  EXPECT_EQ(Record("a").lock_count, 1);
  ExpectBalanced();
}

TEST_F(TurnsTest, AWaitForATurnIsOverWhenTheMoveIsWhoeverRunsFirst) {
  LockHandle a = MustLock("a", CopiedWhenTold(20));
  for (int i = 0; i < 100; ++i) {
    copying = allowed = 0;
    cache.Offload(sim0, MemoryBudget::kUnlimited);
    std::thread mover([&] {
      DeviceLock d = MustLockOn(sim0, a, {.owner = "mover"});
      EXPECT_FALSE(Waits("waiter"));  // though its thread may not have run yet
    });
    WaitUntil([&] { return copying == 1; });
    std::thread waiter([&] { MustLockOn(sim0, a, {.owner = "waiter"}); });
    WaitUntil([&] { return Waits("waiter"); });
    allowed = 1;
    mover.join();
    waiter.join();
  }
}

TEST_F(TurnsTest, WhenAMoveFailsTheNextOneTries) {
  LockHandle a = MustLock("a", CopiedWhenTold(20));
  fail = true;
  std::thread first([&] {
    EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, sim0, {.owner = "first"}).status()), "COPY_FAILED");
  });
  WaitUntil([&] { return copying == 1; });
  std::thread second([&] { MustLockOn(sim0, a, {.owner = "second"}); });
  WaitUntil([&] { return Waits("second"); });
  allowed = 1;
  first.join();
  WaitUntil([&] { return copying == 2; });
  fail = false;
  allowed = 2;
  second.join();
  EXPECT_EQ(There("a").bytes, 20 * kUnit);
  ExpectBalanced();
}

TEST_F(TurnsTest, WhoMayNotWaitWaitsForACopyAndNotForSomebodyElsesWait) {
  LockHandle a = MustLock("a", CopiedWhenTold(20));
  std::optional<Reservation> occupied = Occupy(sim0, 70);
  std::thread first([&] { MustLockOn(sim0, a, {.owner = "first"}); });
  WaitUntil([&] { return Waits("first"); });
  EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, sim0, {.owner = "second", .may_wait = false}).status()),
            "BUDGET_EXHAUSTED");
  occupied.reset();
  WaitUntil([&] { return copying == 1; });
  std::thread second([&] { MustLockOn(sim0, a, {.owner = "second", .may_wait = false}); });
  WaitUntil([&] { return Waits("second"); });
  allowed = 1;
  first.join();
  second.join();
  EXPECT_EQ(copying, 1);
}

TEST_F(TurnsTest, ACancelEndsAWaitForATurn) {
  LockHandle a = MustLock("a", CopiedWhenTold(20));
  std::thread first([&] { MustLockOn(sim0, a, {.owner = "first"}); });
  WaitUntil([&] { return copying == 1; });
  std::stop_source stop;
  std::thread second([&] {
    EXPECT_TRUE(absl::IsCancelled(
        cache.LockOnDevice(a, sim0, {.owner = "second", .stop = stop.get_token()}).status()));
  });
  WaitUntil([&] { return Waits("second"); });
  stop.request_stop();
  second.join();
  allowed = 1;
  first.join();
  EXPECT_EQ(Record("a").lock_count, 1);
}

// Who lost the race for a turn waits again, and is seen to: what it holds may be what the winner needs.
TEST_F(TurnsTest, WhoWaitsForOneTurnAfterTheOtherIsSeenToWaitEachTime) {
  LockHandle a = MustLock("a", CopiedWhenTold(20));
  fail = true;  // so that each one has to copy
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, sim0, {.owner = absl::StrCat(t)}).status()), "COPY_FAILED");
    });
  }
  for (int turn = 1; turn <= 4; ++turn) {
    WaitUntil([&] {
      int waiting = 0;
      for (int t = 0; t < 4; ++t) waiting += Waits(absl::StrCat(t));
      return copying == turn && waiting == 4 - turn;
    });
    allowed = turn;
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(There("a").bytes, 0);
  ExpectBalanced();
}

// The copy that is in the way of its own working memory can be taken by others while the lock waits for that.
TEST_F(DevicesTest, ACopyTakenWhileItsLockWaitsForWorkingMemoryComesBack) {
  LockHandle a = MustLock("a", 30), b = MustLock("b", 20);
  MustLockOn(sim0, a).Release();
  DeviceLock other = MustLockOn(sim0, b, {.owner = "other", .working_bytes = 20 * kUnit});
  std::thread waiter([&] {
    // 40 free or a's own, 45 needed.
    DeviceLock d = MustLockOn(sim0, a, {.owner = "me", .working_bytes = 45 * kUnit});
    EXPECT_EQ(d.working_bytes(), 45 * kUnit);
  });
  WaitUntil([&] { return sim0.budget().stats().waiting == 1; });
  EXPECT_EQ(cache.Offload(sim0, MemoryBudget::kUnlimited), 30 * kUnit);
  EXPECT_EQ(There("a").bytes, 0);
  other.Release();
  waiter.join();
  EXPECT_EQ(There("a").bytes, 30 * kUnit);
  ExpectBalanced();
}

// ------------------------------------------------------------------------------------------------ storms

TEST_F(DevicesTest, StormsOfPartialLocksKeepTheDevicesBudget) {
  const int rounds = kSanitized ? 100 : 1000;
  {
    Sampler sampler([&] {
      const CacheStats stats = cache.Stats();
      EXPECT_EQ(stats.unaccounted_bytes(), 0);
      for (const auto& [name, device] : stats.devices) {
        EXPECT_LE(device.budget.in_use_bytes + device.budget.reserved_bytes, device.budget.cap_bytes);
        EXPECT_LE(device.allocated_bytes, device.budget.cap_bytes);
      }
    });
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        for (int i = 0; i < rounds; ++i) {
          LockHandle h = MustLock(random() % 2 == 0 ? "a" : "b",
                                  Load(40, Blocks(4, std::vector<int64_t>(9, 4))), absl::StrCat(t));
          if (!h) continue;
          const auto lock = cache.LockOnDevice(h, random() % 4 == 0 ? sim1 : sim0,
                                               {.owner = absl::StrCat(t),
                                                .working_bytes = static_cast<int64_t>(random() % 30) * kUnit,
                                                .mode = static_cast<ResidencyMode>(random() % 3),
                                                .ring_slots = static_cast<int32_t>(random() % 4)});
          if (!lock.ok()) {
            const std::string reason = ErrorReason(lock.status());
            EXPECT_TRUE(reason == "BUDGET_EXHAUSTED" || reason == "BUDGET_CYCLE") << lock.status();
            continue;
          }
          const ResidencyPlan& plan = lock->plan();
          const auto& memory = lock->As<BlobCopy>().memory();
          for (size_t b = 0; b < memory.size(); ++b) EXPECT_TRUE(memory[b] != nullptr || !plan.resident[b]);
          if (random() % 8 == 0) cache.Offload(sim0, MemoryBudget::kUnlimited);
        }
      });
    }
    for (auto& t : threads) t.join();
  }
  ExpectBalanced();
  cache.Trim(MemoryBudget::kUnlimited);
  ExpectEmpty();
}

}  // namespace
}  // namespace latentd
