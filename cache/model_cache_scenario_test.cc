// The failure that this cache exists to make impossible: a LoRA that is in use is taken for abandoned when a
// peer makes room, is evicted, and its bytes leave the budget while they are still there; then more is let in
// than there is memory for, and the next use reads the file again.
//
// Two devices, and a cap that admits one model and one LoRA. A session on device 0 uses the LoRA; device 1
// loads one model after the other.
#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "cache/cache_test_util.h"
#include "cache/model_cache.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

constexpr int64_t kLora = 20, kModel = 70;

class ScenarioTest : public CacheTest {
 protected:
  ScenarioTest() { ram.set_cap((kLora + kModel) * kUnit); }

  Loader LoraLoader() {
    Loader loader = Load(kLora);
    loader.use = MemoryUse::kPatches;
    loader.load = [this, inner = loader.load](const LoadContext& c) {
      ++lora_loads;
      return inner(c);
    };
    return loader;
  }
  void Sample() {
    const CacheStats stats = cache.Stats();
    if (stats.ram.in_use_bytes + stats.ram.reserved_bytes > stats.ram.cap_bytes) ++over_cap;
    if (stats.unaccounted_bytes() != 0) ++unaccounted;
    if (std::none_of(stats.records.begin(), stats.records.end(), [](const RecordStats& r) {
          return r.key.id == "lora" && r.lock_count > 0 && !r.stale;
        })) {
      ++lora_missing;
    }
  }
  // A peer that loads models on device 1, `times` times, each of which evicts the one before it.
  void Peer(int times) {
    for (int i = 0; i < times; ++i) {
      Loader loader = Load(kModel);
      loader.load = [this, inner = loader.load](const LoadContext& c) {
        Sample();  // now everything that could be evicted has been
        return inner(c);
      };
      LockHandle model = MustLock(absl::StrCat("model-", i % 3), loader, "peer");
      DeviceLock d = MustLockOn(sim1, model, {.owner = "peer"});
      Sample();
    }
  }
  void ExpectUntouched() {
    EXPECT_EQ(over_cap, 0);
    EXPECT_EQ(unaccounted, 0);
    EXPECT_EQ(lora_missing, 0);
    EXPECT_EQ(lora_loads, 1);
    EXPECT_LE(ram.stats().peak_bytes, (kLora + kModel) * kUnit);
    for (const Eviction& e : cache.Stats().recent_evictions) EXPECT_NE(e.key.id, "lora");
    ExpectBalanced();
  }

  std::atomic<int> lora_loads = 0;
  std::atomic<int> over_cap = 0;
  std::atomic<int> unaccounted = 0;
  std::atomic<int> lora_missing = 0;
};

TEST_F(ScenarioTest, AHeldLoraSurvivesAPeerThatLoadsInALoop) {
  const int times = kSanitized ? 500 : 5000;
  for (bool warm : {false, true}) {
    SCOPED_TRACE(warm ? "warm" : "cold");
    cache.Drop({"lora", ""});
    lora_loads = 0;
    // A warm one was used before, on this device, and let go.
    if (warm) MustLockOn(sim0, MustLock("lora", LoraLoader(), "before"), {.owner = "before"}).Release();
    LockHandle lora = MustLock("lora", LoraLoader(), "session-0");
    DeviceLock on_device = MustLockOn(sim0, lora, {.owner = "session-0", .working_bytes = kUnit});
    const Resource* host = lora.resource().get();
    const Resource* copy = on_device.resource().get();
    Sampler sampler([&] { Sample(); });
    std::thread peer([&] { Peer(times); });
    for (int i = 0; i < times; ++i) {
      LockHandle again = i % 2 == 0 ? lora.Share() : MustLock("lora", LoraLoader(), "session-0");
      ASSERT_EQ(again.resource().get(), host);
      DeviceLock step = MustLockOn(sim0, again, {.owner = "session-0"});
      ASSERT_EQ(step.resource().get(), copy);
    }
    peer.join();
    EXPECT_GT(sampler.Stop(), 0);
    ExpectUntouched();
    EXPECT_EQ(MustLock("lora", LoraLoader()).resource().get(), host);
    EXPECT_EQ(cache.Stats().devices.at("sim:0").offloads, 0);
  }
  EXPECT_EQ(cache.Stats().evicted(EvictReason::kRoom), 2 * times - 1);
}

// Whatever of what it holds a session lets go first, the LoRA is there until the last of it.
TEST_F(ScenarioTest, TheLoraLivesAsLongAsTheLastOfItsHandlesInEveryOrder) {
  const int times = kSanitized ? 100 : 2000;
  std::vector<int> order = {0, 1, 2};
  do {
    SCOPED_TRACE(absl::StrCat(order[0], order[1], order[2]));
    lora_loads = 0;
    LockHandle lora = MustLock("lora", LoraLoader(), "session-0");
    LockHandle shared = lora.Share("session-0/overlay");
    DeviceLock on_device = MustLockOn(sim0, lora, {.owner = "session-0"});
    Sampler sampler([&] { Sample(); });
    std::atomic<bool> done = false;
    std::thread peer([&] {
      Peer(times);
      done = true;
    });
    for (size_t i = 0; i < order.size(); ++i) {
      WaitUntil(
          [&, misses = cache.Stats().misses] { return done || cache.Stats().misses >= misses + times / 4; });
      EXPECT_EQ(Record("lora").bytes, kLora * kUnit);
      if (i + 1 == order.size()) break;  // the last one stays until nobody samples any more
      if (order[i] == 0) lora.Release();
      if (order[i] == 1) shared.Release();
      if (order[i] == 2) on_device.Release();
    }
    peer.join();
    sampler.Stop();
    ExpectUntouched();
    lora.Release();
    shared.Release();
    on_device.Release();
    MustLock("large", kLora + kModel).Release();  // now it can go, and does
    EXPECT_EQ(Record("lora").bytes, 0);
    EXPECT_EQ(sim0.allocated_bytes(), 0);
    ExpectBalanced();
  } while (std::next_permutation(order.begin(), order.end()));
  cache.Trim(MemoryBudget::kUnlimited);
  ExpectEmpty();
}

// The same for a LoRA that was dropped meanwhile: it is out of the index, and its bytes stay counted.
TEST_F(ScenarioTest, ADroppedLoraStaysCountedWhileThePeerLoads) {
  LockHandle lora = MustLock("lora", LoraLoader(), "session-0");
  cache.Drop({"lora", ""});
  std::atomic<int> wrong = 0;
  Sampler sampler([&] {
    const CacheStats stats = cache.Stats();
    const bool there = std::any_of(stats.records.begin(), stats.records.end(),
                                   [](const RecordStats& r) { return r.key.id == "lora" && r.stale; });
    if (!there || stats.ram.use(MemoryUse::kPatches).in_use_bytes != kLora * kUnit) ++wrong;
    if (stats.ram.in_use_bytes + stats.ram.reserved_bytes > stats.ram.cap_bytes) ++wrong;
  });
  Peer(kSanitized ? 100 : 1000);
  sampler.Stop();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(lora.resource()->bytes(), kLora * kUnit);
}

}  // namespace
}  // namespace latentd
