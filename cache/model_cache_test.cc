// Locks and inserts, and the books in a storm of both.
#include "cache/model_cache.h"

#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/cache_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using ModelCacheTest = CacheTest;

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
