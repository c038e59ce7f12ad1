#include "cache/memory_budget.h"

#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "cache/error.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

// Holds what it is told to, and gives back on request.
class FakeReclaimer : public Reclaimer {
 public:
  int64_t Reclaim(int64_t bytes) override {
    MutexLock lock(&mu);
    int64_t freed = 0;
    while (!evictable.empty() && freed < bytes) {
      freed += evictable.back().bytes();
      evictable.pop_back();
    }
    return freed;
  }
  Held HeldBytes() const override {
    MutexLock lock(&mu);
    return held;
  }
  mutable Mutex mu;
  std::vector<Reservation> evictable;
  Held held;
};

MemoryBudget::Request Ask(int64_t bytes, std::string owner = "a") {
  return {.bytes = bytes, .owner = std::move(owner), .what = "test"};
}

TEST(MemoryBudget, AReservationIsReservedThenInUseThenGone) {
  RamBudget budget(100);
  {
    Reservation r = *budget.Reserve(Ask(60));
    EXPECT_EQ(budget.stats().reserved_bytes, 60);
    r.Commit();
    EXPECT_EQ(budget.stats().reserved_bytes, 0);
    EXPECT_EQ(budget.stats().in_use_bytes, 60);
  }
  EXPECT_EQ(budget.stats().in_use_bytes, 0);
  EXPECT_EQ(budget.stats().peak_bytes, 60);
}

TEST(MemoryBudget, SplitAndShrinkKeepTheSum) {
  RamBudget budget(100);
  Reservation r = *budget.Reserve(Ask(80));
  Reservation part = r.Split(30);
  EXPECT_EQ(budget.stats().reserved_bytes, 80);
  r.ShrinkTo(10);
  EXPECT_EQ(budget.stats().reserved_bytes, 40);
  part.Commit();
  EXPECT_EQ(budget.stats().in_use_bytes, 30);
  EXPECT_EQ(budget.stats().reserved_bytes, 10);
}

TEST(MemoryBudget, WhatCanNeverFitIsRefusedAtOnce) {
  RamBudget budget(100);
  auto r = budget.Reserve(Ask(101));
  EXPECT_EQ(r.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(r.status()), "MODEL_EXCEEDS_BUDGET");
  EXPECT_EQ(GetErrorDetails(r.status()).at("needed_bytes"), "101");
  EXPECT_EQ(GetErrorDetails(r.status()).at("cap_bytes"), "100");
}

TEST(MemoryBudget, RoomIsMadeByEvictingWhatNobodyHolds) {
  FakeReclaimer reclaimer;
  RamBudget budget(100);
  budget.set_reclaimer(&reclaimer);
  reclaimer.evictable.push_back(*budget.Reserve(Ask(90)));
  auto r = budget.Reserve(Ask(50));
  ASSERT_TRUE(r.ok()) << r.status();
  EXPECT_EQ(budget.stats().reserved_bytes, 50);
}

TEST(MemoryBudget, AloneInTheWayMeansRefusedAtOnceWithNumbers) {
  FakeReclaimer reclaimer;
  RamBudget budget(100);
  budget.set_reclaimer(&reclaimer);
  Reservation lora = *budget.Reserve(Ask(60));
  lora.Commit();
  reclaimer.held = {60, {"session-1"}};
  auto r = budget.Reserve(Ask(50, "session-1"));
  EXPECT_EQ(r.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(r.status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(GetErrorDetails(r.status()).at("held_bytes"), "60");
  EXPECT_EQ(budget.stats().waiting, 0);
  EXPECT_EQ(budget.stats().refused, 1);
}

TEST(MemoryBudget, AWaiterGetsWhatAnotherGivesBack) {
  RamBudget budget(100);
  Reservation first = *budget.Reserve(Ask(80, "a"));
  std::thread waiter([&] { EXPECT_TRUE(budget.Reserve(Ask(50, "b")).ok()); });
  while (budget.stats().waiting == 0) absl::SleepFor(absl::Milliseconds(1));
  first.Release();
  waiter.join();
}

TEST(MemoryBudget, WaitersAreServedInOrder) {
  RamBudget budget(100);
  Reservation all = *budget.Reserve(Ask(100, "holder"));
  std::atomic<int> turn = 0;
  int big_turn = 0, small_turn = 0;
  std::thread big([&] {
    Reservation r = *budget.Reserve(Ask(90, "big"));
    big_turn = ++turn;
  });
  while (budget.stats().waiting < 1) absl::SleepFor(absl::Milliseconds(1));
  std::thread small([&] {
    Reservation r = *budget.Reserve(Ask(20, "small"));
    small_turn = ++turn;
  });
  while (budget.stats().waiting < 2) absl::SleepFor(absl::Milliseconds(1));
  all.ShrinkTo(70);  // enough for the small one, which has to wait for its turn all the same
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(turn, 0);
  all.Release();
  big.join();
  small.join();
  EXPECT_EQ(big_turn, 1);
  EXPECT_EQ(small_turn, 2);
}

TEST(MemoryBudget, ADeadlineEndsAWait) {
  RamBudget budget(100);
  Reservation r = *budget.Reserve(Ask(80, "a"));
  auto request = Ask(50, "b");
  request.deadline = absl::Now() + absl::Milliseconds(20);
  EXPECT_EQ(ErrorReason(budget.Reserve(request).status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(budget.stats().waiting, 0);
}

TEST(MemoryBudget, AStopEndsAWait) {
  RamBudget budget(100);
  Reservation r = *budget.Reserve(Ask(80, "a"));
  std::stop_source stop;
  auto request = Ask(50, "b");
  request.stop = stop.get_token();
  std::thread waiter([&] { EXPECT_TRUE(absl::IsCancelled(budget.Reserve(request).status())); });
  while (budget.stats().waiting == 0) absl::SleepFor(absl::Milliseconds(1));
  stop.request_stop();
  waiter.join();
}

TEST(MemoryBudget, WhenAllHoldersWaitTheNewestIsRefusedAndTheRestGoesOn) {
  FakeReclaimer reclaimer;
  RamBudget budget(100);
  budget.set_reclaimer(&reclaimer);
  Reservation a = *budget.Reserve(Ask(50, "a"));
  Reservation b = *budget.Reserve(Ask(50, "b"));
  a.Commit();
  b.Commit();
  reclaimer.held = {100, {"a", "b"}};
  std::thread older([&] { EXPECT_TRUE(budget.Reserve(Ask(30, "a")).ok()); });
  while (budget.stats().waiting == 0) absl::SleepFor(absl::Milliseconds(1));
  auto newer = budget.Reserve(Ask(30, "b"));
  EXPECT_EQ(newer.status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ErrorReason(newer.status()), "BUDGET_CYCLE");
  {
    MutexLock lock(&reclaimer.mu);
    reclaimer.held = {50, {"a"}};
  }
  b.Release();
  older.join();
}

TEST(MemoryBudget, RaisingTheCapLetsWaitersIn) {
  RamBudget budget(100);
  Reservation r = *budget.Reserve(Ask(80, "a"));
  std::thread waiter([&] { EXPECT_TRUE(budget.Reserve(Ask(50, "b")).ok()); });
  while (budget.stats().waiting == 0) absl::SleepFor(absl::Milliseconds(1));
  budget.set_cap(200);
  waiter.join();
}

}  // namespace
}  // namespace latentd
