// What Plan says is what then happens.
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"
#include "server/rpc/grpc_errors.h"
#include "server/runtime/planner.h"
#include "tests/stress/in_process_server.h"

namespace latentd {
namespace {

v1::PlanRequest RequestFor(const v1::GenerateParams& params, const std::vector<v1::LoraRef>& loras,
                           const std::string& model = kDemoModel) {
  v1::PlanRequest request;
  request.set_model(model);
  *request.mutable_params() = params;
  for (const v1::LoraRef& lora : loras) *request.add_loras() = lora;
  return request;
}

std::set<std::string> Keys(const CacheStats& stats) {
  std::set<std::string> keys;
  for (const RecordStats& record : stats.records) keys.insert(record.key.ToString());
  return keys;
}

// Plans a job, runs it, and compares.
void PlanAndRun(InProcessServer& server, const v1::GenerateParams& params,
                const std::vector<v1::LoraRef>& loras, const std::string& model = kDemoModel) {
  const CacheStats before = server.stats();
  const auto plan = PlanJob(server.core(), RequestFor(params, loras, model));
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_TRUE(plan->fits()) << plan->reason().message();

  // Nothing is changed by it.
  const CacheStats after_plan = server.stats();
  EXPECT_EQ(Keys(after_plan), Keys(before));
  EXPECT_EQ(after_plan.misses, before.misses);
  EXPECT_EQ(after_plan.hits, before.hits);
  EXPECT_EQ(after_plan.ram.in_use_bytes, before.ram.in_use_bytes);
  EXPECT_EQ(after_plan.ram.reserved_bytes, before.ram.reserved_bytes);
  ASSERT_EQ(after_plan.records.size(), before.records.size());
  for (size_t i = 0; i < before.records.size(); ++i) {
    EXPECT_TRUE(after_plan.records[i].key == before.records[i].key) << "the order of eviction moved";
  }

  const Outcome outcome = server.Generate(params, loras, v1::PATCH_MODE_UNSPECIFIED, model);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  const CacheStats after = server.stats();
  EXPECT_EQ(plan->loads_size(), after.misses - before.misses);
  std::set<std::string> planned_loads;
  for (const auto& load : plan->loads()) planned_loads.insert(load.key());
  std::set<std::string> go_first;
  for (const auto& eviction : plan->evictions()) go_first.insert(eviction.key());
  for (const std::string& key : planned_loads) {
    EXPECT_TRUE(Keys(before).count(key) == 0 || go_first.count(key) != 0) << key << " was there";
  }

  std::multiset<std::string> planned_evictions, evictions;
  for (const auto& eviction : plan->evictions()) {
    if (eviction.device().empty()) planned_evictions.insert(eviction.key());
  }
  const auto evicted =
      static_cast<size_t>(after.evicted(EvictReason::kRoom) - before.evicted(EvictReason::kRoom));
  for (size_t i = after.recent_evictions.size() - evicted; i < after.recent_evictions.size(); ++i) {
    evictions.insert(after.recent_evictions[i].key.ToString());
  }
  EXPECT_EQ(planned_evictions, evictions);

  ASSERT_EQ(plan->phases_size(), outcome.done.phases_size());
  for (int i = 0; i < plan->phases_size(); ++i) {
    const auto& planned = plan->phases(i);
    const v1::PhaseReport& real = outcome.done.phases(i);
    EXPECT_EQ(planned.component(), real.component());
    EXPECT_EQ(planned.cached(), real.cached()) << planned.component();
    EXPECT_EQ(planned.device(), real.device()) << planned.component();
    // Of a LoRA that was not read it is not known which components it changes.
    EXPECT_NEAR(static_cast<double>(planned.working_bytes()), static_cast<double>(real.working_bytes()),
                0.02 * static_cast<double>(real.working_bytes()))
        << planned.component();
    EXPECT_EQ(planned.full_bytes() == planned.resident_bytes(), real.full_bytes() == real.resident_bytes())
        << planned.component() << ": streamed or not";
    // From shapes and the files' sizes, so padding and mixed types are not seen.
    EXPECT_NEAR(static_cast<double>(planned.resident_bytes()), static_cast<double>(real.resident_bytes()),
                0.05 * static_cast<double>(real.full_bytes()) + 4096)
        << planned.component();
  }
  EXPECT_LE(outcome.done.peak_ram_bytes(), before.ram.in_use_bytes + 2 * plan->peak_ram_bytes());
  EXPECT_GT(plan->peak_ram_bytes(), 0);
}

TEST(Plan, SaysWhatThenHappens) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB"}));
  PlanAndRun(server, SmallJob(), {Lora("dusk")});  // all is cold
  PlanAndRun(server, SmallJob(), {Lora("dusk")});  // all is there
  PlanAndRun(server, SmallJob("another prompt", 3), {Lora("dusk"), Lora("checker")});
  PlanAndRun(server, SmallJob("another prompt", 3), {});
  const auto plan = PlanJob(server.core(), RequestFor(SmallJob(), {Lora("dusk")}));
  EXPECT_GT(plan->seconds(), 0) << "such a job has run";
  EXPECT_EQ(plan->loads_size(), 0);
}

TEST(Plan, SaysWhatIsEvictedAndStreamed) {
  const ModelCopies copies({kDemoModel, "other"});
  Config config = InProcessServer::DefaultConfig({"sim:0=64MiB"});
  config.model_roots = {copies.root()};
  InProcessServer server(config);
  // Working memory is measured before it gets tight.
  ASSERT_TRUE(server.Generate(SmallJob(), {Lora("dusk")}).status.ok());
  const auto warm = PlanJob(server.core(), RequestFor(SmallJob(), {Lora("dusk")}));
  int64_t room = 0;
  for (const auto& phase : warm->phases()) {
    EXPECT_TRUE(phase.cached() || phase.working_measured()) << phase.component();
    room = std::max(room, phase.working_bytes() + phase.full_bytes() * 3 / 4);
  }
  server.core().devices[0]->budget().set_cap(room);
  server.core().ram->set_cap(server.stats().ram.peak_bytes + (1 << 20));
  for (int i = 0; i < 6; ++i) {
    SCOPED_TRACE(i);
    PlanAndRun(server, SmallJob("a red circle", static_cast<uint64_t>(i)), {Lora("dusk")},
               i % 2 == 0 ? kDemoModel : "other");
  }
  EXPECT_GT(server.stats().evicted(EvictReason::kRoom), 0);
  EXPECT_GT(server.stats().devices.at("sim:0").offloads, 0);
  EXPECT_GT(server.stats().devices.at("sim:0").streamed_locks, 0);
}

TEST(Plan, KnowsOfTiles) {
  v1::GenerateParams job = SmallJob();
  job.set_width(128);
  job.set_height(128);
  int64_t decode = 0;
  {
    InProcessServer large(InProcessServer::DefaultConfig({"cpu"}));
    const Outcome whole = large.Generate(job);
    ASSERT_TRUE(whole.status.ok()) << whole.status;
    decode = whole.done.phases(whole.done.phases_size() - 1).working_peak_bytes();
  }
  InProcessServer server(InProcessServer::DefaultConfig({absl::StrCat("sim:0=", decode * 9 / 10)}));
  // What was only guessed might do; what was tried and failed does not.
  const auto guessed = PlanJob(server.core(), RequestFor(job, {}));
  EXPECT_TRUE(guessed->fits());
  EXPECT_TRUE(guessed->uncertain());
  EXPECT_FALSE(server.Generate(job).status.ok());
  EXPECT_FALSE(PlanJob(server.core(), RequestFor(job, {}))->fits());
  job.set_vae_tiling(v1::VAE_TILING_WHEN_NEEDED);
  const auto plan = PlanJob(server.core(), RequestFor(job, {}));
  ASSERT_TRUE(plan->fits()) << plan->reason().message();
  EXPECT_FALSE(plan->uncertain());
  const auto& planned = plan->phases(plan->phases_size() - 1);
  EXPECT_TRUE(planned.tiled());
  const Outcome outcome = server.Generate(job);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  const v1::PhaseReport& real = outcome.done.phases(outcome.done.phases_size() - 1);
  EXPECT_TRUE(real.tiled());
  EXPECT_EQ(real.working_bytes(), planned.working_bytes());
  EXPECT_EQ(real.resident_bytes(), real.full_bytes())
      << "streaming does not help where activations are too large";
}

TEST(Plan, SaysWhyAJobDoesNotFit) {
  Config config = InProcessServer::DefaultConfig({"cpu"});
  config.ram_cap = 4 << 20;
  InProcessServer server(config);
  const auto plan = PlanJob(server.core(), RequestFor(SmallJob(), {}));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->fits());
  EXPECT_EQ(plan->evictions_size(), 0);
  const absl::Status reason = FromRpcStatus(plan->reason());
  const Outcome outcome = server.Generate(SmallJob());
  EXPECT_FALSE(outcome.status.ok());
  EXPECT_EQ(ErrorReason(reason), ErrorReason(outcome.status)) << reason << " / " << outcome.status;
  EXPECT_EQ(GetErrorDetails(reason)["needed_bytes"], GetErrorDetails(outcome.status)["needed_bytes"]);

  // Held by somebody else: it does not fit now.
  InProcessServer roomy(InProcessServer::DefaultConfig({"cpu"}));
  ASSERT_TRUE(roomy.Generate(SmallJob()).status.ok());
  roomy.core().cache->Trim(MemoryBudget::kUnlimited);
  auto held =
      roomy.core().ram->Reserve({.bytes = roomy.core().ram->stats().cap_bytes - 100, .owner = "somebody"});
  const auto blocked = PlanJob(roomy.core(), RequestFor(SmallJob(), {}));
  EXPECT_FALSE(blocked->fits());
  EXPECT_EQ(ErrorReason(FromRpcStatus(blocked->reason())), "BUDGET_EXHAUSTED");
}

TEST(Plan, RefusesWhatGenerateRefuses) {
  InProcessServer server(InProcessServer::DefaultConfig({"cpu"}));
  v1::GenerateParams wrong = SmallJob();
  wrong.set_width(13);
  EXPECT_EQ(ErrorReason(PlanJob(server.core(), RequestFor(wrong, {})).status()), "INVALID_FIELD");
  EXPECT_EQ(ErrorReason(PlanJob(server.core(), RequestFor(SmallJob(), {Lora("nothing")})).status()),
            "LORA_NOT_FOUND");
  EXPECT_EQ(ErrorReason(PlanJob(server.core(), RequestFor(SmallJob(), {}, "nothing")).status()),
            "MODEL_NOT_FOUND");
  EXPECT_EQ(ErrorReason(PlanJob(server.core(), RequestFor(SmallJob(), {}, "")).status()), "INVALID_FIELD");
}

}  // namespace
}  // namespace latentd
