// The failure that the project starts from, on the whole server: a LoRA in use on one device while another
// device needs memory.
#include <atomic>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"
#include "tests/stress/in_process_server.h"

namespace latentd {
namespace {

constexpr char kOther[] = "other";

bool IsLora(const ModelKey& key) { return absl::StartsWith(key.id, "lora/"); }

// Watches a server from a thread of its own.
class Sampler {
 public:
  explicit Sampler(InProcessServer* server) : server_(server), thread_([this] { Run(); }) {}
  ~Sampler() { Stop(); }
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  int64_t samples() const { return samples_; }
  const std::string& wrong() const { return wrong_; }
  int64_t lora_was_missing() const { return lora_was_missing_; }

 private:
  void Run() {
    while (!stop_) {
      const CacheStats stats = server_->stats();
      ++samples_;
      if (stats.ram.in_use_bytes + stats.ram.reserved_bytes > stats.ram.cap_bytes) {
        wrong_ = absl::StrCat("the budget is over its cap: ", stats.ram.in_use_bytes, " + ",
                              stats.ram.reserved_bytes);
      }
      if (stats.unaccounted_bytes() != 0)
        wrong_ = absl::StrCat(stats.unaccounted_bytes(), " bytes are unaccounted for");
      bool there = false;
      for (const RecordStats& record : stats.records) there |= IsLora(record.key);
      if (!there) ++lora_was_missing_;
      for (const Eviction& eviction : stats.recent_evictions) {
        if (IsLora(eviction.key)) wrong_ = absl::StrCat(eviction.key.ToString(), " was evicted");
      }
      for (const auto& [name, device] : stats.devices) {
        if (device.budget.in_use_bytes + device.budget.reserved_bytes > device.budget.cap_bytes) {
          wrong_ = absl::StrCat(name, " is over its cap");
        }
      }
    }
  }

  InProcessServer* const server_;
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> samples_ = 0, lora_was_missing_ = 0;
  std::string wrong_;  // read after Stop
  std::thread thread_;
};

class LoraInUseTest : public testing::TestWithParam<bool> {
 protected:
  LoraInUseTest() : copies_({kDemoModel, kOther}) {}

  Config ConfigFor(int64_t ram_cap) {
    Config config = InProcessServer::DefaultConfig({"sim:0=64MiB", "sim:1=64MiB"});
    config.model_roots = {copies_.root()};
    config.ram_cap = ram_cap;
    config.memory_wait_timeout = absl::Seconds(2);
    return config;
  }

  // What one model, one LoRA and a job's own memory take.
  int64_t OneModelAndOneLora() {
    InProcessServer server(ConfigFor(int64_t{1} << 30));
    EXPECT_TRUE(server.Generate(SmallJob(), {Lora("dusk")}).status.ok());
    return server.stats().ram.peak_bytes;
  }

  ModelCopies copies_;
};

// `true`: the LoRA is in memory before the session asks for it.
TEST_P(LoraInUseTest, IsNeverEvictedWhileAnotherDeviceLoadsInALoop) {
  const std::string expected =
      InProcessServer(ConfigFor(int64_t{1} << 30)).Generate(SmallJob(), {Lora("dusk")}).sha256.at(0);
  const int64_t cap = OneModelAndOneLora();
  InProcessServer server(ConfigFor(cap));
  if (GetParam()) {
    ASSERT_TRUE(server.core().pins->Load("dusk", {}, "", false).ok());
  }
  InProcessServer::Session session = server.Open({Lora("dusk")});
  ASSERT_TRUE(session.opened().ok()) << session.opened();
  const Resource* lora = nullptr;
  for (const RecordStats& record : server.stats().records) {
    if (IsLora(record.key)) lora = server.core().cache->Peek(record.key, "test").resource().get();
  }
  ASSERT_NE(lora, nullptr);

  std::atomic<bool> stop = false;
  std::atomic<int64_t> loads = 0, refused = 0;
  std::thread other([&] {
    while (!stop) {
      auto loaded = server.core().pins->Load(kOther, {}, "sim:1", false);
      ++(loaded.ok() ? loads : refused);
      if (loaded.ok()) continue;
      EXPECT_TRUE(IsOutOfMemory(loaded.status()) || absl::IsAborted(loaded.status())) << loaded.status();
    }
  });
  Sampler sampler(&server);
  int64_t pictures = 0;
  for (int i = 0; i < 20; ++i) {
    // Another prompt each time, so that the encoders are needed too.
    const Outcome outcome =
        session.Denoise(SmallJob(absl::StrCat("a red circle on blue", i == 0 ? "" : " "), 7));
    if (outcome.status.ok()) {
      ++pictures;
      EXPECT_EQ(outcome.sha256.at(0), expected);
    } else {
      EXPECT_TRUE(IsOutOfMemory(outcome.status) || absl::IsAborted(outcome.status)) << outcome.status;
    }
  }
  stop = true;
  other.join();
  sampler.Stop();
  EXPECT_EQ(sampler.wrong(), "");
  EXPECT_EQ(sampler.lora_was_missing(), 0);
  EXPECT_GT(sampler.samples(), 20);
  EXPECT_GT(pictures, 0);
  EXPECT_GT(loads, 0);
  for (const RecordStats& record : server.stats().records) {
    if (!IsLora(record.key)) continue;
    EXPECT_EQ(server.core().cache->Peek(record.key, "test").resource().get(), lora) << "it was loaded again";
    EXPECT_GE(record.lock_count, 1);
  }
  RecordProperty("pictures", static_cast<int>(pictures));
  std::cout << pictures << " pictures, " << loads << " loads of the other model, " << refused << " refused, "
            << sampler.samples() << " samples\n";
  EXPECT_TRUE(session.End().ok());
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}
INSTANTIATE_TEST_SUITE_P(ColdAndWarm, LoraInUseTest, testing::Bool());

// A patch that is in no cache is paid for by the overlay that uses it, and the pointer alone keeps it alive.
TEST(PatchWithoutAHandle, IsChargedWhileItIsUsed) {
  InProcessServer server(InProcessServer::DefaultConfig({"cpu"}));
  ASSERT_TRUE(server.Generate(SmallJob()).status.ok());
  ServerCore& core = server.core();
  auto model = core.catalog->Model(kDemoModel);
  auto file = core.catalog->Lora("dusk");
  ASSERT_TRUE(model.ok() && file.ok());
  auto files = WeightFiles::Open(file->path);
  ASSERT_TRUE(files.ok());
  const LoadContext context([] { return false; }, [](int64_t, int64_t) {});
  auto patch = ModelPatch::Load(*files, context);
  ASSERT_TRUE(patch.ok());

  const LockRequest request = (*model)->ComponentRequest("transformer");
  LockHandle handle = *core.cache->Lock(request.key, request.loader, {.owner = "test"});
  const int64_t before = core.ram->stats().use(MemoryUse::kPatches).reserved_bytes;
  std::vector<PatchSpec> specs(1);
  specs[0].name = "dusk";
  specs[0].patch = *patch;
  auto overlay = LayerPatcher::Apply(handle.As<WeightSet>(), *(*model)->component("transformer").patch_target,
                                     std::move(specs),
                                     {.device = core.devices[0].get(),
                                      .cache = core.cache.get(),
                                      .component = request.key,
                                      .owner = "test"});
  ASSERT_TRUE(overlay.ok()) << overlay.status();
  const int64_t bytes = (*patch)->bytes();
  std::weak_ptr<const ModelPatch> alive = *patch;
  patch->reset();
  EXPECT_FALSE(alive.expired());
  EXPECT_EQ(core.ram->stats().use(MemoryUse::kPatches).reserved_bytes, before + bytes);
  core.cache->Trim(MemoryBudget::kUnlimited);  // nothing that is in use goes
  EXPECT_FALSE(alive.expired());
  *overlay = nullptr;
  EXPECT_TRUE(alive.expired());
  EXPECT_EQ(core.ram->stats().use(MemoryUse::kPatches).reserved_bytes, before);
  handle.Release();
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

// Handles of one run in every order of their ends.
TEST(HandlesOfARun, MayEndInEveryOrder) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB"}));
  ASSERT_TRUE(server.Generate(SmallJob(), {Lora("dusk")}, v1::PATCH_MODE_DIRECT).status.ok());
  ServerCore& core = server.core();
  const auto model = *core.catalog->Model(kDemoModel);
  const LockRequest request = model->ComponentRequest("transformer");
  const LockRequest lora = *core.catalog->Lora("dusk")->Request();
  std::vector<int> order = {0, 1, 2, 3};
  int orders = 0;
  do {
    for (const PatchMode mode : {PatchMode::kDirect, PatchMode::kSidecar}) {
      LockHandle session = *core.cache->Lock(lora.key, lora.loader, {.owner = "session"});
      LockHandle component = *core.cache->Lock(request.key, request.loader, {.owner = "session"});
      DeviceLock device =
          *core.cache->LockOnDevice(component, *core.devices[0], {.owner = "session", .working_bytes = 1000});
      std::vector<PatchSpec> specs(1);
      specs[0].name = "dusk";
      specs[0].handle = session.Share();
      specs[0].residency = *core.cache->LockOnDevice(specs[0].handle, *core.devices[0], {.owner = "session"});
      specs[0].patch = std::static_pointer_cast<const ModelPatch>(specs[0].residency.resource());
      std::shared_ptr<const Overlay> overlay = *LayerPatcher::Apply(
          component.As<WeightSet>(), *model->component("transformer").patch_target, std::move(specs),
          {.mode = mode,
           .device = core.devices[0].get(),
           .cache = core.cache.get(),
           .component = request.key,
           .owner = "session"});
      for (int what : order) {
        core.cache->Trim(MemoryBudget::kUnlimited);
        EXPECT_EQ(server.stats().unaccounted_bytes(), 0);
        if (what == 0) session.Release();
        if (what == 1) component.Release();
        if (what == 2) device.Release();
        if (what == 3) overlay = nullptr;
      }
      EXPECT_EQ(server.WhatIsNotAtRest(), "");
      ++orders;
    }
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(orders, 48);
  core.cache->Trim(MemoryBudget::kUnlimited);
  EXPECT_EQ(server.stats().ram.in_use_bytes, 0);
}

}  // namespace
}  // namespace latentd
