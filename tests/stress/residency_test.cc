// The same request gives the same bytes whatever the memory looks like, and what is done when it is short.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"
#include "tests/stress/in_process_server.h"

namespace latentd {
namespace {

using Measure = v1::JobEvent::Adapted;

const std::vector<v1::LoraRef>& TheLoras() {
  static const auto& loras = *new std::vector<v1::LoraRef>{Lora("dusk", 0.5), Lora("checker", 0.8)};
  return loras;
}

class SameBytesTest : public testing::TestWithParam<v1::PatchMode> {
 protected:
  Outcome Run(const Config& config) {
    InProcessServer server(config);
    const Outcome outcome = server.Generate(SmallJob(), TheLoras(), GetParam());
    EXPECT_EQ(server.WhatIsNotAtRest(), "");
    return outcome;
  }
  std::string Hash(const Config& config) {
    const Outcome outcome = Run(config);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    return outcome.sha256.empty() ? "" : outcome.sha256[0];
  }
  // Whether it ran; it must give the picture, or say that memory is short.
  static bool Right(const Outcome& outcome, const std::string& expected, int64_t cap) {
    if (!outcome.status.ok()) {
      EXPECT_TRUE(IsOutOfMemory(outcome.status)) << outcome.status;
      return false;
    }
    EXPECT_EQ(outcome.sha256[0], expected) << "with " << cap << " bytes";
    return true;
  }
  // The smallest value from `low` (does not work) to `high` (works) that works, to `step`.
  static int64_t Smallest(int64_t low, int64_t high, int64_t step,
                          const std::function<bool(int64_t)>& works) {
    while (high - low > step) {
      const int64_t middle = low + (high - low) / 2;
      (works(middle) ? high : low) = middle;
    }
    return high;
  }
};

TEST_P(SameBytesTest, WhateverTheMemoryLooksLike) {
  const Config wide = InProcessServer::DefaultConfig({"cpu"});
  const std::string expected = Hash(wide);
  ASSERT_NE(expected, "");

  // Devices, whole and streamed with rings of different sizes.
  EXPECT_EQ(Hash(InProcessServer::DefaultConfig({"sim:0=64MiB"})), expected);
  EXPECT_EQ(Hash(InProcessServer::DefaultConfig({"sim:1=64MiB"})), expected);
  for (int64_t ring : {2, 3, 8}) {
    Config streamed = InProcessServer::DefaultConfig({"sim:0=64MiB,bandwidth=500MB"});
    streamed.residency = "stream";
    streamed.ring_blocks = ring;
    const Outcome outcome = Run(streamed);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.sha256[0], expected);
    bool streams = false;
    for (const v1::PhaseReport& phase : outcome.done.phases())
      streams |= phase.resident_bytes() < phase.full_bytes();
    EXPECT_TRUE(streams);
  }

  // The smallest budgets that do.
  const int64_t ram = Smallest(1 << 20, 64 << 20, 4096, [&](int64_t cap) {
    Config config = wide;
    config.ram_cap = cap;
    const Outcome outcome = Run(config);
    return Right(outcome, expected, cap);
  });
  const int64_t device = Smallest(1 << 20, 64 << 20, 4096, [&](int64_t cap) {
    const Outcome outcome = Run(InProcessServer::DefaultConfig({absl::StrCat("sim:0=", cap)}));
    return Right(outcome, expected, cap);
  });
  std::cout << "smallest ram cap " << ram << ", smallest device " << device << "\n";

  // After 100 other sets, in a session that goes on.
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB", "sim:1=64MiB"}));
  InProcessServer::Session session = server.Open({}, GetParam());
  std::mt19937 random(5);
  for (int i = 0; i < 100; ++i) {
    std::vector<v1::LoraRef> set;
    if (random() % 4 != 0) set.push_back(Lora("dusk", static_cast<double>(random() % 400) / 100 - 2));
    if (random() % 4 != 0) set.push_back(Lora("checker", static_cast<double>(random() % 400) / 100 - 2));
    ASSERT_TRUE(session.SetLoras(set).ok());
    if (i % 5 != 0) continue;
    ASSERT_TRUE(session.Denoise(SmallJob("a blue square", static_cast<uint64_t>(i))).status.ok());
  }
  ASSERT_TRUE(session.SetLoras(TheLoras()).ok());
  EXPECT_EQ(session.Denoise(SmallJob()).sha256.at(0), expected);
  EXPECT_TRUE(session.End().ok());
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}
INSTANTIATE_TEST_SUITE_P(Modes, SameBytesTest,
                         testing::Values(v1::PATCH_MODE_DIRECT, v1::PATCH_MODE_SIDECAR));

std::vector<Measure::Measure> Measures(const Outcome& outcome) {
  std::vector<Measure::Measure> measures;
  for (const Measure& adapted : outcome.adapted) measures.push_back(adapted.measure());
  return measures;
}

TEST(MemoryIsShort, AComponentThatDoesNotFitIsStreamedByItself) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB"}));
  ASSERT_TRUE(server.Generate(SmallJob("to measure", 1)).status.ok());
  const Outcome whole = server.Generate(SmallJob());
  // Room for the working memory and three quarters of the transformer.
  int64_t room = 0;
  for (const v1::PhaseReport& phase : whole.done.phases()) {
    room = std::max(room, phase.working_bytes() + phase.full_bytes() * 3 / 4);
  }
  server.core().devices[0]->budget().set_cap(room);
  const Outcome outcome = server.Generate(SmallJob());
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.sha256, whole.sha256);
  EXPECT_TRUE(outcome.adapted.empty()) << "streaming a part is planned, not a measure";
  int streamed = 0;
  for (const v1::PhaseReport& phase : outcome.done.phases()) {
    if (phase.resident_bytes() == phase.full_bytes()) continue;
    ++streamed;
    EXPECT_GT(phase.resident_bytes(), 0);
  }
  EXPECT_GT(streamed, 0);
  EXPECT_GT(server.stats().devices.at("sim:0").streamed_locks, 0);
}

TEST(MemoryIsShort, AFailedAllocationEvictsThenStreams) {
  Config config = InProcessServer::DefaultConfig({"sim:0=64MiB"});
  InProcessServer server(config);
  const std::string expected = server.Generate(SmallJob()).sha256.at(0);  // leaves everything resident
  ASSERT_TRUE(server.core().pins->Unload(kDemoModel).ok());
  ASSERT_TRUE(server.core().pins->Load(kDemoModel, {"vae"}, "sim:0", false).ok());
  server.sim(0).FailAllocation(1);
  const Outcome evicted = server.Generate(SmallJob());
  ASSERT_TRUE(evicted.status.ok()) << evicted.status;
  EXPECT_EQ(evicted.sha256.at(0), expected);
  EXPECT_EQ(Measures(evicted), std::vector{Measure::MEASURE_EVICTED});
  EXPECT_NE(evicted.adapted[0].reason(), "");

  ASSERT_TRUE(server.core().pins->Unload(kDemoModel).ok());
  server.sim(0).FailAllocation(1);  // nothing is there that could go
  const Outcome streamed = server.Generate(SmallJob());
  ASSERT_TRUE(streamed.status.ok()) << streamed.status;
  EXPECT_EQ(streamed.sha256.at(0), expected);
  EXPECT_EQ(Measures(streamed), std::vector{Measure::MEASURE_STREAMED});
}

TEST(MemoryIsShort, TheVaeIsTiledOnlyWhereTheRequestAllowsIt) {
  v1::GenerateParams job = SmallJob();
  job.set_width(128);
  job.set_height(128);
  InProcessServer large(InProcessServer::DefaultConfig({"cpu"}));
  const Outcome whole = large.Generate(job);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  int64_t decode = 0, denoise = 0;
  for (const v1::PhaseReport& phase : whole.done.phases()) {
    (phase.component() == "vae" ? decode : denoise) = phase.working_peak_bytes();
  }
  ASSERT_GT(decode, 2 * denoise);

  // A device that can do all but decode at once.
  const Config config = InProcessServer::DefaultConfig({absl::StrCat("sim:0=", decode * 9 / 10)});
  InProcessServer server(config);
  const Outcome refused = server.Generate(job);
  EXPECT_TRUE(IsOutOfMemory(refused.status)) << refused.status;
  EXPECT_EQ(server.WhatIsNotAtRest(), "");

  job.set_vae_tiling(v1::VAE_TILING_WHEN_NEEDED);
  const Outcome tiled = server.Generate(job);
  ASSERT_TRUE(tiled.status.ok()) << tiled.status;
  EXPECT_EQ(Measures(tiled).back(), Measure::MEASURE_TILED);
  EXPECT_TRUE(tiled.done.phases(tiled.done.phases_size() - 1).tiled());
  EXPECT_NE(tiled.sha256, whole.sha256);
  EXPECT_EQ(server.WhatIsNotAtRest(), "");

  // Where it fits, the same request is not tiled; where it is asked for, it is.
  const Outcome roomy = large.Generate(job);
  EXPECT_EQ(roomy.sha256, whole.sha256);
  job.set_vae_tiling(v1::VAE_TILING_ALWAYS);
  const Outcome always = large.Generate(job);
  EXPECT_TRUE(always.status.ok()) << always.status;
  EXPECT_TRUE(always.done.phases(always.done.phases_size() - 1).tiled());
  EXPECT_NE(always.sha256, whole.sha256);
}

TEST(MemoryIsShort, AJobThatCannotRunFailsAloneAndTheNextOneRuns) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=24MiB"}));
  v1::GenerateParams large = SmallJob();
  large.set_width(512);
  large.set_height(512);
  InProcessServer::Session session = server.Open({Lora("dusk")});
  session.Send(large);
  session.Send(SmallJob());
  const Outcome first = session.Wait(), second = session.Wait();
  EXPECT_TRUE(IsOutOfMemory(first.status)) << first.status;
  EXPECT_TRUE(second.status.ok()) << second.status;
}

TEST(MeasuredWorkingMemory, ReplacesTheEstimateAndSurvivesARestart) {
  Config config = InProcessServer::DefaultConfig({"cpu"});
  std::string folder = testing::TempDir() + "latentd-state-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  config.state_dir = folder;
  auto by_component = [](const Outcome& outcome) {
    std::map<std::string, v1::PhaseReport> phases;
    for (const v1::PhaseReport& phase : outcome.done.phases()) phases[phase.component()] = phase;
    return phases;
  };
  std::map<std::string, v1::PhaseReport> first, second, restarted;
  {
    InProcessServer server(config);
    first = by_component(server.Generate(SmallJob()));
    second = by_component(server.Generate(SmallJob("another", 2)));
  }
  {
    InProcessServer server(config);
    restarted = by_component(server.Generate(SmallJob()));
  }
  for (const auto& [component, phase] : first) {
    EXPECT_GT(phase.working_peak_bytes(), 0) << component;
    EXPECT_LE(phase.working_peak_bytes(), phase.working_bytes()) << component << ": the estimate was too low";
    EXPECT_GE(second[component].working_bytes(), phase.working_peak_bytes()) << component;
    EXPECT_NE(second[component].working_bytes(), phase.working_bytes())
        << component << ": still the estimate";
    EXPECT_EQ(restarted[component].working_bytes(), second[component].working_bytes()) << component;
    EXPECT_EQ(restarted[component].working_peak_bytes(), phase.working_peak_bytes()) << component;
  }
  // A file that is not one is no reason to fail.
  for (const char* text : {"", "{", "[]", R"({"version":1,"phases":{"a":3}})"}) {
    std::ofstream(folder + "/measurements.json") << text;
    InProcessServer server(config);
    EXPECT_TRUE(server.Generate(SmallJob()).status.ok()) << text;
  }
  std::filesystem::remove_all(folder);
}

TEST(CachedConditioning, SavesTheEncodersAndDependsOnAllThatMatters) {
  InProcessServer server(InProcessServer::DefaultConfig({"cpu"}));
  auto cached = [](const Outcome& outcome) {
    int n = 0;
    for (const v1::PhaseReport& phase : outcome.done.phases()) n += phase.cached() ? 1 : 0;
    return n;
  };
  const Outcome first = server.Generate(SmallJob());
  EXPECT_EQ(cached(first), 0);
  ASSERT_TRUE(server.core().pins->Unload(kDemoModel).ok());
  EXPECT_EQ(cached(server.Generate(SmallJob())), 0) << "an unloaded model keeps nothing";
  const int64_t misses = server.stats().misses;
  const Outcome again = server.Generate(SmallJob());
  EXPECT_EQ(cached(again), 2);
  EXPECT_EQ(again.sha256, first.sha256);
  EXPECT_EQ(server.stats().misses, misses);

  v1::GenerateParams negative = SmallJob();
  negative.set_true_cfg_scale(2);
  negative.set_negative_prompt("blue");
  EXPECT_EQ(cached(server.Generate(negative)), 0);
  v1::GenerateParams shorter = SmallJob();
  shorter.set_max_sequence_length(32);
  EXPECT_EQ(cached(server.Generate(shorter)), 1) << "only the long encoder looks at that";
  EXPECT_EQ(cached(server.Generate(SmallJob("a red circle on blu", 7))), 0);
  EXPECT_EQ(cached(server.Generate(SmallJob("a red circle on blue", 8))), 2)
      << "the seed is not the prompt's";
  for (const RecordStats& record : server.stats().records) {
    EXPECT_FALSE(absl::StrContains(record.key.ToString(), "circle")) << "prompts are not shown";
  }
}

TEST(MergedWeights, AreOneRecordForAllWhoAskForTheSameSet) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB"}));
  auto merged = [&] {
    int n = 0;
    for (const RecordStats& record : server.stats().records) n += record.kind == "merged" ? 1 : 0;
    return n;
  };
  const Outcome first = server.Generate(SmallJob(), TheLoras(), v1::PATCH_MODE_DIRECT);
  ASSERT_TRUE(first.status.ok()) << first.status;
  const int records = merged();
  EXPECT_GT(records, 0);
  const int64_t misses = server.stats().misses;
  std::vector<v1::LoraRef> turned(TheLoras().rbegin(), TheLoras().rend());
  EXPECT_EQ(server.Generate(SmallJob(), turned, v1::PATCH_MODE_DIRECT).sha256, first.sha256);
  EXPECT_EQ(merged(), records);
  EXPECT_EQ(server.stats().misses, misses);
  EXPECT_NE(
      server.Generate(SmallJob(), {Lora("dusk", 0.5), Lora("checker", 0.81)}, v1::PATCH_MODE_DIRECT).sha256,
      first.sha256);
  EXPECT_GT(merged(), records);
  // What was made from a LoRA goes with it.
  const LockRequest lora = *server.core().catalog->Lora("dusk")->Request();
  server.core().cache->Drop({lora.key.id, ""});
  EXPECT_EQ(merged(), 0);
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

TEST(Placement, TwoDevicesThatAskForOneColdModelReadItOnce) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB", "sim:1=64MiB"}));
  std::vector<std::thread> threads;
  std::vector<Outcome> outcomes(4);
  for (size_t i = 0; i < outcomes.size(); ++i) {
    threads.emplace_back([&, i] { outcomes[i] = server.Generate(SmallJob(), {Lora("dusk")}); });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<std::string> devices;
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.sha256, outcomes[0].sha256);
    for (const v1::PhaseReport& phase : outcome.done.phases()) {
      if (phase.component() == "transformer") devices.insert(phase.device());
    }
  }
  EXPECT_EQ(devices.size(), 2u) << "both devices were used";
  const CacheStats stats = server.stats();
  EXPECT_EQ(stats.misses, 5) << "four components and a LoRA, once each";
  int64_t file_bytes = 0;
  for (const RecordStats& record : stats.records) {
    if (record.use == MemoryUse::kWeights || record.use == MemoryUse::kPatches) file_bytes += record.bytes;
  }
  EXPECT_EQ(stats.bytes_loaded, file_bytes);
}

TEST(Placement, ASessionGoesWhereItsModelIs) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB", "sim:1=64MiB"}));
  ASSERT_TRUE(server.core().pins->Load(kDemoModel, {"transformer"}, "sim:1", true).ok());
  for (int i = 0; i < 3; ++i) {
    const Outcome outcome = server.Generate(SmallJob());
    ASSERT_TRUE(outcome.status.ok());
    for (const v1::PhaseReport& phase : outcome.done.phases())
      EXPECT_EQ(phase.device(), phase.cached() ? "" : "sim:1");
  }
  ASSERT_TRUE(server.core().pins->Unload(kDemoModel).ok());
}

TEST(Caps, CanBeChangedWhileTheServerRuns) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB"}));
  const std::string expected = server.Generate(SmallJob()).sha256.at(0);
  const int64_t in_use = server.stats().ram.in_use_bytes;
  server.core().ram->set_cap(in_use / 2);
  EXPECT_LE(server.stats().ram.in_use_bytes, in_use / 2);
  EXPECT_GT(server.stats().evicted(EvictReason::kRoom), 0);
  EXPECT_TRUE(IsOutOfMemory(server.Generate(SmallJob()).status));
  server.core().ram->set_cap(int64_t{1} << 30);
  EXPECT_EQ(server.Generate(SmallJob()).sha256.at(0), expected);
  server.core().devices[0]->budget().set_cap(1 << 20);
  EXPECT_TRUE(IsOutOfMemory(server.Generate(SmallJob()).status));
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

TEST(ForeignMemory, OnADeviceIsNotOurs) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB"}));
  const Outcome before = server.Generate(SmallJob());
  server.core().cache->Offload(*server.core().devices[0], MemoryBudget::kUnlimited);
  server.sim(0).SetForeignBytes(48 << 20);
  const Outcome squeezed = server.Generate(SmallJob("other", 3));
  EXPECT_TRUE(squeezed.status.ok()) << squeezed.status;
  EXPECT_EQ(server.stats().devices.at("sim:0").budget.foreign_bytes, 48 << 20);
  server.sim(0).SetForeignBytes(64 << 20);
  EXPECT_TRUE(IsOutOfMemory(server.Generate(SmallJob()).status));
  server.sim(0).SetForeignBytes(0);
  EXPECT_EQ(server.Generate(SmallJob()).sha256, before.sha256);
}

}  // namespace
}  // namespace latentd
