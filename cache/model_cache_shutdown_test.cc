// The end of a cache, in every state that its records can be in. Nothing hangs: every wait here has a
// deadline or an end that the test brings about.
#include <atomic>
#include <thread>

#include "cache/base/error.h"
#include "cache/cache_test_util.h"
#include "cache/model_cache.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

class ShutdownTest : public CacheTest {
 protected:
  // A shutdown that cannot wait finds `held` records that are not free.
  void ExpectHeld(int held) {
    const absl::Status status = cache.Shutdown(absl::InfinitePast());
    EXPECT_EQ(ErrorReason(status), "DEADLINE_EXCEEDED");
    EXPECT_EQ(GetErrorDetails(status)["held_records"], absl::StrCat(held));
    ExpectRefused();
  }
  void ExpectRefused() {
    EXPECT_EQ(ErrorReason(cache.Lock({"new", ""}, Load(1), {.owner = "me"}).status()), "SHUTTING_DOWN");
    const std::vector<LockRequest> set = {{{"new", ""}, Load(1)}};
    EXPECT_EQ(ErrorReason(cache.LockAll(set, {.owner = "me"}).status()), "SHUTTING_DOWN");
    EXPECT_FALSE(cache.TryLock({"a", ""}, "me"));
  }
  // From here on nothing is held, and the shutdown succeeds without waiting.
  void ExpectDone() {
    EXPECT_TRUE(cache.Shutdown(absl::InfinitePast()).ok());
    EXPECT_TRUE(cache.Stats().records.empty());
    ExpectBalanced();
    ExpectEmpty();
  }
};

TEST_F(ShutdownTest, OfAnEmptyCache) {
  ExpectDone();
  ExpectRefused();
  ExpectDone();  // and once more
}

TEST_F(ShutdownTest, WithIdleRecords) {
  MustLock("a", 10).Release();
  MustLockOn(sim0, MustLock("b", 10)).Release();
  ExpectDone();
}

TEST_F(ShutdownTest, WithALockedRecord) {
  LockHandle a = MustLock("a", 20);
  MustLock("b", 20).Release();
  ExpectHeld(1);
  EXPECT_EQ(alive, 1);  // b went, a stays as long as it is held
  EXPECT_EQ(a.resource()->bytes(), 20 * kUnit);
  a.Release();
  ExpectDone();
}

TEST_F(ShutdownTest, WaitsForTheLastHandle) {
  LockHandle a = MustLock("a", 20), b = a.Share();
  std::thread user([&] {
    WaitUntil([&] { return !cache.TryLock({"a", ""}, "me"); });  // it has begun
    a.Release();
    b.Release();
  });
  EXPECT_TRUE(cache.Shutdown(absl::InfiniteFuture()).ok());
  user.join();
  ExpectDone();
}

TEST_F(ShutdownTest, WithAStaleRecord) {
  LockHandle a = MustLock("a", 20);
  cache.Drop({"a", ""});
  ExpectHeld(1);
  a.Release();
  ExpectDone();
}

TEST_F(ShutdownTest, DuringALoadAndAWaitForIt) {
  std::thread loader([&] { EXPECT_TRUE(cache.Lock({"a", ""}, LoadWhenTold(20), {.owner = "loader"}).ok()); });
  WaitUntil([&] { return loading.load(); });
  std::thread waiter([&] { EXPECT_TRUE(cache.Lock({"a", ""}, Load(20), {.owner = "waiter"}).ok()); });
  WaitUntil([&] { return Waits("waiter"); });
  ExpectHeld(1);
  go_on = true;  // both asked before, and get what they asked for
  EXPECT_TRUE(cache.Shutdown(absl::InfiniteFuture()).ok());
  loader.join();
  waiter.join();
  ExpectDone();
}

TEST_F(ShutdownTest, AWaitForALoadThatIsGivenUpIsRefused) {
  std::stop_source stop;
  Loader loader = LoadWhenTold(20);
  loader.load = [inner = loader.load](const LoadContext& c) -> Loaded {
    (void)inner(c);
    return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "load cancelled");
  };
  std::thread first([&] {
    EXPECT_TRUE(absl::IsCancelled(
        cache.Lock({"a", ""}, loader, {.owner = "first", .stop = stop.get_token()}).status()));
  });
  WaitUntil([&] { return loading.load(); });
  std::thread waiter([&] {
    EXPECT_EQ(ErrorReason(cache.Lock({"a", ""}, Load(20), {.owner = "waiter"}).status()), "SHUTTING_DOWN");
  });
  WaitUntil([&] { return Waits("waiter"); });
  ExpectHeld(1);
  stop.request_stop();
  go_on = true;
  first.join();
  waiter.join();
  ExpectDone();
}

TEST_F(ShutdownTest, DuringAWaitForMemoryThatComes) {
  LockHandle a = MustLock("a", 60, "holder");
  std::thread waiter([&] { EXPECT_TRUE(cache.Lock({"b", ""}, Load(60), {.owner = "waiter"}).ok()); });
  WaitUntil([&] { return Waits("waiter"); });
  ExpectHeld(2);  // a, and the load of b
  a.Release();
  EXPECT_TRUE(cache.Shutdown(absl::InfiniteFuture()).ok());
  waiter.join();
  ExpectDone();
}

TEST_F(ShutdownTest, DuringAWaitForMemoryThatDoesNotCome) {
  LockHandle a = MustLock("a", 60, "holder");
  std::stop_source stop;
  std::thread cancelled([&] {
    EXPECT_TRUE(absl::IsCancelled(
        cache.Lock({"b", ""}, Load(60), {.owner = "cancelled", .stop = stop.get_token()}).status()));
  });
  WaitUntil([&] { return Waits("cancelled"); });
  std::thread late([&] {
    EXPECT_EQ(ErrorReason(cache
                              .Lock({"c", ""}, Load(60),
                                    {.owner = "late", .deadline = absl::Now() + absl::Milliseconds(20)})
                              .status()),
              "BUDGET_EXHAUSTED");
  });
  late.join();
  ExpectHeld(2);
  stop.request_stop();
  cancelled.join();
  ExpectHeld(1);
  a.Release();
  ExpectDone();
}

TEST_F(ShutdownTest, DuringAMoveToADeviceAndAWaitForIt) {
  LockHandle a = MustLock("a", {"test", 20 * kUnit, [this](const LoadContext&) -> Loaded {
                                  auto blob = std::make_shared<Blob>(20 * kUnit, &alive);
                                  blob->on_copy = [this] {
                                    loading = true;
                                    WaitUntil([this] { return go_on.load(); });
                                    return absl::OkStatus();
                                  };
                                  return blob;
                                }});
  std::thread mover([&] { EXPECT_TRUE(cache.LockOnDevice(a, sim0, {.owner = "mover"}).ok()); });
  WaitUntil([&] { return loading.load(); });
  std::thread waiter([&] {
    EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, sim0, {.owner = "waiter"}).status()), "SHUTTING_DOWN");
  });
  WaitUntil([&] { return Waits("waiter"); });
  ExpectHeld(1);
  EXPECT_EQ(ErrorReason(cache.LockOnDevice(a, sim1, {.owner = "me"}).status()), "SHUTTING_DOWN");
  go_on = true;
  mover.join();
  waiter.join();
  ExpectHeld(1);
  a.Release();
  ExpectDone();
}

TEST_F(ShutdownTest, WithALockThatStreams) {
  LockHandle a = MustLock("a", Load(60, Blocks(6, std::vector<int64_t>(9, 6))));
  DeviceLock d =
      MustLockOn(sim0, a, {.owner = "me", .working_bytes = 5 * kUnit, .mode = ResidencyMode::kStream});
  EXPECT_TRUE(d.plan().streams());
  a.Release();
  ExpectHeld(1);
  EXPECT_EQ(sim0.budget().stats().reserved_bytes, 17 * kUnit);  // it goes on as it was
  d.Release();
  ExpectDone();
}

TEST_F(ShutdownTest, WithAStaleRecordThatIsOnADevice) {
  LockHandle a = MustLock("a", 20);
  DeviceLock d = MustLockOn(sim0, a);
  a.Release();
  cache.Drop({"a", ""});
  ExpectHeld(1);
  EXPECT_EQ(sim0.allocated_bytes(), 20 * kUnit);
  d.Release();
  ExpectDone();
}

TEST_F(ShutdownTest, RefusesWhatWasComputed) {
  ExpectDone();
  EXPECT_EQ(ErrorReason(cache
                            .Insert({"a", ""}, "test", std::make_shared<const Blob>(kUnit, &alive),
                                    *ram.Reserve({.bytes = kUnit}), 1, "me")
                            .status()),
            "SHUTTING_DOWN");
  ExpectDone();
}

TEST_F(ShutdownTest, HandlesCanStillBeShared) {
  LockHandle a = MustLock("a", 20);
  ExpectHeld(1);
  LockHandle b = a.Share("other");
  a.Release();
  ExpectHeld(1);
  b.Release();
  ExpectDone();
}

}  // namespace
}  // namespace latentd
