// What a phase does when memory is short, on the whole server: what is tried before anybody waits, guesses
// that are no limits, and who gives way to whom.
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>

#include "ATen/ATen.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/rpc/grpc_errors.h"
#include "server/runtime/planner.h"
#include "tests/stress/in_process_server.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;
using Measure = v1::JobEvent::Adapted;

// A wait that should not be is one that the test does not survive.
constexpr absl::Duration kForEver = absl::Hours(1);

v1::GenerateParams Sized(int side, int steps = 1) {
  v1::GenerateParams params = SmallJob();
  params.set_width(side);
  params.set_height(side);
  params.set_steps(steps);
  return params;
}

const v1::PhaseReport& PhaseOf(const Outcome& outcome, const std::string& component) {
  for (const v1::PhaseReport& phase : outcome.done.phases()) {
    if (phase.component() == component) return phase;
  }
  static const v1::PhaseReport none;
  return none;
}

std::vector<Measure::Measure> Measures(const Outcome& outcome) {
  std::vector<Measure::Measure> measures;
  for (const Measure& adapted : outcome.adapted) measures.push_back(adapted.measure());
  return measures;
}

v1::PlanRequest PlanFor(const v1::GenerateParams& params, const std::vector<v1::LoraRef>& loras = {}) {
  v1::PlanRequest request;
  request.set_model(kDemoModel);
  *request.mutable_params() = params;
  for (const v1::LoraRef& lora : loras) *request.add_loras() = lora;
  return request;
}

// A folder with a LoRA for the demo model's transformer, of a rank that takes more than the network does.
class WideLora {
 public:
  explicit WideLora(int64_t rank) {
    std::string pattern = (fs::temp_directory_path() / "latentd-loras-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    nlohmann::json header;
    std::string data;
    for (const auto& [name, shape] :
         std::map<std::string, std::vector<int64_t>>{{"lora_A", {rank, 128}}, {"lora_B", {128, rank}}}) {
      const at::Tensor tensor = at::full(shape, 1e-3);
      const size_t begin = data.size();
      data.append(static_cast<const char*>(tensor.const_data_ptr()), static_cast<size_t>(tensor.nbytes()));
      header[absl::StrCat("transformer.single_transformer_blocks.0.attn.to_k.", name, ".weight")] = {
          {"dtype", "F32"}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t size = text.size();
    std::ofstream(fs::path(root_) / "wide.safetensors", std::ios::binary)
        << std::string(reinterpret_cast<const char*>(&size), sizeof(size)) << text << data;
  }
  ~WideLora() {
    std::error_code error;
    fs::remove_all(root_, error);
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

// ---------------------------------------------------------------------------------------------------- waits

// Everything on the device is pinned, and the LoRA has no room beside it.
TEST(ALorasCopy, EndsWithTheDeadlineOfItsPhase) {
  Config config = InProcessServer::DefaultConfig({"sim:0=64MiB"});
  config.memory_wait_timeout = absl::Milliseconds(200);
  InProcessServer server(config);
  ASSERT_TRUE(server.Generate(SmallJob()).status.ok());
  ASSERT_TRUE(server.core().pins->Load(kDemoModel, {}, "sim:0", /*pin=*/true).ok());
  MemoryBudget& budget = server.core().devices[0]->budget();
  budget.set_cap(budget.stats().in_use_bytes + 1000);
  const Outcome outcome = server.Generate(SmallJob("another"), {Lora("dusk")}, v1::PATCH_MODE_SIDECAR);
  EXPECT_TRUE(IsOutOfMemory(outcome.status)) << outcome.status;
  EXPECT_EQ(budget.stats().waiting, 0);
  ASSERT_TRUE(server.core().pins->Unload(kDemoModel).ok());
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

// What is pinned beside leaves no room for the whole, and would never give any: tiles, streams, at once.
TEST(StreamingAndTiling, AreTriedBeforeAnybodyWaits) {
  v1::GenerateParams job = Sized(256);
  job.set_vae_tiling(v1::VAE_TILING_WHEN_NEEDED);
  Config config = InProcessServer::DefaultConfig({"sim:0=1GiB"});
  config.memory_wait_timeout = kForEver;
  InProcessServer server(config);
  const Outcome whole = server.Generate(job);  // it is measured now
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  ASSERT_TRUE(whole.adapted.empty());
  const Outcome again = server.Generate(job);
  const int64_t decode = PhaseOf(again, "vae").working_bytes(), vae = PhaseOf(again, "vae").full_bytes();
  for (const char* pinned : {"", "text_encoder", "transformer"}) {
    SCOPED_TRACE(pinned);
    server.core().cache->Offload(*server.core().devices[0], MemoryBudget::kUnlimited);
    if (*pinned != '\0') {
      ASSERT_TRUE(server.core().pins->Load(kDemoModel, {pinned}, "sim:0", /*pin=*/true).ok());
    }
    server.core().devices[0]->budget().set_cap(decode + vae / 2);
    const Outcome outcome = server.Generate(job);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    const v1::PhaseReport& report = PhaseOf(outcome, "vae");
    if (report.tiled()) {
      EXPECT_EQ(Measures(outcome).back(), Measure::MEASURE_TILED);
    } else {
      EXPECT_EQ(outcome.sha256, whole.sha256);
      EXPECT_LT(report.resident_bytes(), report.full_bytes());
    }
    server.core().devices[0]->budget().set_cap(int64_t{1} << 30);
    ASSERT_TRUE(server.core().pins->Unload(kDemoModel).ok());
  }
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

// -------------------------------------------------------------------------------------------------- guesses

// The smallest cap with which `server` draws what is expected.
int64_t SmallestCap(const std::function<Outcome(int64_t)>& draw, const std::vector<std::string>& expected) {
  int64_t low = 1 << 20, high = 256 << 20;
  while (high - low > 64 << 10) {
    const int64_t middle = low + (high - low) / 2;
    const Outcome outcome = draw(middle);
    if (outcome.status.ok()) {
      EXPECT_EQ(outcome.sha256, expected) << middle;
    } else {
      EXPECT_TRUE(IsOutOfMemory(outcome.status)) << middle << ": " << outcome.status;
    }
    (outcome.status.ok() ? high : low) = middle;
  }
  return high;
}

class GuessTest : public testing::TestWithParam<const char*> {};

TEST_P(GuessTest, AServerThatHasMeasuredNothingDrawsWhereOneThatHasDoes) {
  const v1::GenerateParams job = Sized(128);
  const bool on_cpu = std::string(GetParam()) == "cpu";
  const auto config_for = [&](int64_t cap) {
    Config config = InProcessServer::DefaultConfig({on_cpu ? "cpu" : absl::StrCat("sim:0=", cap)});
    if (on_cpu) config.ram_cap = cap;
    config.memory_wait_timeout = kForEver;
    return config;
  };
  InProcessServer warm(config_for(int64_t{1} << 30));
  const std::vector<std::string> expected = warm.Generate(job).sha256;
  ASSERT_FALSE(expected.empty());
  const int64_t when_warm = SmallestCap(
      [&](int64_t cap) {
        (on_cpu ? *warm.core().ram : warm.core().devices[0]->budget()).set_cap(cap);
        warm.core().cache->Trim(MemoryBudget::kUnlimited);
        return warm.Generate(job);
      },
      expected);
  const int64_t when_fresh = SmallestCap(
      [&](int64_t cap) {
        InProcessServer fresh(config_for(cap));
        const Outcome outcome = fresh.Generate(job);
        const MemoryBudget::Stats stats =
            (on_cpu ? *fresh.core().ram : fresh.core().devices[0]->budget()).stats();
        EXPECT_LE(stats.peak_bytes, cap);
        for (const v1::PhaseReport& phase : outcome.done.phases()) {
          EXPECT_LE(phase.working_peak_bytes(), phase.working_bytes()) << phase.component();
        }
        EXPECT_EQ(fresh.WhatIsNotAtRest(), "");
        return outcome;
      },
      expected);
  std::cout << GetParam() << ": smallest cap warm " << when_warm << ", fresh " << when_fresh << "\n";
  // What is measured has a margin on it, what is tried has none.
  EXPECT_LE(when_fresh, when_warm + (128 << 10));
}
INSTANTIATE_TEST_SUITE_P(Devices, GuessTest, testing::Values("cpu", "sim"));

TEST(AGuess, ThatFailedIsKnownToBeTooLittleAndSaysWhatWasMeasured) {
  Config config = InProcessServer::DefaultConfig({"sim:0=64MiB"});
  config.memory_wait_timeout = kForEver;
  v1::GenerateParams job = Sized(512);
  job.set_image_format(v1::IMAGE_FORMAT_LATENTS);
  int64_t taken = 0;
  {
    InProcessServer roomy(config);
    taken = PhaseOf(roomy.Generate(job), "transformer").working_peak_bytes();
    ASSERT_GT(taken, 0);
  }
  // The least of the weights is beside it: that is too little.
  config.devices = {absl::StrCat("sim:0=", taken)};
  InProcessServer server(config);
  const auto before = PlanJob(server.core(), PlanFor(job));
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_TRUE(before->fits()) << "nobody knows";
  EXPECT_TRUE(before->uncertain());
  bool tried = false;
  for (const auto& phase : before->phases()) {
    if (phase.component() != "transformer") continue;
    tried = true;
    EXPECT_FALSE(phase.working_measured());
    EXPECT_GT(phase.tried_bytes(), 0);
    EXPECT_LT(phase.tried_bytes(), phase.working_bytes());
  }
  EXPECT_TRUE(tried);

  const Outcome outcome = server.Generate(job);
  EXPECT_TRUE(IsOutOfMemory(outcome.status)) << outcome.status;
  int64_t needed = 0;
  ASSERT_TRUE(absl::SimpleAtoi(GetErrorDetails(outcome.status)["needed_bytes"], &needed)) << outcome.status;
  EXPECT_LE(needed, taken) << "it was seen to take so much at least";
  EXPECT_EQ(GetErrorDetails(outcome.status)["budget"], "sim:0");
  EXPECT_EQ(server.WhatIsNotAtRest(), "");

  const auto after = PlanJob(server.core(), PlanFor(job));
  EXPECT_FALSE(after->fits()) << "now it is known";
}

// ------------------------------------------------------------------------------------------- measured memory

TEST(MeasuredWorkingMemory, OfAJobWithoutLorasIsNotThatOfOneWithThem) {
  const WideLora lora(3000);
  Config config = InProcessServer::DefaultConfig({"cpu"});
  config.lora_roots = {lora.root()};
  config.patch_mode = "sidecar";
  InProcessServer server(config);
  const Outcome plain = server.Generate(Sized(256));
  ASSERT_TRUE(plain.status.ok()) << plain.status;
  const auto plan = [&](const std::vector<v1::LoraRef>& loras) {
    const auto planned = PlanJob(server.core(), PlanFor(Sized(256), loras));
    EXPECT_TRUE(planned.ok()) << planned.status();
    for (const auto& phase : planned->phases()) {
      if (phase.component() == "transformer") return phase;
    }
    return v1::PlanResponse::Phase();
  };
  EXPECT_TRUE(plan({}).working_measured());
  EXPECT_FALSE(plan({Lora("wide")}).working_measured()) << "measured without";
  const Outcome with = server.Generate(Sized(256), {Lora("wide")});
  ASSERT_TRUE(with.status.ok()) << with.status;
  const v1::PhaseReport &without_lora = PhaseOf(plain, "transformer"),
                        &with_lora = PhaseOf(with, "transformer");
  EXPECT_GT(with_lora.working_peak_bytes(), without_lora.working_bytes()) << "the LoRA is not wide enough";
  EXPECT_LE(with_lora.working_peak_bytes(), with_lora.working_bytes());
  EXPECT_TRUE(with.adapted.empty());
  EXPECT_TRUE(plan({Lora("wide")}).working_measured());
  EXPECT_GE(plan({Lora("wide")}).working_bytes(), with_lora.working_peak_bytes());
  EXPECT_LT(plan({}).working_bytes(), with_lora.working_peak_bytes());
}

// ---------------------------------------------------------------------------------------------- between
// phases

// The job has denoised, and waits for host memory for its file; its latents are on the device meanwhile.
TEST(Latents, StayPromisedBetweenPhases) {
  Config config = InProcessServer::DefaultConfig({"sim:0=64MiB"});
  config.memory_wait_timeout = kForEver;
  InProcessServer server(config);
  ASSERT_TRUE(server.core().pins->Load(kDemoModel, {}, "sim:0", /*pin=*/true).ok());
  v1::GenerateParams job = Sized(64, 50);
  job.set_image_format(v1::IMAGE_FORMAT_LATENTS);
  job.set_count(2);
  InProcessServer::Session session = server.Open();
  session.Send(job);
  session.WaitForStep();
  RamBudget& ram = *server.core().ram;
  const MemoryBudget::Stats during = ram.stats();
  auto others = ram.TryReserve({.bytes = during.cap_bytes - during.in_use_bytes - during.reserved_bytes,
                                .use = MemoryUse::kImages,
                                .owner = "somebody",
                                .what = "all the rest"});
  ASSERT_TRUE(others.ok()) << others.status();
  while (ram.stats().waiting == 0) absl::SleepFor(absl::Milliseconds(1));
  // 16 channels of 8 x 8 in fp32, twice.
  EXPECT_EQ(server.core().devices[0]->budget().stats().reserved_bytes, 2 * 16 * 8 * 8 * 4);
  others->Release();
  const Outcome outcome = session.Wait();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_TRUE(session.End().ok());
  ASSERT_TRUE(server.core().pins->Unload(kDemoModel).ok());
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

// ------------------------------------------------------------------------------------------------ giving way

TEST(Priorities, AreCutToTheHighestThereIs) {
  Config config = InProcessServer::DefaultConfig({"cpu"});
  config.max_priority = 7;
  InProcessServer server(config);
  for (const auto& [asked, given] : std::map<int, int>{{8, 7}, {-2147483647, -7}, {3, 3}}) {
    const InProcessServer::Session session = server.Open({}, {}, kDemoModel, asked);
    ASSERT_TRUE(session.opened().ok());
    uint64_t more = 0;
    EXPECT_EQ(server.core().sessions->List(0, 1, &more).front().priority(), given);
  }
}

// A parked job of priority 0 and a running one of 10 hold the memory that one of 20 wants.
TEST(AParkedJob, GivesWayToAMoreUrgentOneAndLosesNothing) {
  v1::GenerateParams long_job = Sized(128, 400), urgent = Sized(192, 2), low_job = Sized(128, 200);
  // The VAE takes more than there will be.
  for (v1::GenerateParams* job : {&long_job, &urgent, &low_job})
    job->set_image_format(v1::IMAGE_FORMAT_LATENTS);
  Config config = InProcessServer::DefaultConfig({"sim:0=1GiB"});
  config.memory_wait_timeout = kForEver;
  config.priority_ageing = absl::InfiniteDuration();
  InProcessServer server(config);
  const std::vector<std::string> low_alone = server.Generate(low_job).sha256,
                                 urgent_alone = server.Generate(urgent).sha256;
  ASSERT_FALSE(low_alone.empty() || urgent_alone.empty());
  const Outcome low_measured = server.Generate(low_job), urgent_measured = server.Generate(urgent);
  const v1::PhaseReport& small = PhaseOf(low_measured, "transformer");
  const v1::PhaseReport& large = PhaseOf(urgent_measured, "transformer");
  // The weights, both small jobs, and half of what the large one takes.
  ASSERT_LT(small.working_bytes(), large.working_bytes());
  ASSERT_GT(2 * small.working_bytes(), large.working_bytes() / 2) << "it would not do if they gave way";
  MemoryBudget& budget = server.core().devices[0]->budget();
  budget.set_cap(small.full_bytes() + 2 * small.working_bytes() + large.working_bytes() / 2);

  InProcessServer::Session low = server.Open(), high = server.Open({}, {}, kDemoModel, 10);
  low.Send(low_job);
  low.WaitForStep();
  high.Send(long_job);
  high.WaitForStep();
  const int64_t used = budget.stats().reserved_bytes;
  EXPECT_GE(used, 2 * small.working_bytes()) << "both hold their working memory";
  InProcessServer::Session top = server.Open({}, {}, kDemoModel, 20);
  const Outcome outcome = top.Denoise(urgent);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.sha256, urgent_alone);
  EXPECT_TRUE(outcome.adapted.empty());
  EXPECT_TRUE(top.End().ok());
  EXPECT_TRUE(high.End().ok());
  const Outcome resumed = low.Wait();
  ASSERT_TRUE(resumed.status.ok()) << resumed.status;
  EXPECT_EQ(resumed.sha256, low_alone);
  EXPECT_EQ(resumed.steps, 200) << "no step was made twice";
  EXPECT_TRUE(low.End().ok());
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

}  // namespace
}  // namespace latentd
