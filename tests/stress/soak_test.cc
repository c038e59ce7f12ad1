// Many runs in one process: nothing grows.
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/stress/in_process_server.h"

namespace latentd {
namespace {

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Least squares: bytes per run.
double Slope(const std::vector<int64_t>& y) {
  const auto n = static_cast<double>(y.size());
  const double mean_x = (n - 1) / 2, mean_y = std::accumulate(y.begin(), y.end(), 0.0) / n;
  double xy = 0, xx = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    const double dx = static_cast<double>(i) - mean_x;
    xy += dx * (static_cast<double>(y[i]) - mean_y);
    xx += dx * dx;
  }
  return xy / xx;
}

TEST(Soak, TwoHundredAlternatingRunsOfTwoModelsOverACapThatFitsOne) {
  const ModelCopies copies({kDemoModel, "other"});
  Config config = InProcessServer::DefaultConfig({"sim:0=64MiB"});
  config.model_roots = {copies.root()};
  {
    InProcessServer probe(config);
    ASSERT_TRUE(probe.Generate(SmallJob(), {Lora("dusk")}).status.ok());
    config.ram_cap = probe.stats().ram.peak_bytes + (1 << 20);
  }
  InProcessServer server(config);
  const std::string models[] = {kDemoModel, "other"};
  const std::string expected = server.Generate(SmallJob(), {Lora("dusk")}).sha256.at(0);
  std::vector<int64_t> resident;
  for (int i = 0; i < 200; ++i) {
    const Outcome outcome = server.Generate(
        SmallJob(), {Lora("dusk")}, i % 4 < 2 ? v1::PATCH_MODE_SIDECAR : v1::PATCH_MODE_AUTO, models[i % 2]);
    ASSERT_TRUE(outcome.status.ok()) << i << ": " << outcome.status;
    ASSERT_EQ(outcome.sha256.at(0), expected) << i;
    resident.push_back(ResidentBytes());
  }
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
  EXPECT_GT(server.stats().evicted(EvictReason::kRoom), 200) << "the cap is not in the way";
  // The first runs fill the heap's pools, and on a busy machine a thread more takes a pool of its own: a step. What
  // leaks grows in every part.
  double slope = 1e9;
  for (auto part = resident.begin() + 50; part != resident.end(); part += 50) {
    slope = std::min(slope, Slope({part, part + 50}));
  }
  std::cout << "resident " << resident[50] / 1024 << " KiB → " << resident.back() / 1024
            << " KiB, smallest slope of three parts " << slope << " bytes per run\n";
  // One leaked LoRA or conditioning per run would be 16 KiB and more.
  EXPECT_LT(slope, 8192);
  EXPECT_LT(resident.back() - resident[50], 16 << 20);
  server.core().cache->Trim(MemoryBudget::kUnlimited);
  const CacheStats stats = server.stats();
  EXPECT_EQ(stats.ram.in_use_bytes, 0);
  EXPECT_EQ(stats.devices.at("sim:0").budget.in_use_bytes, 0);
  EXPECT_EQ(stats.devices.at("sim:0").allocated_bytes, 0);
}

TEST(Soak, CancelsAtEveryMomentLeaveNothing) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB", "sim:1=64MiB"}));
  const std::string expected = server.Generate(SmallJob(), {Lora("dusk")}).sha256.at(0);
  for (int i = 0; i < 150; ++i) {
    if (i % 10 == 0) server.core().cache->Trim(MemoryBudget::kUnlimited);
    InProcessServer::Session session = server.Open({Lora("dusk")});
    session.Send(SmallJob("a green square", static_cast<uint64_t>(i)));
    absl::SleepFor(absl::Microseconds(i * 400));
    session.End(EndReason::kCancelled).IgnoreError();
    ASSERT_EQ(server.WhatIsNotAtRest(), "") << i;
  }
  EXPECT_EQ(server.Generate(SmallJob(), {Lora("dusk")}).sha256.at(0), expected);
}

}  // namespace
}  // namespace latentd
