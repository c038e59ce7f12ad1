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
#include "cache/cache_test_util.h"
#include "cache/error.h"
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
