#include "cache/model_cache.h"

#include <atomic>
#include <new>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>

#include "absl/time/clock.h"
#include "cache/cache_test_util.h"
#include "cache/error.h"
#include "cache/fault_injection.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

class ModelCacheTest : public CacheTest {
 protected:
  // A loader that takes so long by the cache's clock.
  Loader LoadFor(absl::Duration d, int64_t units) {
    Loader loader = Load(units);
    loader.load = [this, d, inner = loader.load](const LoadContext& c) {
      Advance(d);
      return inner(c);
    };
    return loader;
  }
  // A loader that says when it runs and goes on when it may.
  Loader LoadWhenTold(int64_t units) {
    Loader loader = Load(units);
    loader.load = [this, inner = loader.load](const LoadContext& c) -> Loaded {
      loading = true;
      while (!go_on) {
        if (c.cancelled()) return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "load cancelled");
        absl::SleepFor(absl::Microseconds(50));
      }
      return inner(c);
    };
    return loader;
  }
  bool Waits(const std::string& owner) { return ram.waits()->Waits(owner); }

  std::atomic<bool> loading = false;
  std::atomic<bool> go_on = false;
};

// ------------------------------------------------------------------------------------------------- locks

TEST_F(ModelCacheTest, ALockShowsItsHolderAndGoesWithItsHandle) {
  {
    LockHandle h = MustLock("a", 40, "session-7");
    const RecordStats r = Record("a");
    EXPECT_EQ(r.lock_count, 1);
    EXPECT_THAT(r.holders, ElementsAre("session-7"));
    EXPECT_EQ(r.bytes, 40 * kUnit);
    EXPECT_EQ(r.kind, "test");
    ExpectBalanced();
  }
  EXPECT_EQ(Record("a").lock_count, 0);
}

TEST_F(ModelCacheTest, ASecondLockIsAHit) {
  MustLock("a", 40).Release();
  MustLock("a", 40).Release();
  EXPECT_EQ(loads, 1);
  EXPECT_EQ(cache.Stats().hits, 1);
  EXPECT_EQ(cache.Stats().misses, 1);
  EXPECT_EQ(cache.Stats().bytes_loaded, 40 * kUnit);
}

TEST_F(ModelCacheTest, AHandleCanBeEmptyMovedSharedAndReleasedTwice) {
  LockHandle empty;
  EXPECT_FALSE(empty);
  empty.Release();
  LockHandle a = MustLock("a", 10, "x");
  LockHandle b = a.Share("y");
  LockHandle c = a.Share();
  EXPECT_THAT(Record("a").holders, ElementsAre("x", "x", "y"));
  EXPECT_EQ(b.As<Blob>().bytes(), 10 * kUnit);
  EXPECT_EQ(b.key(), (ModelKey{"a", ""}));
  empty = std::move(a);
  EXPECT_FALSE(a);
  EXPECT_TRUE(empty);
  LockHandle& same = empty;
  empty = std::move(same);
  EXPECT_TRUE(empty);
  c = std::move(b);  // x's second lock goes
  EXPECT_THAT(Record("a").holders, ElementsAre("x", "y"));
  c.Release();
  c.Release();
  EXPECT_THAT(Record("a").holders, ElementsAre("x"));
  EXPECT_EQ(loads, 1);
}

TEST_F(ModelCacheTest, ALockedRecordIsNeverEvicted) {
  LockHandle a = MustLock("a", 60);
  auto b = cache.Lock({"b", ""}, Load(60), {.owner = "me"});
  EXPECT_EQ(ErrorReason(b.status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(cache.Trim(MemoryBudget::kUnlimited), 0);
  EXPECT_EQ(cache.EvictUnusedSince(absl::InfiniteFuture()), 0);
  EXPECT_EQ(alive, 1);
  EXPECT_THAT(cache.Stats().recent_evictions, IsEmpty());
  ExpectBalanced();
}

TEST_F(ModelCacheTest, TryLockFindsWhatIsThereAndNothingElse) {
  EXPECT_FALSE(cache.TryLock({"a", ""}, "me"));
  MustLock("a", 10).Release();
  LockHandle h = cache.TryLock({"a", ""}, "me");
  ASSERT_TRUE(h);
  EXPECT_THAT(Record("a").holders, ElementsAre("me"));
  EXPECT_EQ(cache.Stats().hits, 1);
  EXPECT_FALSE(cache.TryLock({"a", "unet"}, "me"));
}

TEST_F(ModelCacheTest, WhatWasComputedBecomesARecordWithItsPromise) {
  Reservation memory =
      *ram.Reserve({.bytes = 50 * kUnit, .use = MemoryUse::kMerged, .owner = "me", .what = "merge"});
  auto h = cache.Insert({"a+lora", ""}, "merged", std::make_shared<const Blob>(40 * kUnit, &alive),
                        std::move(memory), 2.5, "me");
  ASSERT_TRUE(h.ok()) << h.status();
  const RecordStats r = Record("a+lora");
  EXPECT_EQ(r.use, MemoryUse::kMerged);
  EXPECT_EQ(r.kind, "merged");
  EXPECT_EQ(r.load_seconds, 2.5);
  EXPECT_THAT(r.holders, ElementsAre("me"));
  const auto stats = ram.stats();
  EXPECT_EQ(stats.use(MemoryUse::kMerged).in_use_bytes, 40 * kUnit);  // the rest of the promise went back
  EXPECT_EQ(stats.reserved_bytes, 0);
  EXPECT_EQ(cache.Stats().misses, 0);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, WhatIsThereAlreadyIsLockedInsteadOfInsertedAgain) {
  LockHandle first = MustLock("a", 10);
  auto h = cache.Insert({"a", ""}, "test", std::make_shared<const Blob>(20 * kUnit, &alive),
                        *ram.Reserve({.bytes = 20 * kUnit}), 1, "me");
  ASSERT_TRUE(h.ok());
  EXPECT_EQ(h->resource(), first.resource());
  EXPECT_EQ(alive, 1);
  EXPECT_EQ(ram.stats().reserved_bytes, 0);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, AnInsertThatPromisedTooLittleIsAnError) {
  auto h = cache.Insert({"a", ""}, "test", std::make_shared<const Blob>(20 * kUnit, &alive),
                        *ram.Reserve({.bytes = 19 * kUnit}), 1, "me");
  EXPECT_EQ(ErrorReason(h.status()), "ESTIMATE_TOO_LOW");
  EXPECT_EQ(alive, 0);
  EXPECT_EQ(ram.stats().reserved_bytes, 0);
}

TEST_F(ModelCacheTest, ALoadThatIsOvertakenByAnInsertGivesItsOwnToItsCallers) {
  std::thread loader([&] {
    LockHandle h = MustLock("a", LoadWhenTold(10), "loader");
    EXPECT_EQ(h.resource()->bytes(), 10 * kUnit);
    EXPECT_EQ(cache.Stats().records.size(), 2u);
    ExpectBalanced();
  });
  WaitUntil([&] { return loading.load(); });
  auto h = cache.Insert({"a", ""}, "test", std::make_shared<const Blob>(20 * kUnit, &alive),
                        *ram.Reserve({.bytes = 20 * kUnit}), 1, "me");
  ASSERT_TRUE(h.ok());
  go_on = true;
  loader.join();
  EXPECT_EQ(alive, 1);
  EXPECT_EQ(Record("a").bytes, 20 * kUnit);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, LockAllTakesAllOrNothing) {
  std::vector<LockRequest> set = {{{"b", ""}, Load(50)}, {{"a", ""}, Load(40)}};
  {
    auto handles = cache.LockAll(set, {.owner = "me"});
    ASSERT_TRUE(handles.ok());
    EXPECT_EQ((*handles)[0].key().id, "b");  // in the order of the requests
    EXPECT_EQ((*handles)[1].key().id, "a");
    auto again = cache.LockAll(set, {.owner = "you"});
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(Record("a").lock_count, 2);
    EXPECT_EQ(loads, 2);
  }
  set.push_back({{"c", ""}, Load(40)});
  EXPECT_EQ(ErrorReason(cache.LockAll(set, {.owner = "me"}).status()), "BUDGET_EXHAUSTED");
  for (const RecordStats& r : cache.Stats().records) EXPECT_EQ(r.lock_count, 0);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, LockAllLetsEverythingGoWhenOneLoadFails) {
  Loader bad{"test", 10 * kUnit, [](const LoadContext&) -> Loaded {
               return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", "bad");
             }};
  const std::vector<LockRequest> set = {{{"a", ""}, Load(10)}, {{"b", ""}, bad}, {{"c", ""}, Load(10)}};
  EXPECT_EQ(ErrorReason(cache.LockAll(set, {.owner = "me"}).status()), "CORRUPT_FILE");
  EXPECT_THAT(Ids(), ElementsAre("a"));
  EXPECT_EQ(Record("a").lock_count, 0);
  EXPECT_EQ(ram.stats().reserved_bytes, 0);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, SetsThatNeedEachOthersMemoryAreTakenOneAfterTheOther) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) {
        std::vector<LockRequest> set = {{{"a", ""}, Load(30)}, {{"b", ""}, Load(30)}};
        if (t % 2 == 0) std::swap(set[0], set[1]);
        auto handles = cache.LockAll(set, {.owner = absl::StrCat(t)});
        EXPECT_TRUE(handles.ok() || ErrorReason(handles.status()) == "BUDGET_CYCLE") << handles.status();
        if (i % 7 == 0) cache.Drop({"a", ""});
      }
    });
  }
  for (auto& t : threads) t.join();
  ExpectBalanced();
}

// ------------------------------------------------------------------------------------------------- loads

TEST_F(ModelCacheTest, ConcurrentLocksOfAnAbsentKeyLoadOnce) {
  constexpr int kThreads = 500;
  std::vector<std::thread> threads;
  const Loader loader = LoadWhenTold(40);
  std::atomic<int> begun = 0;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      ++begun;
      EXPECT_TRUE(cache.Lock({"a", ""}, loader, {.owner = "me"}).ok());
    });
  }
  WaitUntil([&] { return begun == kThreads; });
  go_on = true;
  for (auto& t : threads) t.join();
  EXPECT_EQ(loads, 1);
  EXPECT_EQ(cache.Stats().misses, 1);
  EXPECT_EQ(cache.Stats().hits, kThreads - 1);
  EXPECT_EQ(Record("a").lock_count, 0);
}

TEST_F(ModelCacheTest, AFailedLoadGivesItsErrorToAllAndItsMemoryBack) {
  Loader loader = LoadWhenTold(40);
  loader.load = [inner = loader.load](const LoadContext& c) -> Loaded {
    (void)inner(c);
    return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", "bad");
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      EXPECT_EQ(ErrorReason(cache.Lock({"a", ""}, loader, {.owner = absl::StrCat(i)}).status()),
                "CORRUPT_FILE");
    });
  }
  WaitUntil([&] { return loading && Waits("0") + Waits("1") + Waits("2") + Waits("3") == 3; });
  go_on = true;
  for (auto& t : threads) t.join();
  EXPECT_EQ(cache.Stats().ram.reserved_bytes, 0);
  EXPECT_EQ(cache.Stats().load_failures, 1);
  EXPECT_TRUE(cache.Lock({"a", ""}, Load(40), {.owner = "me"}).ok());
}

TEST_F(ModelCacheTest, ALoadGoesOnWhileAnybodyWantsItAndStopsWhenNobodyDoes) {
  const Loader loader = LoadWhenTold(10);
  std::stop_source first, second;
  std::thread a([&] {
    EXPECT_TRUE(
        absl::IsCancelled(cache.Lock({"a", ""}, loader, {.owner = "a", .stop = first.get_token()}).status()));
  });
  WaitUntil([&] { return loading.load(); });
  std::thread b([&] {
    EXPECT_TRUE(absl::IsCancelled(
        cache.Lock({"a", ""}, loader, {.owner = "b", .stop = second.get_token()}).status()));
  });
  WaitUntil([&] { return Waits("b"); });
  first.request_stop();
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(cache.Stats().load_failures, 0);  // b still wants it
  second.request_stop();
  a.join();
  b.join();
  EXPECT_GE(cache.Stats().load_failures, 1);
  EXPECT_EQ(loads, 0);
  EXPECT_EQ(cache.Stats().ram.reserved_bytes, 0);
}

TEST_F(ModelCacheTest, AWaitForALoadEndsWithItsDeadlineAndTheLoadGoesOn) {
  std::thread a([&] { EXPECT_TRUE(cache.Lock({"a", ""}, LoadWhenTold(10), {.owner = "a"}).ok()); });
  WaitUntil([&] { return loading.load(); });
  const auto late =
      cache.Lock({"a", ""}, Load(10), {.owner = "b", .deadline = absl::Now() + absl::Milliseconds(5)});
  EXPECT_EQ(ErrorReason(late.status()), "DEADLINE_EXCEEDED");
  const auto never = cache.Lock({"a", ""}, Load(10), {.owner = "b", .deadline = absl::InfinitePast()});
  EXPECT_EQ(ErrorReason(never.status()), "DEADLINE_EXCEEDED");
  go_on = true;
  a.join();
  EXPECT_EQ(loads, 1);
}

// Who loads first waits for memory with a deadline of its own. That it comes is no answer for those who can
// wait longer.
TEST_F(ModelCacheTest, MemoryRefusedToOneCallerIsNoAnswerForTheOthers) {
  LockHandle other = MustLock("other", 60, "other");
  std::thread hurried([&] {
    EXPECT_EQ(ErrorReason(cache
                              .Lock({"a", ""}, Load(60),
                                    {.owner = "hurried", .deadline = absl::Now() + absl::Milliseconds(50)})
                              .status()),
              "BUDGET_EXHAUSTED");
  });
  WaitUntil([&] { return Waits("hurried"); });
  std::thread patient([&] { EXPECT_TRUE(cache.Lock({"a", ""}, Load(60), {.owner = "patient"}).ok()); });
  hurried.join();
  WaitUntil([&] { return Waits("patient"); });
  other.Release();
  patient.join();
  EXPECT_EQ(loads, 2);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, EverybodyWhoWaitsForALoadHearsOfItsProgress) {
  Loader loader = LoadWhenTold(10);
  loader.load = [inner = loader.load](const LoadContext& c) {
    auto result = inner(c);
    c.Progress(3, 10);
    return result;
  };
  std::atomic<int64_t> heard_a = 0, heard_b = 0;
  std::thread a([&] {
    EXPECT_TRUE(cache
                    .Lock({"a", ""}, loader,
                          {.owner = "a",
                           .progress =
                               [&](int64_t done, int64_t total) {
                                 EXPECT_EQ(total, 10);
                                 heard_a += done;
                               }})
                    .ok());
  });
  WaitUntil([&] { return loading.load(); });
  std::thread b([&] {
    EXPECT_TRUE(cache
                    .Lock({"a", ""}, loader,
                          {.owner = "b", .progress = [&](int64_t done, int64_t) { heard_b += done; }})
                    .ok());
  });
  WaitUntil([&] { return Waits("b"); });
  go_on = true;
  a.join();
  b.join();
  EXPECT_EQ(heard_a, 3);
  EXPECT_EQ(heard_b, 3);
}

TEST_F(ModelCacheTest, ALoaderThatUnderestimatesIsAnErrorNotAnOverdraft) {
  Loader loader = Load(50);
  loader.estimated_bytes = 20;
  EXPECT_EQ(ErrorReason(cache.Lock({"a", ""}, loader, {.owner = "me"}).status()), "ESTIMATE_TOO_LOW");
  EXPECT_EQ(alive, 0);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, ALoaderThatThrowsIsAnErrorLikeAnyOther) {
  const struct {
    std::function<void()> raise;
    const char* reason;
  } kCases[] = {
      {[] { throw std::bad_alloc(); }, "OUT_OF_MEMORY"},
      {[] { throw std::runtime_error("DefaultCPUAllocator: not enough memory"); }, "OUT_OF_MEMORY"},
      {[] { throw std::runtime_error("shapes differ\nand a trace"); }, "LOAD_FAILED"},
  };
  for (const auto& c : kCases) {
    Loader loader = Load(10);
    loader.load = [&](const LoadContext&) -> Loaded {
      c.raise();
      return nullptr;
    };
    const absl::Status status = cache.Lock({"a", ""}, loader, {.owner = "me"}).status();
    EXPECT_EQ(ErrorReason(status), c.reason);
    EXPECT_EQ(status.message().find("trace"), std::string::npos);
  }
  EXPECT_EQ(ram.stats().reserved_bytes, 0);
  MustLock("a", 10);
}

TEST_F(ModelCacheTest, AnEstimateThatWasTooHighIsGivenBack) {
  Loader loader = Load(50);
  loader.estimated_bytes = 100 * kUnit;
  LockHandle h = MustLock("a", loader);
  EXPECT_EQ(ram.stats().in_use_bytes, 50 * kUnit);
  EXPECT_EQ(ram.stats().reserved_bytes, 0);
}

TEST_F(ModelCacheTest, AKeyDroppedWhileItLoadsIsStaleFromTheStart) {
  Loader loader = Load(10);
  loader.load = [this, inner = loader.load](const LoadContext& c) {
    cache.Drop({"a", ""});
    return inner(c);
  };
  LockHandle h = MustLock("a", loader);
  EXPECT_TRUE(cache.Stats().records.at(0).stale);
  ExpectBalanced();
  h.Release();
  EXPECT_TRUE(cache.Stats().records.empty());
  ExpectBalanced();
}

// As MemoryBudget.AServedWaiterIsNeverTakenForOneThatWaits, for those who wait for a load: they hold its
// record from the moment at which it is done, and nobody who waits for memory may be refused because of them.
TEST_F(ModelCacheTest, AWaiterWhoseLoadIsDoneIsNeverTakenForOneThatWaits) {
  const int rounds = kSanitized ? 300 : 3000;
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < rounds; ++i) {
        const std::string id = t < 4 ? "shared" : absl::StrCat("own-", t);
        auto h = cache.Lock({id, ""}, Load(60), {.owner = absl::StrCat(t)});
        ASSERT_TRUE(h.ok()) << h.status();  // nobody asks with bytes in hand, so nobody is to be refused
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(ram.stats().refused, 0);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, AWaitForALoadIsOverWhenTheLoadIsWhoeverRunsFirst) {
  for (int i = 0; i < 100; ++i) {
    loading = go_on = false;
    cache.Drop({"a", ""});
    std::thread loader([&] {
      LockHandle h = MustLock("a", LoadWhenTold(10), "loader");
      EXPECT_FALSE(Waits("waiter"));  // though its thread may not have run yet
    });
    WaitUntil([&] { return loading.load(); });
    std::thread waiter([&] { MustLock("a", 10, "waiter"); });
    WaitUntil([&] { return Waits("waiter"); });
    go_on = true;
    loader.join();
    waiter.join();
  }
}

// The one who loads may let go, and everything may be evicted, before those who waited for the load run
// again.
TEST_F(ModelCacheTest, WhoeverWaitedForALoadHoldsItsRecordFromTheMomentAtWhichItIsThere) {
  const int rounds = kSanitized ? 200 : 2000;
  std::vector<std::thread> threads;
  std::atomic<int> lost = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::string owner = absl::StrCat(t);
      for (int i = 0; i < rounds; ++i) {
        LockHandle h = MustLock("a", 40, owner);
        const CacheStats stats = cache.Stats();
        if (stats.records.size() != 1 || ::testing::Value(stats.records[0].holders, Not(Contains(owner))))
          ++lost;
        h.Release();
        cache.Trim(MemoryBudget::kUnlimited);
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(lost, 0);
  ExpectEmpty();
}

// ---------------------------------------------------------------------------------------------- evictions

TEST_F(ModelCacheTest, TheLeastRecentlyUsedRecordGoesFirst) {
  MustLock("a", 40).Release();
  MustLock("b", 40).Release();
  MustLock("a", 40).Release();  // a is younger now
  MustLock("c", 40).Release();
  EXPECT_THAT(Ids(), ElementsAre("a", "c"));
  ExpectBalanced();
}

TEST_F(ModelCacheTest, ARecordIsInUseUntilItIsLetGo) {
  LockHandle a = MustLock("a", 40);
  MustLock("b", 40).Release();
  a.Release();  // later than b
  MustLock("c", 40).Release();
  EXPECT_THAT(Ids(), ElementsAre("a", "c"));
}

TEST_F(ModelCacheTest, ALookAtARecordIsNoUseOfIt) {
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

TEST_F(ModelCacheTest, WhatIsDearToLoadOutlivesWhatIsCheapAndGoesInTheEnd) {
  MustLock("dear", LoadFor(absl::Seconds(4), 40)).Release();
  int cheap = 0;
  while (Record("dear").bytes != 0) {
    ASSERT_LT(cheap, 20);
    MustLock(absl::StrCat("cheap-", cheap++), LoadFor(absl::Seconds(1), 40)).Release();
  }
  EXPECT_EQ(cheap, 5);  // the first fits beside it; each one that goes for the next lets it sink by one
}

TEST_F(ModelCacheTest, WhatIsDroppedSaysNothingAboutTheWorthOfTheRest) {
  MustLock("dearest", LoadFor(absl::Seconds(100), 10)).Release();
  MustLock("dear", LoadFor(absl::Seconds(10), 40)).Release();
  cache.Drop({"dearest", ""});
  MustLock("cheap", LoadFor(absl::Seconds(1), 40)).Release();
  MustLock("next", LoadFor(absl::Seconds(1), 40)).Release();
  EXPECT_NE(Record("dear").bytes, 0);
  EXPECT_EQ(Record("cheap").bytes, 0);
}

TEST_F(ModelCacheTest, KeysMatchByWholeIdAndNeverByPrefix) {
  MustLock("flux", 10).Release();
  MustLock("flux-dev", 10).Release();
  const DropResult result = cache.Drop({"flux", ""});
  EXPECT_EQ(result.evicted_records, 1);
  EXPECT_EQ(result.evicted_bytes, 10 * kUnit);
  EXPECT_THAT(Ids(), ElementsAre("flux-dev"));
}

TEST_F(ModelCacheTest, AnIdWithoutAComponentCoversAllOfThem) {
  for (const char* component : {"unet", "vae"}) {
    ASSERT_TRUE(cache.Lock({"sdxl", component}, Load(10), {.owner = "me"}).ok());
  }
  EXPECT_EQ(cache.Drop({"sdxl", "clip"}).evicted_records, 0);
  EXPECT_EQ(cache.Drop({"sdxl", "vae"}).evicted_records, 1);
  ASSERT_TRUE(cache.Lock({"sdxl", "vae"}, Load(10), {.owner = "me"}).ok());
  EXPECT_EQ(cache.Drop({"sdxl", ""}).evicted_records, 2);
  EXPECT_EQ(cache.Stats().records.size(), 0u);
}

TEST_F(ModelCacheTest, ADroppedRecordStaysWithItsHolderAndIsLoadedAnewForOthers) {
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

TEST_F(ModelCacheTest, UnloadingLeavesWhatIsHeldAsItIs) {
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

TEST_F(ModelCacheTest, WhatWasMadeFromARecordGoesWithIt) {
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

TEST_F(ModelCacheTest, WhatNobodyUsedForLongGoes) {
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

TEST_F(ModelCacheTest, LoweringTheCapEvictsWhatNobodyHolds) {
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

TEST_F(ModelCacheTest, EveryEvictionHasItsReasonAndTheLastOnesAreRemembered) {
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

TEST_F(ModelCacheTest, WhatAReserveWouldEvictIsWhatItEvicts) {
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

TEST_F(ModelCacheTest, APointerThatOutlivesItsHandleKeepsItsBytesCounted) {
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

TEST_F(ModelCacheTest, APointerMayOutliveTheCache) {
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

// ------------------------------------------------------------------------------------------------- storms

TEST_F(ModelCacheTest, EveryByteIsAccountedForAtEveryMomentOfAStorm) {
  const int rounds = kSanitized ? 300 : 3000;
  {
    Sampler sampler([&] {
      const CacheStats stats = cache.Stats();
      EXPECT_EQ(stats.unaccounted_bytes(), 0);
      EXPECT_LE(stats.ram.in_use_bytes + stats.ram.reserved_bytes, stats.ram.cap_bytes);
      EXPECT_LE(stats.ram.peak_bytes, stats.ram.cap_bytes);
    });
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        std::shared_ptr<const Resource> kept;  // a pointer that outlives its handle
        for (int i = 0; i < rounds; ++i) {
          const int key = static_cast<int>(random() % 6);
          auto h = cache.Lock({absl::StrCat(key), ""}, Load(10 + key * 5), {.owner = absl::StrCat(t)});
          if (!h.ok()) continue;
          switch (random() % 5) {
            case 0:
              cache.Drop(h->key());
              break;
            case 1:
              cache.Trim(50 * kUnit);
              break;
            case 2:
              kept = t == 0 ? h->resource() : nullptr;
              break;
            case 3:
              kept = nullptr;
              break;
            default:
              break;
          }
        }
      });
    }
    for (auto& t : threads) t.join();
    EXPECT_GT(sampler.Stop(), 0);
  }
  ExpectBalanced();
  cache.Trim(MemoryBudget::kUnlimited);
  ExpectEmpty();
}

}  // namespace
}  // namespace latentd
