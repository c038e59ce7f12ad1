// Many runs in one process: nothing grows.
#include <malloc.h>
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

// What is allocated and not freed, in all arenas of the C library's heap and in its mappings: unlike resident
// memory it knows nothing of pools, of pages that are given back late, or of how much of an arena lies idle.
int64_t LiveHeapBytes() {
  const struct mallinfo2 heap = mallinfo2();
  return static_cast<int64_t>(heap.uordblks + heap.hblkhd);
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
  std::vector<int64_t> live, resident;
  for (int i = 0; i < 200; ++i) {
    const Outcome outcome = server.Generate(
        SmallJob(), {Lora("dusk")}, i % 4 < 2 ? v1::PATCH_MODE_SIDECAR : v1::PATCH_MODE_AUTO, models[i % 2]);
    ASSERT_TRUE(outcome.status.ok()) << i << ": " << outcome.status;
    ASSERT_EQ(outcome.sha256.at(0), expected) << i;
    live.push_back(LiveHeapBytes());
    resident.push_back(ResidentBytes());
  }
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
  EXPECT_GT(server.stats().evicted(EvictReason::kRoom), 200) << "the cap is not in the way";
  const double slope = Slope({live.begin() + 50, live.end()});
  std::cout << "after 50 runs and 200: allocated " << live[50] / 1024 << " and " << live.back() / 1024
            << " KiB (slope " << slope << " bytes per run), resident " << resident[50] / 1024 << " and "
            << resident.back() / 1024 << " KiB\n";
  // The first runs fill what is kept for the next ones. One leaked conditioning per run would be 16 KiB and
  // more.
  EXPECT_LT(slope, 2048);
  // Pages of arenas that lie idle: they have a bound, not a slope.
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
