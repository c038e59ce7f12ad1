// How records go: for room, when they are dropped or not used for long, and what outlives them.
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/cache_test_util.h"
#include "cache/model_cache.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

using EvictionTest = CacheTest;

TEST_F(EvictionTest, TheLeastRecentlyUsedRecordGoesFirst) {
  MustLock("a", 40).Release();
  MustLock("b", 40).Release();
  MustLock("a", 40).Release();  // a is younger now
  MustLock("c", 40).Release();
  EXPECT_THAT(Ids(), ElementsAre("a", "c"));
  ExpectBalanced();
}

TEST_F(EvictionTest, ARecordIsInUseUntilItIsLetGo) {
  LockHandle a = MustLock("a", 40);
  MustLock("b", 40).Release();
  a.Release();  // later than b
  MustLock("c", 40).Release();
  EXPECT_THAT(Ids(), ElementsAre("a", "c"));
}

TEST_F(EvictionTest, ALookAtARecordIsNoUseOfIt) {
  EXPECT_FALSE(cache.Peek({"a", ""}, "plan"));
  MustLock("a", 40).Release();
  MustLock("b", 40).Release();
  const absl::Time used = Now();
  Advance(absl::Seconds(5));
  LockHandle look = cache.Peek({"a", ""}, "plan");
  ASSERT_TRUE(look);
  EXPECT_THAT(Record("a").holders, ElementsAre("plan"));
  EXPECT_EQ(cache.Trim(MemoryBudget::kUnlimited), 40 * kUnit);  // b, for a is held
  MustLock("c", 40).Release();
  look.Release();
  EXPECT_EQ(Record("a").last_used, used);
  EXPECT_EQ(cache.Stats().hits, 0);
  MustLock("d", 40).Release();
  EXPECT_THAT(Ids(), ElementsAre("c", "d"));
}

TEST_F(EvictionTest, WhatIsDearToLoadOutlivesWhatIsCheapAndGoesInTheEnd) {
  MustLock("dear", LoadFor(absl::Seconds(4), 40)).Release();
  int cheap = 0;
  while (Record("dear").bytes != 0) {
    ASSERT_LT(cheap, 20);
    MustLock(absl::StrCat("cheap-", cheap++), LoadFor(absl::Seconds(1), 40)).Release();
  }
  EXPECT_EQ(cheap, 5);  // the first fits beside it; each one that goes for the next lets it sink by one
}

TEST_F(EvictionTest, WhatIsDroppedSaysNothingAboutTheWorthOfTheRest) {
  MustLock("dearest", LoadFor(absl::Seconds(100), 10)).Release();
  MustLock("dear", LoadFor(absl::Seconds(10), 40)).Release();
  cache.Drop({"dearest", ""});
  MustLock("cheap", LoadFor(absl::Seconds(1), 40)).Release();
  MustLock("next", LoadFor(absl::Seconds(1), 40)).Release();
  EXPECT_NE(Record("dear").bytes, 0);
  EXPECT_EQ(Record("cheap").bytes, 0);
}

TEST_F(EvictionTest, KeysMatchByWholeIdAndNeverByPrefix) {
  MustLock("flux", 10).Release();
  MustLock("flux-dev", 10).Release();
  const DropResult result = cache.Drop({"flux", ""});
  EXPECT_EQ(result.evicted_records, 1);
  EXPECT_EQ(result.evicted_bytes, 10 * kUnit);
  EXPECT_THAT(Ids(), ElementsAre("flux-dev"));
}

TEST_F(EvictionTest, AnIdWithoutAComponentCoversAllOfThem) {
  for (const char* component : {"unet", "vae"}) {
    ASSERT_TRUE(cache.Lock({"sdxl", component}, Load(10), {.owner = "me"}).ok());
  }
  EXPECT_EQ(cache.Drop({"sdxl", "clip"}).evicted_records, 0);
  EXPECT_EQ(cache.Drop({"sdxl", "vae"}).evicted_records, 1);
  ASSERT_TRUE(cache.Lock({"sdxl", "vae"}, Load(10), {.owner = "me"}).ok());
  EXPECT_EQ(cache.Drop({"sdxl", ""}).evicted_records, 2);
  EXPECT_EQ(cache.Stats().records.size(), 0u);
}

TEST_F(EvictionTest, ADroppedRecordStaysWithItsHolderAndIsLoadedAnewForOthers) {
  LockHandle old = MustLock("a", 30);
  const DropResult result = cache.Drop({"a", ""});
  EXPECT_EQ(result.stale_records, 1);
  EXPECT_EQ(result.stale_bytes, 30 * kUnit);
  EXPECT_EQ(cache.Drop({"a", ""}).stale_records, 0);  // it is out already
  EXPECT_EQ(alive, 1);
  EXPECT_EQ(old.resource()->bytes(), 30 * kUnit);
  LockHandle fresh = MustLock("a", 30);
  EXPECT_EQ(loads, 2);
  EXPECT_EQ(cache.Stats().record_bytes, 60 * kUnit);  // both are counted
  ExpectBalanced();
  LockHandle second = old.Share("other");
  old.Release();
  EXPECT_EQ(alive, 2);
  second.Release();
  EXPECT_EQ(alive, 1);
  EXPECT_EQ(cache.Stats().record_bytes, 30 * kUnit);
  ExpectBalanced();
}

TEST_F(EvictionTest, UnloadingLeavesWhatIsHeldAsItIs) {
  MustLock("a", 10).Release();
  ASSERT_TRUE(cache.Lock({"a", "x"}, Load(10), {.owner = "me"}).ok());
  LockHandle held = *cache.Lock({"a", "y"}, Load(10), {.owner = "me"});
  const DropResult result = cache.Unload({"a", ""});
  EXPECT_EQ(result.evicted_records, 2);
  EXPECT_EQ(result.evicted_bytes, 20 * kUnit);
  EXPECT_EQ(result.busy_records, 1);
  EXPECT_EQ(result.stale_records, 0);
  EXPECT_TRUE(cache.TryLock({"a", "y"}, "you"));
  EXPECT_FALSE(cache.TryLock({"a", "x"}, "you"));
  ExpectBalanced();
}

TEST_F(EvictionTest, WhatWasMadeFromARecordGoesWithIt) {
  auto insert = [&](const std::string& id, std::vector<std::string> sources) {
    return cache
        .Insert({id, ""}, "merged", std::make_shared<const Blob>(10 * kUnit, &alive),
                *ram.Reserve({.bytes = 10 * kUnit}), 1, "me", std::move(sources))
        .ok();
  };
  ASSERT_TRUE(insert("model+lora", {"model", "lora"}));
  ASSERT_TRUE(insert("model+other", {"model", "other"}));
  EXPECT_EQ(cache.Drop({"lora", ""}).evicted_records, 1);
  EXPECT_THAT(Ids(), ElementsAre("model+other"));
  // While it is being made, too.
  Loader loader = LoadWhenTold(10);
  loader.sources = {"model", "lora"};
  std::thread maker([&] {
    LockHandle h = MustLock("model+lora", loader);
    EXPECT_TRUE(Record("model+lora").holders.empty());  // it is stale from the start
  });
  WaitUntil([&] { return loading.load(); });
  EXPECT_EQ(cache.Drop({"lora", ""}).evicted_records, 0);
  go_on = true;
  maker.join();
  EXPECT_FALSE(cache.TryLock({"model+lora", ""}, "me"));
  ASSERT_TRUE(insert("model+lora", {"model", "lora"}));
  EXPECT_EQ(cache.Unload({"model", ""}).evicted_records, 2);
  ExpectEmpty();
}

// ------------------------------------------------------------------------------ records that models share

class SharedTest : public CacheTest {
 protected:
  // Locks the record for a model of that name.
  LockHandle LockFor(const std::string& name, const std::string& record = "weights") {
    Loader loader = Load(10);
    loader.name = name;
    auto handle = cache.Lock({record, "vae"}, loader, {.owner = name});
    EXPECT_TRUE(handle.ok()) << handle.status();
    return *std::move(handle);
  }
};

TEST_F(SharedTest, OneRecordHasTheNamesOfAllWhoAskedForIt) {
  LockFor("a").Release();
  LockFor("b").Release();
  LockRequest request{{"weights", "vae"}, Load(10)};
  request.loader.name = "c";
  ASSERT_TRUE(cache.LockAll({request}, {.owner = "me"}).ok());
  EXPECT_EQ(loads, 1);
  EXPECT_THAT(Record("weights").names, ElementsAre("a", "b", "c"));
}

TEST_F(SharedTest, WhoWaitedForALoadHasANameAsWell) {
  Loader first = LoadWhenTold(10), second = Load(10);
  first.name = "a";
  second.name = "b";
  std::thread loader([&] { EXPECT_TRUE(cache.Lock({"weights", "vae"}, first, {.owner = "a"}).ok()); });
  WaitUntil([&] { return loading.load(); });
  std::thread waiter([&] { EXPECT_TRUE(cache.Lock({"weights", "vae"}, second, {.owner = "b"}).ok()); });
  WaitUntil([&] { return Waits("b"); });
  go_on = true;
  loader.join();
  waiter.join();
  EXPECT_THAT(Record("weights").names, ElementsAre("a", "b"));
}

TEST_F(SharedTest, ItGoesWithItsLastName) {
  for (const bool drop : {true, false}) {
    LockFor("a").Release();
    LockFor("b").Release();
    const auto take = [&](const std::string& name) {
      const DropResult result = drop ? cache.Drop({name, ""}) : cache.Unload({name, ""});
      return result.evicted_records;
    };
    EXPECT_EQ(take("c"), 0);
    EXPECT_EQ(take("a"), 0);
    EXPECT_THAT(Record("weights").names, ElementsAre("b"));
    EXPECT_EQ(take("a"), 0);
    EXPECT_EQ(take("b"), 1);
    ExpectEmpty();
  }
}

TEST_F(SharedTest, DroppedWhileItIsHeldItGoesWithItsHolderUnlessAnotherNameIsLeft) {
  LockHandle a = LockFor("a");
  LockFor("b").Release();
  EXPECT_EQ(cache.Drop({"a", ""}).stale_records, 0);
  EXPECT_EQ(cache.Drop({"b", ""}).stale_records, 1);
  a.Release();
  ExpectEmpty();
}

TEST_F(SharedTest, UnloadingKeepsTheNameOfWhatIsHeld) {
  LockHandle a = LockFor("a");
  EXPECT_EQ(cache.Unload({"a", ""}).busy_records, 1);
  EXPECT_THAT(Record("weights").names, ElementsAre("a"));
  a.Release();
  EXPECT_EQ(cache.Unload({"a", ""}).evicted_records, 1);
}

TEST_F(SharedTest, DroppedWhileItLoadsItIsStaleUnlessAnotherNameWantsIt) {
  for (const bool another : {false, true}) {
    loading = go_on = false;
    Loader mine = LoadWhenTold(10), theirs = Load(10);
    mine.name = "a";
    theirs.name = "b";
    std::thread loader([&] { EXPECT_TRUE(cache.Lock({"weights", "vae"}, mine, {.owner = "a"}).ok()); });
    WaitUntil([&] { return loading.load(); });
    std::thread waiter;
    if (another) {
      waiter = std::thread([&] { EXPECT_TRUE(cache.Lock({"weights", "vae"}, theirs, {.owner = "b"}).ok()); });
      WaitUntil([&] { return Waits("b"); });
    }
    cache.Drop({"a", ""});
    go_on = true;
    loader.join();
    if (another) waiter.join();
    EXPECT_EQ(Ids(), another ? std::vector<std::string>{"weights"} : std::vector<std::string>{});
  }
}

// -------------------------------------------------------------------------------- files that change and go

class UnfitTest : public CacheTest {
 protected:
  std::shared_ptr<Blob> Insert(const ModelKey& key, std::vector<std::string> sources = {}) {
    auto blob = std::make_shared<Blob>(kUnit, &alive);
    Reservation memory = *ram.TryReserve({.bytes = kUnit, .use = MemoryUse::kWeights, .owner = "me"});
    EXPECT_TRUE(cache.Insert(key, "test", blob, std::move(memory), 0, "me", std::move(sources)).ok());
    return blob;
  }
};

TEST_F(UnfitTest, WhatChangedGoesWithWhatWasMadeFromIt) {
  auto changed = Insert({"a", "unet"});
  Insert({"a", "unet/merged"});
  Insert({"m", "conditioning"}, {"a"});
  Insert({"b", ""});
  EXPECT_EQ(cache.DropUnfit().evicted_records, 0);
  changed->broken = true;
  EXPECT_EQ(cache.DropUnfit().evicted_records, 3);
  EXPECT_THAT(Ids(), ElementsAre("b"));
}

TEST_F(UnfitTest, WhatChangedIsStaleWhileItIsHeld) {
  auto changed = Insert({"a", ""});
  LockHandle held = cache.TryLock({"a", ""}, "me");
  changed->broken = true;
  EXPECT_EQ(cache.DropUnfit().stale_records, 1);
  EXPECT_FALSE(cache.TryLock({"a", ""}, "me"));
}

TEST_F(UnfitTest, WhatIsElsewhereGoesUnlessItIsHeld) {
  auto gone = Insert({"a", ""});
  Insert({"m", "conditioning"}, {"a"});
  gone->elsewhere = true;
  LockHandle held = cache.TryLock({"a", ""}, "me");
  EXPECT_EQ(cache.DropUnfit().busy_records, 1);
  EXPECT_TRUE(cache.TryLock({"a", ""}, "me"));
  held.Release();
  cache.DropUnfit();
  EXPECT_THAT(Ids(), IsEmpty());
}

class ConditioningTest : public CacheTest {
 protected:
  // As after an encoder that took so long.
  LockHandle Keep(const std::string& id, int64_t units, double seconds = 10) {
    auto memory =
        ram.Reserve({.bytes = units * kUnit, .use = MemoryUse::kConditioning, .owner = "me", .what = id});
    EXPECT_TRUE(memory.ok()) << memory.status();
    auto handle = cache.Insert({id, ""}, "conditioning", std::make_shared<const Blob>(units * kUnit, &alive),
                               *std::move(memory), seconds, "me");
    EXPECT_TRUE(handle.ok()) << handle.status();
    return *std::move(handle);
  }
};

TEST_F(ConditioningTest, HasAShareOfItsOwn) {
  ram.set_cap(160 * kUnit);
  EXPECT_EQ(cache.conditioning_cap(), 10 * kUnit);  // a sixteenth
  cache.set_conditioning_cap(9 * kUnit);
  MustLock("weights", 20).Release();
  for (const char* id : {"a", "b", "c"}) Keep(id, 3).Release();
  EXPECT_THAT(Ids(), UnorderedElementsAre("weights", "a", "b", "c"));
  Keep("d", 3).Release();
  EXPECT_THAT(Ids(), UnorderedElementsAre("weights", "b", "c", "d"));
  Keep("e", 5).Release();
  EXPECT_THAT(Ids(), UnorderedElementsAre("weights", "d", "e"));
  EXPECT_EQ(cache.Stats().evicted(EvictReason::kRoom), 3);
}

TEST_F(ConditioningTest, WhatIsHeldStaysBeyondTheShare) {
  cache.set_conditioning_cap(5 * kUnit);
  LockHandle a = Keep("a", 4), b = Keep("b", 4);
  EXPECT_THAT(Ids(), UnorderedElementsAre("a", "b"));
  a.Release();
  Keep("c", 1).Release();
  EXPECT_THAT(Ids(), UnorderedElementsAre("b", "c"));
}

// It may have taken long to compute: it goes all the same before what was used since.
TEST_F(ConditioningTest, NeverOutlivesWhatWasUsedSince) {
  cache.set_conditioning_cap(50 * kUnit);
  Keep("old prompt", 10, /*seconds=*/1000).Release();
  MustLock("weights", 60).Release();
  Keep("new prompt", 10, /*seconds=*/1000).Release();
  LockHandle more = MustLock("more", 30);
  EXPECT_THAT(Ids(), UnorderedElementsAre("weights", "new prompt", "more"));
  LockHandle even_more = MustLock("even more", 10);
  EXPECT_THAT(Ids(), UnorderedElementsAre("new prompt", "more", "even more"));
}

TEST_F(EvictionTest, WhatNobodyUsedForLongGoes) {
  MustLock("old", 10).Release();
  LockHandle held = MustLock("held", 10);
  Advance(absl::Seconds(10));
  MustLock("young", 10).Release();
  EXPECT_EQ(Record("old").last_used, Now() - absl::Seconds(10));
  EXPECT_EQ(Record("held").last_used, Now());  // in use
  EXPECT_EQ(cache.EvictUnusedSince(Now() - absl::Seconds(11)), 0);
  EXPECT_EQ(cache.EvictUnusedSince(Now() - absl::Seconds(5)), 10 * kUnit);
  EXPECT_THAT(Ids(), UnorderedElementsAre("held", "young"));
  held.Release();
  EXPECT_EQ(cache.EvictUnusedSince(Now() - absl::Seconds(5)), 0);  // it was let go just now
  Advance(absl::Seconds(60));
  EXPECT_EQ(cache.EvictUnusedSince(Now() - absl::Seconds(5)), 20 * kUnit);
  EXPECT_EQ(cache.Stats().evicted(EvictReason::kKeepAlive), 3);
  ExpectEmpty();
}

TEST_F(EvictionTest, LoweringTheCapEvictsWhatNobodyHolds) {
  MustLock("a", 30).Release();
  MustLock("b", 30).Release();
  LockHandle held = MustLock("c", 30);
  ram.set_cap(70 * kUnit);
  EXPECT_THAT(Ids(), ElementsAre("b", "c"));
  ram.set_cap(10 * kUnit);
  EXPECT_THAT(Ids(), ElementsAre("c"));
  EXPECT_EQ(ram.stats().in_use_bytes, 30 * kUnit);
  EXPECT_EQ(cache.Stats().unaccounted_bytes(), 0);
  held.Release();
  EXPECT_THAT(Ids(), IsEmpty());  // it is too much still
}

TEST_F(EvictionTest, EveryEvictionHasItsReasonAndTheLastOnesAreRemembered) {
  MustLock("room", 60).Release();
  MustLock("drop", 60).Release();
  Advance(absl::Seconds(1));
  cache.Drop({"drop", ""});
  LockHandle stale = MustLock("stale", 10);
  cache.Drop({"stale", ""});
  MustLock("trim", 20).Release();
  cache.Trim(1);
  MustLock("idle", 10).Release();
  cache.EvictUnusedSince(Now());
  const CacheStats stats = cache.Stats();
  EXPECT_EQ(stats.evicted(EvictReason::kRoom), 1);
  EXPECT_EQ(stats.evicted(EvictReason::kDrop), 2);
  EXPECT_EQ(stats.evicted(EvictReason::kTrim), 1);
  EXPECT_EQ(stats.evicted(EvictReason::kKeepAlive), 1);
  std::vector<std::string> last;
  for (const Eviction& e : stats.recent_evictions)
    last.push_back(absl::StrCat(e.key.id, "/", EvictReasonName(e.reason)));
  EXPECT_THAT(last, ElementsAre("room/room", "drop/drop", "stale/drop", "trim/trim", "idle/keep_alive"));
  EXPECT_EQ(stats.recent_evictions[0].bytes, 60 * kUnit);
  EXPECT_EQ(stats.recent_evictions[0].time, Now() - absl::Seconds(1));
  EXPECT_EQ(EvictReasonName(static_cast<EvictReason>(99)), "");
  for (int i = 0; i < 100; ++i) {
    MustLock(absl::StrCat(i), 1).Release();
    cache.Trim(1);
  }
  EXPECT_EQ(cache.Stats().recent_evictions.size(), 64u);
  EXPECT_EQ(cache.Stats().recent_evictions.back().key.id, "99");
}

TEST_F(EvictionTest, WhatAReserveWouldEvictIsWhatItEvicts) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<LockHandle> held;
    for (int i = 0; i < 8; ++i) {
      const int key = static_cast<int>(random() % 12);
      auto h = cache.Lock({absl::StrCat(key), ""}, LoadFor(absl::Seconds(key % 4), 5 + key % 3),
                          {.owner = "me", .deadline = absl::InfinitePast()});
      if (h.ok() && random() % 4 == 0) held.push_back(std::move(*h));
    }
    const auto budget = ram.stats();
    const int64_t wanted = static_cast<int64_t>(random() % 110) * kUnit;
    const int64_t missing = wanted - (budget.cap_bytes - budget.in_use_bytes - budget.reserved_bytes);
    const auto would = cache.WouldEvict(missing);
    const int64_t before = cache.Stats().evicted(EvictReason::kRoom);
    auto r = random() % 2 == 0
                 ? ram.TryReserve({.bytes = wanted, .owner = "you", .deadline = absl::InfinitePast()})
                 : ram.Reserve({.bytes = wanted, .owner = "you", .deadline = absl::InfinitePast()});
    const CacheStats stats = cache.Stats();
    EXPECT_EQ(r.ok(), missing <= 0 || !would.empty());
    ASSERT_EQ(stats.evicted(EvictReason::kRoom) - before, static_cast<int64_t>(would.size()));
    for (size_t i = 0; i < would.size(); ++i) {
      EXPECT_EQ(stats.recent_evictions[stats.recent_evictions.size() - would.size() + i].key, would[i].key);
    }
    ExpectBalanced();
  }
}

TEST_F(EvictionTest, APointerThatOutlivesItsHandleKeepsItsBytesCounted) {
  for (bool dropped_while_held : {true, false}) {
    LockHandle h = MustLock("a", 60);
    std::shared_ptr<const Resource> pointer = h.resource();
    if (dropped_while_held) cache.Drop({"a", ""});
    h.Release();
    cache.Drop({"a", ""});
    EXPECT_TRUE(cache.Stats().records.empty());
    EXPECT_EQ(alive, 1);
    EXPECT_EQ(cache.Stats().leaving_bytes, 60 * kUnit);
    EXPECT_EQ(cache.Stats().unaccounted_bytes(), 0);
    EXPECT_EQ(ram.stats().in_use_bytes, 60 * kUnit);
    EXPECT_FALSE(ram.TryReserve({.bytes = 50 * kUnit, .owner = "me"}).ok());
    std::thread waiter([&] { EXPECT_TRUE(ram.Reserve({.bytes = 50 * kUnit, .owner = "me"}).ok()); });
    WaitUntil([&] { return ram.stats().waiting == 1; });
    pointer = nullptr;
    waiter.join();
    EXPECT_EQ(cache.Stats().leaving_bytes, 0);
    ExpectBalanced();
    ExpectEmpty();
  }
}

TEST_F(EvictionTest, APointerMayOutliveTheCache) {
  RamBudget budget(100);
  auto other = std::make_unique<ModelCache>(&budget, std::vector<Device*>{});
  Loader loader{"test", 10,
                [&](const LoadContext&) -> Loaded { return std::make_shared<const Blob>(10, &alive); }};
  std::shared_ptr<const Resource> pointer = other->Lock({"a", ""}, loader, {.owner = "me"})->resource();
  other = nullptr;
  EXPECT_EQ(budget.stats().in_use_bytes, 10);
  pointer = nullptr;
  EXPECT_EQ(budget.stats().in_use_bytes, 0);
}

}  // namespace
}  // namespace latentd
