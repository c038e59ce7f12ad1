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

// Plain LRU over bytes, to compare with.
class PlainLru {
 public:
  explicit PlainLru(int64_t cap) : cap_(cap) {}
  void Use(const std::string& id, int64_t bytes) {
    const auto it =
        std::find_if(records_.begin(), records_.end(), [&](const auto& r) { return r.first == id; });
    if (it != records_.end()) records_.erase(it);
    records_.emplace_back(id, bytes);
    int64_t sum = 0;
    for (const auto& r : records_) sum += r.second;
    while (sum > cap_) {
      sum -= records_.front().second;
      records_.erase(records_.begin());
    }
  }
  bool Has(const std::string& id) const {
    return std::any_of(records_.begin(), records_.end(), [&](const auto& r) { return r.first == id; });
  }

 private:
  const int64_t cap_;
  std::vector<std::pair<std::string, int64_t>> records_;
};

// FLUX.1 in bf16, each job with a prompt of its own. Conditioning is dear, for encoding takes long; all of
// the prompts together are half as large as the weights.
TEST(ScenarioOfPrompts, DistinctPromptsPushOutNoWeightThatPlainLruWouldHaveKept) {
  constexpr int64_t kClip = 246'144'000, kT5 = 9'524'621'312, kTransformer = 23'802'816'512,
                    kVae = 167'666'000;
  constexpr int64_t kPooled = 768 * 4, kEncoded = 512 * 4096 * 4;
  // Room for all weights and some prompts; for the weights, and less than the share of prompts; not for all
  // weights.
  for (int64_t cap : {int64_t{36} << 30, int64_t{32} << 30, int64_t{24} << 30}) {
    SCOPED_TRACE(cap);
    RamBudget ram(cap);
    ModelCache cache(&ram, {});
    PlainLru lru(cap);
    int64_t left_too_early = 0;
    auto weight = [&](const std::string& component, int64_t bytes) {
      if (lru.Has(component) && !cache.Find({"flux", component})) ++left_too_early;
      lru.Use(component, bytes);
      const Loader loader = {component, bytes, [bytes](const LoadContext&) -> Loaded {
                               return std::make_shared<const Claim>(bytes);
                             }};
      auto handle = cache.Lock({"flux", component}, loader, {.owner = "job"});
      ASSERT_TRUE(handle.ok()) << handle.status();
    };
    auto prompt = [&](const std::string& id, int64_t bytes, double seconds) {
      auto memory =
          ram.Reserve({.bytes = bytes, .use = MemoryUse::kConditioning, .owner = "job", .what = id});
      ASSERT_TRUE(memory.ok()) << memory.status();
      lru.Use(id, bytes);
      auto handle = cache.Insert({"prompt", id}, "conditioning", std::make_shared<const Claim>(bytes),
                                 *std::move(memory), seconds, "job");
      ASSERT_TRUE(handle.ok()) << handle.status();
    };
    for (int job = 0; job < 2000; ++job) {
      weight("text_encoder", kClip);
      prompt(absl::StrCat("clip ", job), kPooled, 0.01);
      weight("text_encoder_2", kT5);
      prompt(absl::StrCat("t5 ", job), kEncoded, 0.25);
      weight("transformer", kTransformer);
      weight("vae", kVae);
      ASSERT_EQ(left_too_early, 0) << "in job " << job;
    }
    if (cap >= int64_t{32} << 30) {
      EXPECT_EQ(cache.Stats().misses, 4);
    }
    EXPECT_LE(ram.stats().use(MemoryUse::kConditioning).in_use_bytes, cap / 16);
  }
}

// However many records there are, nothing but the eviction of many keeps others from the cache for long.
TEST(ScenarioOfManyRecords, NobodyLooksAtAllOfThemAtOnce) {
  constexpr int kRecords = kSanitized ? 10'000 : 100'000;
  RamBudget ram(int64_t{1} << 40);
  ModelCache cache(&ram, {});
  for (int i = 0; i < kRecords; ++i) {
    auto memory = ram.Reserve({.bytes = 10, .use = MemoryUse::kPatches, .owner = "me", .what = "test"});
    ASSERT_TRUE(cache
                    .Insert({absl::StrCat("record-", i), ""}, "lora", std::make_shared<const Claim>(10),
                            *std::move(memory), 1, "me", {absl::StrCat("source-", i)})
                    .ok());
  }
  EXPECT_EQ(cache.Stats().records.size(), static_cast<size_t>(kRecords));
  EXPECT_EQ(cache.WouldEvict(25).size(), 3u);
  EXPECT_EQ(cache.Trim(25), 30);
  EXPECT_EQ(cache.Drop({"record-100", ""}).evicted_records, 1);
  EXPECT_EQ(cache.Drop({"source-101", ""}).evicted_records, 1);
  EXPECT_EQ(cache.Unload({"record-102", ""}).evicted_records, 1);
  EXPECT_EQ(cache.DropUnfit().evicted_records, 0);
  EXPECT_EQ(cache.IdsThatBegin("record-103").size(), kSanitized ? 11u : 111u);
  LockHandle held = cache.TryLock({"record-200", ""}, "me");
  cache.WillEnd("me");
  EXPECT_EQ(cache.EvictUnusedSince(absl::InfinitePast()), 0);
  EXPECT_EQ(cache.HeldBytes(), 10);
  EXPECT_EQ(cache.HeldByWhom().idle_bytes, (kRecords - 7) * 10);
  EXPECT_GT(cache.longest_walk(), 0);
  EXPECT_LE(cache.longest_walk(), 128);
}

}  // namespace
}  // namespace latentd
