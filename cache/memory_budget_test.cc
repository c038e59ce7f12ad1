#include "cache/memory_budget.h"

#include <atomic>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "cache/cache_test_util.h"
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
      if (keep_next) kept.push_back(std::move(evictable.back()));
      keep_next = false;
      evictable.pop_back();
    }
    return freed;
  }
  void MayEvict(Reservation r) {
    r.Commit();
    evictable.push_back(std::move(r));
  }
  int64_t IdleBytes() const override {
    MutexLock lock(&mu);
    int64_t sum = 0;
    for (const Reservation& r : evictable) sum += r.bytes();
    return sum;
  }
  int64_t HeldBytes() const override {
    MutexLock lock(&mu);
    int64_t sum = 0;
    for (const HeldGroup& group : held) sum += group.bytes;
    return sum;
  }
  Held HeldByWhom() const override {
    const int64_t idle = IdleBytes();
    MutexLock lock(&mu);
    return {idle, held};
  }
  void GiveAllBack() {
    std::vector<Reservation> all, others;  // which end without the mutex
    MutexLock lock(&mu);
    all.swap(evictable);
    others.swap(kept);
  }
  mutable Mutex mu;
  std::vector<Reservation> evictable;
  bool keep_next = false;  // the next one that is evicted goes to `kept`, as if somebody had a pointer to it
  std::vector<Reservation> kept;
  std::vector<HeldGroup> held;
};

// Reservations end before their budget, those of its reclaimer too.
class ReclaimedBudget : public RamBudget {
 public:
  ReclaimedBudget(int64_t cap, FakeReclaimer& reclaimer) : RamBudget(cap), reclaimer_(reclaimer) {
    set_reclaimer(&reclaimer);
  }
  ~ReclaimedBudget() { reclaimer_.GiveAllBack(); }

 private:
  FakeReclaimer& reclaimer_;
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
  ReclaimedBudget budget(100, reclaimer);
  reclaimer.MayEvict(*budget.Reserve(Ask(90)));
  auto r = budget.Reserve(Ask(50));
  ASSERT_TRUE(r.ok()) << r.status();
  EXPECT_EQ(budget.stats().reserved_bytes, 50);
}

TEST(MemoryBudget, AloneInTheWayMeansRefusedAtOnceWithNumbers) {
  FakeReclaimer reclaimer;
  ReclaimedBudget budget(100, reclaimer);
  Reservation lora = *budget.Reserve(Ask(60));
  lora.Commit();
  reclaimer.held = {{{"session-1"}, 60}};
  auto r = budget.Reserve(Ask(50, "session-1"));
  EXPECT_EQ(r.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(r.status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(GetErrorDetails(r.status()).at("held_bytes"), "60");
  EXPECT_EQ(budget.stats().waiting, 0);
  EXPECT_EQ(budget.stats().refused, 1);
}

TEST(MemoryBudget, WhatNobodyHoldsDoesNotCountAsHeld) {
  FakeReclaimer reclaimer;
  ReclaimedBudget budget(100, reclaimer);
  Reservation held = *budget.Reserve(Ask(40));
  held.Commit();
  reclaimer.held = {{{"session-1"}, 40}};
  reclaimer.MayEvict(*budget.Reserve(Ask(30)));
  Reservation promised = *budget.Reserve(Ask(20));
  MemoryBudget::Request waits = Ask(60, "session-2");
  waits.deadline = absl::InfinitePast();
  const auto at_once = budget.TryReserve(Ask(60, "session-2")), in_the_end = budget.Reserve(waits);
  for (const absl::Status& refusal : {at_once.status(), in_the_end.status()}) {
    EXPECT_EQ(ErrorReason(refusal), "BUDGET_EXHAUSTED");
    EXPECT_EQ(GetErrorDetails(refusal).at("held_bytes"), "60");
  }
}

TEST(MemoryBudget, AWaiterGetsWhatAnotherGivesBack) {
  RamBudget budget(100);
  Reservation first = *budget.Reserve(Ask(80, "a"));
  std::thread waiter([&] { EXPECT_TRUE(budget.Reserve(Ask(50, "b")).ok()); });
  WaitUntil([&] { return budget.stats().waiting == 1; });
  first.Release();
  waiter.join();
}

TEST(MemoryBudget, WaitersAreServedInOrder) {
  RamBudget budget(100);
  Reservation all = *budget.Reserve(Ask(100, "holder"));
  std::atomic<int> turn = 0;
  int big_turn = 0, small_turn = 0;
  std::thread big([&] {
    auto r = budget.Reserve(Ask(90, "big"));
    EXPECT_TRUE(r.ok()) << r.status();
    big_turn = ++turn;
  });
  WaitUntil([&] { return budget.stats().waiting == 1; });
  std::thread small([&] {
    auto r = budget.Reserve(Ask(20, "small"));
    EXPECT_TRUE(r.ok()) << r.status();
    small_turn = ++turn;
  });
  WaitUntil([&] { return budget.stats().waiting == 2; });
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
  WaitUntil([&] { return budget.stats().waiting == 1; });
  stop.request_stop();
  waiter.join();
}

TEST(MemoryBudget, WhenAllHoldersWaitTheNewestIsRefusedAndTheRestGoesOn) {
  FakeReclaimer reclaimer;
  ReclaimedBudget budget(100, reclaimer);
  Reservation a = *budget.Reserve(Ask(50, "a"));
  Reservation b = *budget.Reserve(Ask(50, "b"));
  a.Commit();
  b.Commit();
  reclaimer.held = {{{"a"}, 50}, {{"b"}, 50}};
  std::thread older([&] { EXPECT_TRUE(budget.Reserve(Ask(30, "a")).ok()); });
  WaitUntil([&] { return budget.stats().waiting == 1; });
  auto newer = budget.Reserve(Ask(30, "b"));
  EXPECT_EQ(newer.status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ErrorReason(newer.status()), "BUDGET_CYCLE");
  EXPECT_EQ(GetErrorDetails(newer.status()).at("cycle"), "a waits for test in ram; b waits for test in ram");
  EXPECT_EQ(GetErrorDetails(newer.status()).at("held_bytes"), "100");
  {
    MutexLock lock(&reclaimer.mu);
    reclaimer.held = {{{"a"}, 50}};
  }
  b.Release();
  older.join();
}

TEST(MemoryBudget, RaisingTheCapLetsWaitersIn) {
  RamBudget budget(100);
  Reservation r = *budget.Reserve(Ask(80, "a"));
  std::thread waiter([&] { EXPECT_TRUE(budget.Reserve(Ask(50, "b")).ok()); });
  WaitUntil([&] { return budget.stats().waiting == 1; });
  budget.set_cap(200);
  waiter.join();
}

// Whoever was just served holds bytes and goes on: nobody may take it for one that waits, not even in the
// moment before its thread runs, and refuse another for that.
TEST(MemoryBudget, AServedWaiterIsNeverTakenForOneThatWaits) {
  constexpr int kThreads = 4;
  const int rounds = kSanitized ? 2000 : 20000;
  RamBudget budget(100);
  Reservation gate = *budget.Reserve(Ask(100, "gate"));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < rounds; ++i) {
        auto r = budget.Reserve(Ask(60, absl::StrCat("owner-", t)));
        ASSERT_TRUE(r.ok()) << r.status();  // nobody waits with bytes in hand, so nobody is to be refused
        std::this_thread::yield();
      }
    });
  }
  WaitUntil([&] { return budget.stats().waits == kThreads; });
  gate.Release();
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(budget.stats().refused, 0);
  EXPECT_GE(budget.stats().waits, kThreads);
}

TEST(MemoryBudget, AReservationMovesItsBytesAndNeverDoublesThem) {
  RamBudget budget(100);
  Reservation a = *budget.Reserve(Ask(30));
  Reservation b = *budget.Reserve(Ask(40));
  a.Commit();
  a.Commit();
  EXPECT_EQ(budget.stats().in_use_bytes, 30);
  b = std::move(a);  // what b had is given back
  EXPECT_EQ(budget.stats().reserved_bytes, 0);
  EXPECT_EQ(b.bytes(), 30);
  EXPECT_TRUE(b.committed());
  EXPECT_EQ(a.bytes(), 0);
  a.Commit();
  a.Release();
  Reservation& same = b;
  b = std::move(same);
  EXPECT_EQ(b.bytes(), 30);
  b.ShrinkTo(50);  // never grows
  EXPECT_EQ(b.bytes(), 30);
  EXPECT_EQ(b.Split(99).bytes(), 30);
  EXPECT_EQ(budget.stats().in_use_bytes, 0);
}

TEST(MemoryBudget, TheLedgerSaysWhatBytesAreForAndAddsUp) {
  RamBudget budget(1000);
  std::vector<Reservation> all;
  for (size_t use = 0; use < kMemoryUses; ++use) {
    auto request = Ask(static_cast<int64_t>(10 * (use + 1)));
    request.use = static_cast<MemoryUse>(use);
    all.push_back(*budget.Reserve(request));
    EXPECT_EQ(all.back().use(), request.use);
    if (use % 2 == 0) all.back().Commit();
  }
  all.push_back(all[0].Split(4, MemoryUse::kStaging));  // in use
  all.push_back(all[1].Split(5, MemoryUse::kStaging));  // reserved
  const auto stats = budget.stats();
  EXPECT_EQ(stats.use(MemoryUse::kWeights).in_use_bytes, 6);
  EXPECT_EQ(stats.use(MemoryUse::kPatches).reserved_bytes, 15);
  EXPECT_EQ(stats.use(MemoryUse::kStaging).in_use_bytes, 50 + 4);
  EXPECT_EQ(stats.use(MemoryUse::kStaging).reserved_bytes, 5);
  int64_t in_use = 0, reserved = 0;
  for (const auto& use : stats.uses) {
    in_use += use.in_use_bytes;
    reserved += use.reserved_bytes;
  }
  EXPECT_EQ(in_use, stats.in_use_bytes);
  EXPECT_EQ(reserved, stats.reserved_bytes);
  EXPECT_EQ(in_use + reserved, 10 + 20 + 30 + 40 + 50 + 60 + 70);
  all.clear();
  for (const auto& use : budget.stats().uses) {
    EXPECT_EQ(use.in_use_bytes, 0);
    EXPECT_EQ(use.reserved_bytes, 0);
  }
}

TEST(MemoryBudget, EveryUseHasAName) {
  std::set<absl::string_view> names;
  for (size_t use = 0; use < kMemoryUses; ++use) names.insert(MemoryUseName(static_cast<MemoryUse>(use)));
  EXPECT_EQ(names.size(), kMemoryUses);
  EXPECT_EQ(names.count(""), 0u);
  EXPECT_EQ(MemoryUseName(static_cast<MemoryUse>(99)), "");
}

TEST(MemoryBudget, TryReserveMakesRoomButNeverWaits) {
  FakeReclaimer reclaimer;
  ReclaimedBudget budget(100, reclaimer);
  reclaimer.MayEvict(*budget.Reserve(Ask(40)));
  Reservation held = *budget.Reserve(Ask(50));
  held.Commit();
  reclaimer.held = {{{"a"}, 50}};
  EXPECT_EQ(budget.ObtainableBytes(), 50);
  EXPECT_EQ(ErrorReason(budget.TryReserve(Ask(51)).status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(reclaimer.evictable.size(), 1u);  // it would not have sufficed
  EXPECT_TRUE(budget.TryReserve(Ask(50)).ok());
  EXPECT_TRUE(reclaimer.evictable.empty());
  EXPECT_EQ(ErrorReason(budget.TryReserve(Ask(101)).status()), "MODEL_EXCEEDS_BUDGET");
  EXPECT_EQ(budget.stats().refused, 0);  // the caller has another way
  EXPECT_EQ(budget.stats().waits, 0);
}

TEST(MemoryBudget, WithoutAReclaimerOnlyWhatIsFreeCanBeHad) {
  RamBudget budget(100);
  Reservation r = *budget.Reserve(Ask(60));
  r.Commit();
  EXPECT_EQ(budget.ObtainableBytes(), 40);
  EXPECT_EQ(ErrorReason(budget.TryReserve(Ask(41)).status()), "BUDGET_EXHAUSTED");
  EXPECT_TRUE(budget.TryReserve(Ask(40)).ok());
}

TEST(MemoryBudget, TryReserveGoesAheadOfWhoWaitsWhereThatDelaysNobody) {
  RamBudget budget(100);
  Reservation all = *budget.Reserve(Ask(70, "holder"));
  std::thread waiter([&] { EXPECT_TRUE(budget.Reserve(Ask(80, "waiter")).ok()); });
  WaitUntil([&] { return budget.stats().waiting == 1; });
  // 20 are left beside the 80, whatever the holder does.
  EXPECT_EQ(ErrorReason(budget.TryReserve(Ask(21)).status()), "BUDGET_EXHAUSTED");
  Reservation beside = *budget.TryReserve(Ask(15));
  EXPECT_EQ(ErrorReason(budget.TryReserve(Ask(6)).status()), "BUDGET_EXHAUSTED");
  beside.Release();
  beside = *budget.TryReserve(Ask(20));
  EXPECT_TRUE(budget.TryReserve(Ask(0)).ok());  // nothing is always there
  EXPECT_TRUE(budget.Reserve(Ask(0)).ok());
  all.Release();
  waiter.join();
}

TEST(MemoryBudget, NothingIsEvictedInVain) {
  FakeReclaimer reclaimer;
  ReclaimedBudget budget(100, reclaimer);
  reclaimer.MayEvict(*budget.Reserve(Ask(40)));
  Reservation held = *budget.Reserve(Ask(50));
  held.Commit();
  reclaimer.held = {{{"a"}, 50}};
  EXPECT_EQ(ErrorReason(budget.Reserve(Ask(60, "a")).status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(reclaimer.evictable.size(), 1u);
}

TEST(MemoryBudget, WhatWasEvictedAndIsNotFreeYetDoesNotEndTheSearch) {
  for (bool wait : {true, false}) {
    FakeReclaimer reclaimer;
    ReclaimedBudget budget(100, reclaimer);
    reclaimer.MayEvict(*budget.Reserve(Ask(50)));
    reclaimer.MayEvict(*budget.Reserve(Ask(50)));
    reclaimer.keep_next = true;
    EXPECT_TRUE((wait ? budget.Reserve(Ask(50)) : budget.TryReserve(Ask(50))).ok());
    EXPECT_EQ(reclaimer.kept.size(), 1u);
    EXPECT_TRUE(reclaimer.evictable.empty());
  }
}

TEST(MemoryBudget, LoweringTheCapMakesRoomAndLeavesWhatRuns) {
  FakeReclaimer reclaimer;
  ReclaimedBudget budget(100, reclaimer);
  reclaimer.MayEvict(*budget.Reserve(Ask(30)));
  Reservation running = *budget.Reserve(Ask(60));
  running.Commit();
  reclaimer.held = {{{"a"}, 60}};
  budget.set_cap(95);
  EXPECT_EQ(reclaimer.evictable.size(), 1u);  // they fit still
  budget.set_cap(50);
  EXPECT_TRUE(reclaimer.evictable.empty());
  EXPECT_EQ(budget.stats().in_use_bytes, 60);
  EXPECT_EQ(ErrorReason(budget.TryReserve(Ask(1)).status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(ErrorReason(budget.Reserve(Ask(51)).status()), "MODEL_EXCEEDS_BUDGET");
  EXPECT_EQ(budget.ObtainableBytes(), 0);
  running.Release();
  EXPECT_TRUE(budget.TryReserve(Ask(50)).ok());
}

TEST(MemoryBudget, WhatOthersTakeIsNotThere) {
  RamBudget budget(100);
  std::atomic<int64_t> foreign = 0;
  budget.set_foreign([&] { return foreign.load(); });
  Reservation first = *budget.Reserve(Ask(40, "a"));
  foreign = 30;
  auto refused = budget.TryReserve(Ask(31, "b"));
  EXPECT_EQ(ErrorReason(refused.status()), "BUDGET_EXHAUSTED");
  EXPECT_EQ(GetErrorDetails(refused.status()).at("foreign_bytes"), "30");
  EXPECT_TRUE(absl::StrContains(refused.status().message(), "30 by other processes"));
  EXPECT_EQ(budget.stats().foreign_bytes, 30);
  EXPECT_EQ(budget.ObtainableBytes(), 30);
  EXPECT_TRUE(budget.TryReserve(Ask(30, "b")).ok());
  foreign = -5;  // a driver that says nonsense
  EXPECT_TRUE(budget.TryReserve(Ask(60, "b")).ok());
  EXPECT_EQ(budget.stats().foreign_bytes, 0);
}

TEST(MemoryBudget, WhatOthersGiveBackIsFoundWithoutBeingTold) {
  RamBudget budget(100);
  std::atomic<int64_t> foreign = 50;
  budget.set_foreign([&] { return foreign.load(); });
  Reservation running = *budget.Reserve(Ask(10, "a"));  // so that the wait is not hopeless
  std::thread waiter([&] { EXPECT_TRUE(budget.Reserve(Ask(60, "b")).ok()); });
  WaitUntil([&] { return budget.stats().waiting == 1; });
  foreign = 0;
  waiter.join();
}

TEST(MemoryBudget, ACycleIsSeenOverAllBudgetsThatBelongTogether) {
  // Many times, for who is the newest and who waits has to be seen at one moment.
  const int rounds = kSanitized ? 100 : 1000;
  for (int i = 0; i < rounds; ++i) {
    FakeReclaimer of_ram, of_device;
    RamBudget ram(100);
    DeviceBudget device("sim:0", 100);
    ram.set_reclaimer(&of_ram);
    device.set_reclaimer(&of_device);
    device.ShareWaits(ram);
    Reservation a = *ram.Reserve(Ask(100, "a"));
    Reservation b = *device.Reserve(Ask(100, "b"));
    a.Commit();
    b.Commit();
    of_ram.held = {{{"a"}, 100}};
    of_device.held = {{{"b"}, 100}};
    std::thread older([&] { EXPECT_TRUE(device.Reserve(Ask(10, "a")).ok()); });
    WaitUntil([&] { return ram.waits()->Waits("a"); });
    auto newer = ram.Reserve(Ask(10, "b"));
    EXPECT_EQ(ErrorReason(newer.status()), "BUDGET_CYCLE");
    EXPECT_EQ(GetErrorDetails(newer.status())["cycle"], "a waits for test in sim:0; b waits for test in ram");
    {
      MutexLock lock(&of_device.mu);
      of_device.held = {};
    }
    b.Release();
    older.join();
  }
}

TEST(MemoryBudget, APromiseCanBeMadeToFail) {
  RamBudget budget(100);
  FaultInjector::Arm(FaultPoint::kReserve, 1);
  EXPECT_EQ(ErrorReason(budget.Reserve(Ask(1)).status()), "BUDGET_EXHAUSTED");
  FaultInjector::Arm(FaultPoint::kReserve, 1);
  EXPECT_EQ(ErrorReason(budget.TryReserve(Ask(1)).status()), "BUDGET_EXHAUSTED");
  EXPECT_TRUE(FaultInjector::Disarm());
  EXPECT_TRUE(budget.TryReserve(Ask(1)).ok());
}

// What a session's client has yet to read is not the session's: it may wait for those bytes.
TEST(Reservation, BytesThatWerePassedOnAreWaitedForByTheirFormerOwner) {
  RamBudget ram(100);
  Reservation all = *ram.Reserve({.bytes = 100, .owner = "session", .what = "pictures"});
  // Nobody else holds anything: refused at once.
  EXPECT_EQ(ErrorReason(ram.Reserve({.bytes = 10, .owner = "session", .what = "more"}).status()),
            "BUDGET_EXHAUSTED");
  Reservation file = all.Split(60);
  file.PassTo("the reader of session");
  EXPECT_EQ(ram.stats().reserved_bytes, 100);
  std::thread reader([&] {
    while (ram.stats().waiting == 0) std::this_thread::yield();
    file.Release();
  });
  const auto more = ram.Reserve({.bytes = 10, .owner = "session", .what = "more"});
  reader.join();
  EXPECT_TRUE(more.ok()) << more.status();
  all.Release();
  EXPECT_EQ(ram.stats().reserved_bytes, 10);
}

}  // namespace
}  // namespace latentd
