// Everything at once, from many threads: locks with short deadlines, locks on devices, sets, drops, trims,
// caps that change, cancels and faults. What must hold at every moment is looked at from a thread of its own
// and from those that hold something.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <random>
#include <set>
#include <thread>

#include "cache/base/error.h"
#include "cache/base/mutex.h"
#include "cache/cache_test_util.h"
#include "cache/model_cache.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

constexpr int kThreads = 16;

class StressTest : public CacheTest {
 protected:
  static int64_t Units(int key) { return 5 + key * 4; }
  Loader LoaderOf(int key) {
    Loader loader = Load(Units(key), Blocks(2, std::vector<int64_t>(static_cast<size_t>(Units(key) - 2), 1)));
    loader.load = [key, inner = loader.load](const LoadContext& c) -> Loaded {
      for (int i = 0; i < key; ++i) {
        if (c.cancelled()) return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "load cancelled");
        c.Progress(i, key);
        std::this_thread::yield();
      }
      return inner(c);
    };
    return loader;
  }

  // A token that the canceller may stop at any time.
  std::stop_token NewToken(int thread) {
    MutexLock lock(&mu);
    stops[static_cast<size_t>(thread)] = std::stop_source();
    return stops[static_cast<size_t>(thread)].get_token();
  }

  void ExpectTyped(const absl::Status& status) {
    static const std::set<std::string> kReasons = {
        "BUDGET_EXHAUSTED", "BUDGET_CYCLE",         "MODEL_EXCEEDS_BUDGET", "DEADLINE_EXCEEDED",
        "CANCELLED",        "DEVICE_OUT_OF_MEMORY", "COPY_FAILED"};
    EXPECT_EQ(kReasons.count(ErrorReason(status)), 1u) << status;
  }

  // Whoever holds a lock finds it in the cache, whatever the others do.
  void ExpectHeld(const LockHandle& handle, const std::string& owner) {
    const CacheStats stats = cache.Stats();
    EXPECT_TRUE(std::any_of(stats.records.begin(), stats.records.end(), [&](const RecordStats& r) {
      return r.key == handle.key() && r.bytes == handle.resource()->bytes() &&
             std::find(r.holders.begin(), r.holders.end(), owner) != r.holders.end();
    })) << handle.key().ToString();
  }

  void Run(int thread, int operations) {
    std::mt19937 random(static_cast<uint32_t>(thread));
    const std::string owner = absl::StrCat("session-", thread);
    std::vector<LockHandle> held;
    for (int i = 0; i < operations; ++i) {
      const int key = static_cast<int>(random() % 10);
      const ModelKey name = {absl::StrCat(key), ""};
      const absl::Time deadline = absl::Now() + absl::Microseconds(random() % 3000);
      switch (random() % 12) {
        case 0:
          cache.Drop(name);
          break;
        case 1:
          cache.Trim(static_cast<int64_t>(random() % 60) * kUnit);
          break;
        case 2:
          ram.set_cap((random() % 2 == 0 ? 100 : 60) * kUnit);
          break;
        case 3:
          sim0.budget().set_cap((random() % 2 == 0 ? 80 : 40) * kUnit);
          break;
        case 4: {
          sim1.FailAllocation(static_cast<int64_t>(random() % 40));
          sim1.FailCopy(static_cast<int64_t>(random() % 40));
          break;
        }
        case 5: {
          const std::vector<LockRequest> set = {{{absl::StrCat(key % 3), ""}, LoaderOf(key % 3)},
                                                {{absl::StrCat(3 + key % 3), ""}, LoaderOf(3 + key % 3)}};
          auto got = cache.LockAll(set, {.owner = owner, .deadline = deadline, .stop = NewToken(thread)});
          if (got.ok()) {
            for (const LockHandle& h : *got) ExpectHeld(h, owner);
          } else {
            ExpectTyped(got.status());
          }
          break;
        }
        case 6: {
          auto memory = ram.TryReserve({.bytes = 3 * kUnit, .use = MemoryUse::kMerged, .owner = owner});
          if (!memory.ok()) break;
          auto got = cache.Insert({"computed", ""}, "merged", std::make_shared<const Blob>(3 * kUnit, &alive),
                                  std::move(*memory), 1, owner);
          EXPECT_TRUE(got.ok()) << got.status();
          break;
        }
        case 7:
          cache.Offload(random() % 2 == 0 ? sim0 : sim1, 20 * kUnit);
          break;
        default: {
          auto got = cache.Lock(name, LoaderOf(key),
                                {.owner = owner,
                                 .deadline = deadline,
                                 .stop = NewToken(thread),
                                 .progress = [](int64_t, int64_t) {}});
          if (!got.ok()) {
            ExpectTyped(got.status());
            break;
          }
          ++locked;
          auto lock = cache.LockOnDevice(*got, random() % 2 == 0 ? sim0 : sim1,
                                         {.owner = owner,
                                          .working_bytes = static_cast<int64_t>(random() % 30) * kUnit,
                                          .mode = static_cast<ResidencyMode>(random() % 3),
                                          .deadline = deadline,
                                          .stop = NewToken(thread)});
          if (lock.ok()) {
            ++locked_on_device;
          } else {
            ExpectTyped(lock.status());
          }
          ExpectHeld(*got, owner);
          if (random() % 4 == 0) held.push_back(std::move(*got));
          break;
        }
      }
      if (held.size() > 2 || random() % 4 == 0) held.clear();
    }
  }

  Mutex mu;
  std::array<std::stop_source, kThreads> stops ABSL_GUARDED_BY(mu);
  std::atomic<int> locked = 0, locked_on_device = 0;
};

TEST_F(StressTest, WhateverManyThreadsDoTheBooksBalanceAndNothingInUseGoes) {
  const int operations = kSanitized ? 100 : 1000;
  {
    Sampler sampler([&] {
      const CacheStats stats = cache.Stats();
      EXPECT_EQ(stats.unaccounted_bytes(), 0);
      EXPECT_LE(stats.ram.peak_bytes, 100 * kUnit);  // the most that the cap ever was
      for (const auto& [name, device] : stats.devices) {
        EXPECT_LE(device.budget.peak_bytes, 80 * kUnit) << name;
        EXPECT_LE(device.allocated_bytes, 80 * kUnit) << name;
      }
    });
    std::atomic<bool> done = false;
    std::thread canceller([&] {
      std::mt19937 random(99);
      while (!done) {
        std::stop_source stop;
        {
          MutexLock lock(&mu);
          stop = stops[random() % kThreads];
        }
        stop.request_stop();
        absl::SleepFor(absl::Microseconds(200));
      }
    });
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([this, t, operations] { Run(t, operations); });
    }
    for (auto& t : threads) t.join();
    done = true;
    canceller.join();
    EXPECT_GT(sampler.Stop(), 0);
  }
  const CacheStats stats = cache.Stats();
  std::printf("%d locks, %d on devices, %lld loads, %lld waits for memory\n", locked.load(),
              locked_on_device.load(), static_cast<long long>(stats.misses),
              static_cast<long long>(stats.ram.waits));
  EXPECT_GT(locked, 0);
  EXPECT_GT(locked_on_device, 0);
  for (const RecordStats& r : stats.records) {
    EXPECT_EQ(r.lock_count, 0) << r.key.ToString();
    EXPECT_FALSE(r.stale) << r.key.ToString();
  }
  EXPECT_EQ(stats.ram.reserved_bytes, 0);
  EXPECT_EQ(stats.ram.waiting, 0);
  EXPECT_EQ(stats.unaccounted_bytes(), 0);
  EXPECT_EQ(ram.waits()->size(), 0u);
  cache.Trim(MemoryBudget::kUnlimited);
  ExpectEmpty();
}

}  // namespace
}  // namespace latentd
