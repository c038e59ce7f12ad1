// How records come to be: loads that are shared, fail, are cancelled or waited for.
#include <atomic>
#include <functional>
#include <new>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache/base/error.h"
#include "cache/cache_test_util.h"
#include "cache/model_cache.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using ::testing::Contains;
using ::testing::Not;

using LoadTest = CacheTest;

TEST_F(LoadTest, ConcurrentLocksOfAnAbsentKeyLoadOnce) {
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

TEST_F(LoadTest, AFailedLoadGivesItsErrorToAllAndItsMemoryBack) {
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

TEST_F(LoadTest, ALoadGoesOnWhileAnybodyWantsItAndStopsWhenNobodyDoes) {
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

TEST_F(LoadTest, AWaitForALoadEndsWithItsDeadlineAndTheLoadGoesOn) {
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

// Two who want the same set, and memory for one of it.
TEST_F(LoadTest, OfSetsThatShareARecordOnlyOnePromisesItsBytes) {
  const std::vector<LockRequest> set = {{{"a", ""}, LoadWhenTold(60)}};
  std::thread one([&] { EXPECT_TRUE(cache.LockAll(set, {.owner = "one"}).ok()); });
  WaitUntil([&] { return loading.load(); });
  std::thread two([&] {
    const std::vector<LockRequest> larger = {{{"a", ""}, Load(60)}, {{"b", ""}, Load(20)}};
    const auto handles = cache.LockAll(larger, {.owner = "two"});
    ASSERT_TRUE(handles.ok()) << handles.status();
    EXPECT_EQ((*handles)[0].key().id, "a");
    EXPECT_EQ((*handles)[1].key().id, "b");
  });
  WaitUntil([&] { return Waits("two"); });
  EXPECT_EQ(ram.stats().waiting, 0);  // for the load, and not for memory
  go_on = true;
  one.join();
  two.join();
  EXPECT_EQ(loads, 2);
  EXPECT_EQ(ram.stats().peak_bytes, 80 * kUnit);
  ExpectBalanced();
}

TEST_F(LoadTest, ASetThatAsksTwiceForARecordGetsItTwice) {
  const auto handles =
      cache.LockAll(std::vector<LockRequest>{{{"a", ""}, Load(60)}, {{"a", ""}, Load(60)}}, {.owner = "me"});
  ASSERT_TRUE(handles.ok()) << handles.status();
  EXPECT_EQ(loads, 1);
  EXPECT_EQ(Record("a").lock_count, 2);
}

// What a set claimed and does not load after all is loaded by those who wait for it.
TEST_F(LoadTest, WhoeverJoinedASetThatIsRefusedLoadsForItself) {
  LockHandle pin = *cache.Lock({"pin", ""}, Load(30), {.owner = "pin", .lasting = true});
  LockHandle other = MustLock("other", 30, "other");
  std::stop_source stop;
  std::thread set([&] {
    const std::vector<LockRequest> both = {{{"a", ""}, Load(20)}, {{"b", ""}, Load(30)}};
    EXPECT_EQ(ErrorReason(cache.LockAll(both, {.owner = "set", .stop = stop.get_token()}).status()),
              "CANCELLED");
  });
  WaitUntil([&] { return ram.stats().waiting == 1; });
  std::thread joined([&] { EXPECT_TRUE(cache.Lock({"a", ""}, Load(20), {.owner = "joined"}).ok()); });
  WaitUntil([&] { return Waits("joined"); });
  stop.request_stop();
  set.join();
  joined.join();
  EXPECT_EQ(loads, 3);
  ExpectBalanced();
}

// A record that another one keeps as well: the one who leaves is not the last.
TEST_F(LoadTest, AHolderWhoLeavesOthersBehindWakesWhoWaits) {
  LockHandle lasting = *cache.Lock({"shared", ""}, Load(30), {.owner = "session", .lasting = true});
  LockHandle also = MustLock("shared", 30, "job");
  Reservation runs = *ram.Reserve({.bytes = 20 * kUnit, .owner = "runs", .what = "test"});
  std::stop_source stop;
  std::thread first([&] {
    EXPECT_FALSE(
        ram.Reserve({.bytes = 60 * kUnit, .owner = "first", .what = "test", .stop = stop.get_token()}).ok());
  });
  WaitUntil([&] { return ram.stats().waiting == 1; });
  std::atomic<bool> served = false;
  std::thread second([&] {
    const auto got = ram.Reserve({.bytes = 20 * kUnit, .owner = "second", .what = "test"});
    EXPECT_TRUE(got.ok()) << got.status();
    served = true;
  });
  // 100 less the 30 that last and the first's 60: 20 more would delay it.
  WaitUntil([&] { return ram.stats().waiting == 2; });
  WaitUntil([&] { return ram.waits()->Settled() != 0; });
  EXPECT_FALSE(served);
  lasting.Release();
  second.join();
  EXPECT_EQ(ram.stats().waiting, 1);
  stop.request_stop();
  first.join();
}

// What only its own records are in the way of is refused at once, whoever else holds them too or has a pin.
TEST_F(LoadTest, WhatTheAskerItselfHoldsIsNotWaitedFor) {
  LockHandle mine = MustLock("lora", 50, "me"), others = MustLock("lora", 50, "other");
  LockHandle pin = *cache.Lock({"pin", ""}, Load(1), {.owner = "pin", .lasting = true});
  const auto refused = ram.Reserve({.bytes = 60 * kUnit, .owner = "me", .what = "test"});
  EXPECT_EQ(ErrorReason(refused.status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(GetErrorDetails(refused.status()).at("hopeless"), "true");
}

// Of two locks of one owner the lasting one stays lasting when the other goes.
TEST_F(LoadTest, ALockThatLastsNoMoreGoesAsTheOneThatItIs) {
  auto hopeless = [&] {
    const auto tried = ram.TryReserve({.bytes = 60 * kUnit, .owner = "me", .what = "test"});
    return GetErrorDetails(tried.status()).count("hopeless") != 0;
  };
  LockHandle before = *cache.Lock({"a", ""}, Load(50), {.owner = "s", .lasting = true});
  EXPECT_TRUE(hopeless());
  cache.WillEnd("s");
  EXPECT_FALSE(hopeless());
  LockHandle after = *cache.Lock({"a", ""}, Load(50), {.owner = "s", .lasting = true});
  before.Release();
  EXPECT_TRUE(hopeless());
}

TEST_F(LoadTest, AHandOverChangesWhoHoldsALockAndWhetherItLasts) {
  auto hopeless = [&] {
    const auto tried = ram.TryReserve({.bytes = 60 * kUnit, .owner = "me", .what = "test"});
    return GetErrorDetails(tried.status()).count("hopeless") != 0;
  };
  LockHandle handle = MustLock("a", 50, "load-1");
  EXPECT_FALSE(hopeless());
  cache.HandOver(handle, "pin", /*lasting=*/true);
  EXPECT_TRUE(hopeless());
  EXPECT_THAT(Record("a").holders, testing::ElementsAre("pin"));
  DeviceLock there = MustLockOn(sim0, handle, {.owner = "load-1"});
  cache.HandOver(there, "pin", /*lasting=*/true);
  EXPECT_THAT(Record("a").holders, testing::ElementsAre("pin", "pin"));
  const auto tried = sim0.budget().TryReserve({.bytes = 31 * kUnit, .owner = "me", .what = "test"});
  EXPECT_EQ(GetErrorDetails(tried.status()).count("hopeless"), 1u);
  there.Release();
  EXPECT_THAT(Record("a").holders, testing::ElementsAre("pin"));
  handle.Release();
  EXPECT_EQ(Record("a").lock_count, 0);
  ExpectBalanced();
}

// Who loads first waits for memory with a deadline of its own. That it comes is no answer for those who can
// wait longer.
TEST_F(LoadTest, MemoryRefusedToOneCallerIsNoAnswerForTheOthers) {
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

TEST_F(LoadTest, EverybodyWhoWaitsForALoadHearsOfItsProgress) {
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

TEST_F(LoadTest, ALoaderThatUnderestimatesIsAnErrorNotAnOverdraft) {
  Loader loader = Load(50);
  loader.estimated_bytes = 20;
  EXPECT_EQ(ErrorReason(cache.Lock({"a", ""}, loader, {.owner = "me"}).status()), "ESTIMATE_TOO_LOW");
  EXPECT_EQ(alive, 0);
  ExpectBalanced();
}

TEST_F(LoadTest, ALoaderThatThrowsIsAnErrorLikeAnyOther) {
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

TEST_F(LoadTest, AnEstimateThatWasTooHighIsGivenBack) {
  Loader loader = Load(50);
  loader.estimated_bytes = 100 * kUnit;
  LockHandle h = MustLock("a", loader);
  EXPECT_EQ(ram.stats().in_use_bytes, 50 * kUnit);
  EXPECT_EQ(ram.stats().reserved_bytes, 0);
}

TEST_F(LoadTest, AKeyDroppedWhileItLoadsIsStaleFromTheStart) {
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
TEST_F(LoadTest, AWaiterWhoseLoadIsDoneIsNeverTakenForOneThatWaits) {
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

TEST_F(LoadTest, AWaitForALoadIsOverWhenTheLoadIsWhoeverRunsFirst) {
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
TEST_F(LoadTest, WhoeverWaitedForALoadHoldsItsRecordFromTheMomentAtWhichItIsThere) {
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

}  // namespace
}  // namespace latentd
