#include "cache/model_cache.h"

#include <atomic>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "cache/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using ::testing::ElementsAre;

// A resource of a given size; says when it dies.
class Blob : public Resource {
 public:
  explicit Blob(int64_t bytes, std::atomic<int>* alive = nullptr) : bytes_(bytes), alive_(alive) {
    if (alive_ != nullptr) ++*alive_;
  }
  ~Blob() override {
    if (alive_ != nullptr) --*alive_;
  }
  int64_t bytes() const override { return bytes_; }
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device& device, std::stop_token) const override {
    ASSIGN_OR_RETURN(std::shared_ptr<void> memory, device.Allocate(bytes_));
    struct Copy : Blob {
      Copy(int64_t bytes, std::shared_ptr<void> m) : Blob(bytes), memory(std::move(m)) {}
      std::shared_ptr<void> memory;
    };
    return std::make_shared<const Copy>(bytes_, std::move(memory));
  }

 private:
  const int64_t bytes_;
  std::atomic<int>* const alive_;
};

class ModelCacheTest : public ::testing::Test {
 protected:
  Loader Load(int64_t bytes) {
    return {"test", bytes, [this, bytes](const LoadContext&) -> absl::StatusOr<std::shared_ptr<const Resource>> {
              ++loads;
              return std::make_shared<const Blob>(bytes, &alive);
            }};
  }
  LockHandle MustLock(const std::string& id, int64_t bytes, const std::string& owner = "me") {
    auto handle = cache.Lock({id, ""}, Load(bytes), {.owner = owner});
    EXPECT_TRUE(handle.ok()) << handle.status();
    return std::move(*handle);
  }
  void ExpectBalanced() {
    const CacheStats stats = cache.Stats();
    EXPECT_EQ(stats.ram.in_use_bytes, stats.record_bytes);
    EXPECT_LE(stats.ram.in_use_bytes + stats.ram.reserved_bytes, stats.ram.cap_bytes);
  }
  std::vector<std::string> Ids() {
    std::vector<std::string> ids;
    for (const RecordStats& r : cache.Stats().records) ids.push_back(r.key.id);
    return ids;
  }

  std::atomic<int> loads = 0;
  std::atomic<int> alive = 0;
  RamBudget ram{100};
  SimDevice sim{"sim:0", 80};
  ModelCache cache{&ram, {&sim}};
};

TEST_F(ModelCacheTest, ALockShowsItsHolderAndGoesWithItsHandle) {
  {
    LockHandle h = MustLock("a", 40, "session-7");
    const RecordStats r = cache.Stats().records.at(0);
    EXPECT_EQ(r.lock_count, 1);
    EXPECT_THAT(r.holders, ElementsAre("session-7"));
    EXPECT_EQ(r.bytes, 40);
    ExpectBalanced();
  }
  EXPECT_EQ(cache.Stats().records.at(0).lock_count, 0);
}

TEST_F(ModelCacheTest, ASecondLockIsAHit) {
  MustLock("a", 40).Release();
  MustLock("a", 40).Release();
  EXPECT_EQ(loads, 1);
  EXPECT_EQ(cache.Stats().hits, 1);
}

TEST_F(ModelCacheTest, ALockedRecordIsNeverEvicted) {
  LockHandle a = MustLock("a", 60);
  auto b = cache.Lock({"b", ""}, Load(60), {.owner = "me"});
  EXPECT_EQ(ErrorReason(b.status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(cache.Trim(MemoryBudget::kUnlimited), 0);
  EXPECT_EQ(alive, 1);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, TheLeastRecentlyUsedRecordGoesFirst) {
  MustLock("a", 40).Release();
  MustLock("b", 40).Release();
  MustLock("a", 40).Release();  // a is younger now
  MustLock("c", 40).Release();
  EXPECT_THAT(Ids(), ElementsAre("a", "c"));
  ExpectBalanced();
}

TEST_F(ModelCacheTest, KeysMatchByWholeIdAndNeverByPrefix) {
  MustLock("flux", 10).Release();
  MustLock("flux-dev", 10).Release();
  const DropResult result = cache.Drop({"flux", ""});
  EXPECT_EQ(result.evicted_records, 1);
  EXPECT_THAT(Ids(), ElementsAre("flux-dev"));
}

TEST_F(ModelCacheTest, ADroppedRecordStaysWithItsHolderAndIsLoadedAnewForOthers) {
  LockHandle old = MustLock("a", 30);
  const DropResult result = cache.Drop({"a", ""});
  EXPECT_EQ(result.stale_records, 1);
  EXPECT_EQ(alive, 1);
  EXPECT_EQ(old.resource()->bytes(), 30);
  LockHandle fresh = MustLock("a", 30);
  EXPECT_EQ(loads, 2);
  EXPECT_EQ(cache.Stats().record_bytes, 60);  // both are counted
  ExpectBalanced();
  old.Release();
  EXPECT_EQ(alive, 1);
  EXPECT_EQ(cache.Stats().record_bytes, 30);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, AKeyDroppedWhileItLoadsIsStaleFromTheStart) {
  Loader loader = Load(10);
  loader.load = [this, inner = loader.load](const LoadContext& c) {
    cache.Drop({"a", ""});
    return inner(c);
  };
  auto h = cache.Lock({"a", ""}, loader, {.owner = "me"});
  ASSERT_TRUE(h.ok());
  EXPECT_TRUE(cache.Stats().records.at(0).stale);
  h->Release();
  EXPECT_TRUE(cache.Stats().records.empty());
  ExpectBalanced();
}

TEST_F(ModelCacheTest, ConcurrentLocksOfAnAbsentKeyLoadOnce) {
  Loader loader = Load(40);
  loader.load = [inner = loader.load](const LoadContext& c) {
    absl::SleepFor(absl::Milliseconds(20));
    return inner(c);
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] { EXPECT_TRUE(cache.Lock({"a", ""}, loader, {.owner = "me"}).ok()); });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(loads, 1);
  EXPECT_EQ(cache.Stats().misses, 1);
  EXPECT_EQ(cache.Stats().hits, 15);
}

TEST_F(ModelCacheTest, AFailedLoadGivesItsErrorToAllAndItsMemoryBack) {
  Loader loader{"test", 40, [](const LoadContext&) -> absl::StatusOr<std::shared_ptr<const Resource>> {
                  absl::SleepFor(absl::Milliseconds(20));
                  return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", "bad");
                }};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      EXPECT_EQ(ErrorReason(cache.Lock({"a", ""}, loader, {.owner = "me"}).status()), "CORRUPT_FILE");
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(cache.Stats().ram.reserved_bytes, 0);
  EXPECT_TRUE(cache.Lock({"a", ""}, Load(40), {.owner = "me"}).ok());
}

TEST_F(ModelCacheTest, ALoadGoesOnWhileAnybodyWantsItAndStopsWhenNobodyDoes) {
  std::atomic<bool> started = false, cancelled = false;
  Loader loader{"test", 10, [&](const LoadContext& c) -> absl::StatusOr<std::shared_ptr<const Resource>> {
                  started = true;
                  while (!c.cancelled()) absl::SleepFor(absl::Milliseconds(1));
                  cancelled = true;
                  return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "load cancelled");
                }};
  std::stop_source first, second;
  std::thread a([&] {
    EXPECT_FALSE(cache.Lock({"a", ""}, loader, {.owner = "a", .stop = first.get_token()}).ok());
  });
  while (!started) absl::SleepFor(absl::Milliseconds(1));
  std::thread b([&] {
    EXPECT_TRUE(absl::IsCancelled(
        cache.Lock({"a", ""}, loader, {.owner = "b", .stop = second.get_token()}).status()));
  });
  absl::SleepFor(absl::Milliseconds(20));
  first.request_stop();
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_FALSE(cancelled);  // b still wants it
  second.request_stop();
  a.join();
  b.join();
  EXPECT_TRUE(cancelled);
  EXPECT_EQ(cache.Stats().ram.reserved_bytes, 0);
}

TEST_F(ModelCacheTest, ALoaderThatUnderestimatesIsAnErrorNotAnOverdraft) {
  Loader loader = Load(50);
  loader.estimated_bytes = 20;
  EXPECT_EQ(ErrorReason(cache.Lock({"a", ""}, loader, {.owner = "me"}).status()), "ESTIMATE_TOO_LOW");
  EXPECT_EQ(alive, 0);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, LockAllTakesAllOrNothing) {
  std::vector<LockRequest> set = {{{"a", ""}, Load(50)}, {{"b", ""}, Load(40)}};
  {
    auto handles = cache.LockAll(set, {.owner = "me"});
    ASSERT_TRUE(handles.ok());
    EXPECT_EQ((*handles)[0].key().id, "a");
    EXPECT_EQ((*handles)[1].key().id, "b");
  }
  set.push_back({{"c", ""}, Load(40)});
  EXPECT_FALSE(cache.LockAll(set, {.owner = "me"}).ok());
  for (const RecordStats& r : cache.Stats().records) EXPECT_EQ(r.lock_count, 0);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, HandlesAndDeviceLocksEndInAnyOrder) {
  for (bool handle_first : {true, false}) {
    LockHandle h = MustLock("a", 30);
    DeviceLock d = *cache.LockOnDevice(h, sim, {.owner = "me", .working_bytes = 10});
    EXPECT_EQ(sim.allocated_bytes(), 30);
    EXPECT_EQ(sim.budget().stats().reserved_bytes, 10);
    if (handle_first) {
      h.Release();
      EXPECT_EQ(cache.Trim(1000), 0);  // the device lock alone keeps it
      d.Release();
    } else {
      d.Release();
      EXPECT_EQ(cache.Trim(1000), 0);
      h.Release();
    }
    EXPECT_EQ(cache.Trim(1000), 30);
    EXPECT_EQ(sim.allocated_bytes(), 0);
    EXPECT_EQ(sim.budget().stats().in_use_bytes, 0);
    EXPECT_EQ(sim.budget().stats().reserved_bytes, 0);
  }
}

TEST_F(ModelCacheTest, ADeviceMakesRoomFromItsUnlockedCopiesSmallestFirst) {
  LockHandle a = MustLock("a", 20), b = MustLock("b", 40), c = MustLock("c", 30);
  cache.LockOnDevice(a, sim, {.owner = "me"})->Release();
  cache.LockOnDevice(b, sim, {.owner = "me"})->Release();
  ASSERT_TRUE(cache.LockOnDevice(c, sim, {.owner = "me"}).ok());  // 20 + 40 + 30 > 80
  std::map<std::string, bool> there;
  for (const RecordStats& r : cache.Stats().records) there[r.key.id] = !r.residency.empty();
  EXPECT_FALSE(there["a"]);
  EXPECT_TRUE(there["b"]);
  EXPECT_TRUE(there["c"]);
}

TEST_F(ModelCacheTest, AFailedCopyToADeviceLeavesNothingBehind) {
  LockHandle a = MustLock("a", 20);
  sim.FailAllocation(1);
  EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, sim, {.owner = "me", .working_bytes = 5}).status()),
            "DEVICE_OUT_OF_MEMORY");
  EXPECT_EQ(sim.budget().stats().reserved_bytes, 0);
  EXPECT_EQ(cache.Stats().records.at(0).lock_count, 1);  // ours
  EXPECT_TRUE(cache.LockOnDevice(a, sim, {.owner = "me"}).ok());
}

TEST_F(ModelCacheTest, ShutdownWaitsForHandlesAndRefusesNewLocks) {
  LockHandle a = MustLock("a", 20);
  EXPECT_EQ(cache.Shutdown(absl::Now() + absl::Milliseconds(10)).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ErrorReason(cache.Lock({"b", ""}, Load(10), {.owner = "me"}).status()), "SHUTTING_DOWN");
  a.Release();
  EXPECT_TRUE(cache.Shutdown(absl::Now() + absl::Seconds(1)).ok());
  EXPECT_EQ(alive, 0);
  EXPECT_EQ(ram.stats().in_use_bytes, 0);
}

// The failure that this cache exists to make impossible: a LoRA in use is taken for abandoned when a peer
// makes room. One thread runs with it, another loads other models in a loop into a budget with no room to spare.
TEST_F(ModelCacheTest, AHeldLoraSurvivesAPeerThatLoadsInALoop) {
  LockHandle lora = MustLock("lora", 20, "session-0");
  const Resource* before = lora.resource().get();
  std::atomic<bool> stop = false;
  std::thread peer([&] {
    for (int i = 0; !stop; ++i) MustLock("model-" + std::to_string(i % 3), 70, "session-1").Release();
  });
  for (int i = 0; i < 200; ++i) {
    LockHandle again = lora.Share();
    EXPECT_EQ(again.resource().get(), before);
    const CacheStats stats = cache.Stats();
    EXPECT_LE(stats.ram.in_use_bytes + stats.ram.reserved_bytes, 100);
    absl::SleepFor(absl::Microseconds(100));
  }
  stop = true;
  peer.join();
  LockHandle third = MustLock("lora", 20);
  EXPECT_EQ(third.resource().get(), before);
  ExpectBalanced();
}

TEST_F(ModelCacheTest, RandomLocksFromManyThreadsKeepTheBudget) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([this, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 300; ++i) {
        const int key = static_cast<int>(random() % 6);
        auto h = cache.Lock({"k" + std::to_string(key), ""}, Load(10 + key * 5), {.owner = std::to_string(t)});
        if (!h.ok()) continue;
        switch (random() % 6) {
          case 0: cache.Drop(h->key()); break;
          case 1: cache.Trim(50); break;
          case 2: (void)cache.LockOnDevice(*h, sim, {.owner = std::to_string(t), .working_bytes = 3}); break;
          default: break;
        }
        const CacheStats stats = cache.Stats();
        EXPECT_LE(stats.ram.in_use_bytes + stats.ram.reserved_bytes, 100);
      }
    });
  }
  for (auto& t : threads) t.join();
  ExpectBalanced();
  cache.Trim(1000);
  EXPECT_EQ(alive, 0);
  EXPECT_EQ(sim.allocated_bytes(), 0);
  EXPECT_EQ(ram.stats().in_use_bytes + ram.stats().reserved_bytes, 0);
}

}  // namespace
}  // namespace latentd
