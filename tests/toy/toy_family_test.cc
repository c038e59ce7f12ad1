// The frame carries a family that is unlike those that are served: through jobs, plans, cancels and LoRAs.
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/media/image_codec.h"
#include "server/runtime/planner.h"
#include "tests/stress/in_process_server.h"
#include "tests/stress/weight_editor.h"
#include "tests/toy/toy_pipeline.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
namespace fs = std::filesystem;

constexpr char kToy[] = "toy";

class ToyFamily : public testing::TestWithParam<const char*> {
 protected:
  ToyFamily()
      : root_(absl::StrCat(testing::TempDir(), "/toy.", getpid(), ".", std::string(1, GetParam()[0]))) {
    fs::create_directories(root_);
    at::manual_seed(3);
    for (const char* name : kToyComponents) {
      WriteTensors(absl::StrCat(root_, "/", name, ".safetensors"), {{"proj.weight", at::randn({4, 4})}});
    }
    for (const char* name : {"expert_high", "expert_low"}) {
      WriteTensors(absl::StrCat(root_, "/for_", name, ".safetensors"),
                   {{absl::StrCat(name, ".proj.lora_A.weight"), at::randn({2, 4})},
                    {absl::StrCat(name, ".proj.lora_B.weight"), at::randn({4, 2})}});
    }
    WriteTensors(
        absl::StrCat(root_, "/for_both.safetensors"),
        {{"expert.proj.lora_A.weight", at::randn({2, 4})}, {"expert.proj.lora_B.weight", at::randn({4, 2})}});
    Config config = InProcessServer::DefaultConfig({GetParam()});
    config.lora_roots = {root_};
    server_ = std::make_unique<InProcessServer>(config);
    server_->core().catalog->AddModel(OpenModel::Make(
        kToy, absl::StrCat(kToy, "@0"), "",
        std::make_unique<ToyPipeline>(root_, [this](int64_t slice, const std::string& component) {
          if (on_slice_) on_slice_(slice, component);
        })));
  }
  ~ToyFamily() override {
    server_ = nullptr;
    fs::remove_all(root_);
  }

  // With two references of unequal sizes: 2 + 4 + 4 slices.
  static v1::GenerateParams Job(int references = 2) {
    v1::GenerateParams params;
    params.set_seed(5);
    for (int i = 0; i < references; ++i) {
      v1::Input& input = *params.add_inputs();
      input.set_role(v1::MEDIA_ROLE_REFERENCE);
      const int width = 8 + 24 * i, height = 40 - 16 * i;
      input.set_data(
          *EncodePng(std::vector<uint8_t>(static_cast<size_t>(width * height * 3), 90), width, height));
    }
    return params;
  }
  static constexpr int64_t kSlices = 10;

  Outcome Draw(const v1::GenerateParams& params, const std::vector<v1::LoraRef>& loras = {}) {
    return server_->Generate(params, loras, v1::PATCH_MODE_UNSPECIFIED, kToy);
  }
  static std::vector<std::string> Components(const v1::JobEvent::Done& done) {
    std::vector<std::string> names;
    for (const v1::PhaseReport& phase : done.phases()) names.push_back(phase.component());
    return names;
  }

  const std::string root_;
  std::function<void(int64_t, const std::string&)> on_slice_;
  std::unique_ptr<InProcessServer> server_;
};

TEST_P(ToyFamily, RunsItsPhasesAndOneExpertAfterTheOther) {
  std::vector<std::string> read;
  std::vector<std::set<std::string>> locked;  // of the experts, while a slice runs
  on_slice_ = [&](int64_t slice, const std::string& component) {
    EXPECT_EQ(slice, static_cast<int64_t>(read.size()));
    read.push_back(component);
    locked.emplace_back();
    for (const RecordStats& record : server_->stats().records) {
      if (record.lock_count > 0) locked.back().insert(record.key.component);
    }
  };
  const Outcome outcome = Draw(Job());
  on_slice_ = {};
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_THAT(read, ElementsAre("vision", "vision", "expert_high", "expert_high", "expert_low", "expert_low",
                                "decoder", "decoder", "decoder", "decoder"));
  for (size_t i = 0; i < read.size(); ++i) EXPECT_EQ(locked[i], std::set<std::string>{read[i]}) << i;
  EXPECT_EQ(outcome.steps, 4);
  EXPECT_THAT(Components(outcome.done), ElementsAre("vision", "expert_high", "expert_low", "decoder"));
  EXPECT_EQ(server_->WhatIsNotAtRest(), "");
  EXPECT_EQ(Draw(Job()).sha256, outcome.sha256);
  EXPECT_NE(Draw(Job(1)).sha256, outcome.sha256) << "the references are looked at";
}

TEST_P(ToyFamily, TakesTheRolesThatItSays) {
  v1::GenerateParams params = Job();
  params.mutable_inputs(1)->set_role(v1::MEDIA_ROLE_LAST_FRAME);
  EXPECT_EQ(GetErrorDetails(Draw(params).status)["field"], "params.inputs[1]");
  params = Job(3);
  EXPECT_TRUE(Draw(params).status.ok());
  *params.add_inputs() = params.inputs(0);
  EXPECT_EQ(GetErrorDetails(Draw(params).status)["field"], "params.inputs[3]");
}

TEST_P(ToyFamily, IsPlannedAsItRuns) {
  v1::PlanRequest request;
  request.set_model(kToy);
  *request.mutable_params() = Job();
  for (int round = 0; round < 2; ++round) {
    const auto plan = PlanJob(server_->core(), request);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_TRUE(plan->fits());
    const int64_t misses = server_->stats().misses;
    const Outcome outcome = Draw(Job());
    EXPECT_EQ(plan->loads_size(), server_->stats().misses - misses);
    std::vector<std::string> planned;
    for (const auto& phase : plan->phases()) planned.push_back(phase.component());
    EXPECT_EQ(planned, Components(outcome.done));
  }
}

TEST_P(ToyFamily, EndsInEverySliceThatItIsCancelledIn) {
  for (int64_t last = 0; last < kSlices; ++last) {
    auto session = server_->Open({}, v1::PATCH_MODE_UNSPECIFIED, kToy);
    int64_t slices = 0;
    on_slice_ = [&](int64_t slice, const std::string&) {
      slices = slice + 1;
      if (slice == last) {
        EXPECT_TRUE(session.Cancel().ok());
      }
    };
    EXPECT_TRUE(absl::IsCancelled(session.Denoise(Job()).status)) << last;
    EXPECT_EQ(slices, last + 1) << "none after it";
    on_slice_ = {};
    EXPECT_TRUE(session.End().ok());
    EXPECT_EQ(server_->WhatIsNotAtRest(), "");
  }
}

TEST_P(ToyFamily, ALoraOfOneExpertLeavesTheOtherAlone) {
  const std::vector<std::string> plain = Draw(Job()).sha256;
  std::set<std::vector<std::string>> pictures = {plain};
  for (const char* expert : {"expert_high", "expert_low"}) {
    const Outcome outcome = Draw(Job(), {Lora(absl::StrCat("for_", expert), 1)});
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    ASSERT_EQ(outcome.done.loras_size(), 1);
    EXPECT_EQ(outcome.done.loras(0).matched().size(), 1u);
    EXPECT_EQ(outcome.done.loras(0).matched().count(expert), 1u);
    pictures.insert(outcome.sha256);
  }
  EXPECT_EQ(pictures.size(), 3u);
  EXPECT_EQ(Draw(Job()).sha256, plain);
  EXPECT_EQ(server_->WhatIsNotAtRest(), "");
}

TEST_P(ToyFamily, ALoraMayBeLimitedToAnExpert) {
  std::set<std::vector<std::string>> pictures = {Draw(Job()).sha256};
  for (const std::vector<std::string>& only :
       std::vector<std::vector<std::string>>{{}, {"expert_high"}, {"expert_low"}}) {
    v1::LoraRef lora = Lora("for_both", 1);
    lora.mutable_only()->Assign(only.begin(), only.end());
    const Outcome outcome = Draw(Job(), {lora});
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.done.loras(0).matched().size(), only.empty() ? 2u : 1u);
    EXPECT_EQ(outcome.done.loras(0).unmatched_count(), 0) << "what is left out is no stranger";
    for (const std::string& expert : only) EXPECT_EQ(outcome.done.loras(0).matched().count(expert), 1u);
    pictures.insert(outcome.sha256);
    lora.mutable_only()->Clear();
    lora.add_only("expert_high");
    lora.add_only("expert_low");
    if (only.empty()) {
      EXPECT_EQ(Draw(Job(), {lora}).sha256, outcome.sha256);
    }
  }
  EXPECT_EQ(pictures.size(), 4u);
  for (const char* wrong : {"unet", "", "vision"}) {
    v1::LoraRef lora = Lora("for_both", 1);
    lora.add_only(wrong);
    const absl::Status status = Draw(Job(), {lora}).status;
    EXPECT_EQ(GetErrorDetails(status)["field"], "loras.only") << status;
  }
  EXPECT_EQ(server_->WhatIsNotAtRest(), "");
}

INSTANTIATE_TEST_SUITE_P(Devices, ToyFamily, testing::Values("cpu", "sim:0=64MiB"),
                         [](const auto& info) { return info.param[0] == 'c' ? "cpu" : "sim"; });

}  // namespace
}  // namespace latentd
