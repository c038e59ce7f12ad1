// What needs no oracle. Lists are compared with diffusers in tests/goldens.
#include "families/sampling/flow_match.h"

#include <fstream>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using testing::FloatEq;

absl::StatusOr<FlowMatchConfig> Load(const std::string& text) {
  const std::string path = absl::StrCat(testing::TempDir(), "/scheduler.", getpid(), ".json");
  std::ofstream(path) << text;
  auto config = FlowMatchConfig::Load(path);
  std::remove(path.c_str());
  return config;
}

TEST(FlowMatchTest, WithoutAShiftLevelsAreEvenlySpaced) {
  EXPECT_THAT(FlowMatchSigmas({}, 4, 100), ElementsAre(1.0f, 0.75f, 0.5f, 0.25f, 0.0f));
  EXPECT_THAT(FlowMatchSigmas({}, 1, 100), ElementsAre(1.0f, 0.0f));
}

TEST(FlowMatchTest, TheRequestsShiftReplacesTheModels) {
  FlowMatchConfig dynamic;
  dynamic.dynamic = true;
  EXPECT_THAT(FlowMatchSigmas(dynamic, 2, 4096, 3.0), ElementsAre(1.0f, FloatEq(0.75f), 0.0f));
  EXPECT_NE(FlowMatchSigmas(dynamic, 2, 4096), FlowMatchSigmas(dynamic, 2, 256));
  EXPECT_EQ(FlowMatchSigmas(dynamic, 2, 4096, 3.0), FlowMatchSigmas(dynamic, 2, 256, 3.0));
}

TEST(FlowMatchTest, OneStepCannotBeStretchedToATerminalLevel) {
  FlowMatchConfig config;
  config.terminal = 0.02;
  EXPECT_THAT(FlowMatchSigmas(config, 1, 100), ElementsAre(1.0f, 0.0f));
}

TEST(FlowMatchTest, StrengthSaysHowMuchOfTheListIsRun) {
  EXPECT_EQ(StartIndex(10, 1.0), 0);
  EXPECT_EQ(StartIndex(10, 0.6), 4);
  EXPECT_EQ(StartIndex(28, 0.75), 7);
  EXPECT_EQ(StartIndex(4, 0.1), 3);
  EXPECT_EQ(StartIndex(4, 1e-300), 4);  // nothing left
}

TEST(FlowMatchTest, SchedulesOfOtherKindsAreRefused) {
  EXPECT_TRUE(Load(R"({"shift": 3.0, "use_karras_sigmas": false, "unknown": 1})").ok());
  for (const char* text :
       {R"({"use_karras_sigmas": true})", R"({"stochastic_sampling": true})",
        R"({"time_shift_type": "cubic"})", R"({"_class_name": "DDIMScheduler"})", R"({"shift": 0})",
        R"({"num_train_timesteps": 500})",
        R"({"use_dynamic_shifting": true, "base_image_seq_len": 9, "max_image_seq_len": 9})"}) {
    EXPECT_EQ(ErrorReason(Load(text).status()), "UNSUPPORTED_MODEL") << text;
  }
}

}  // namespace
}  // namespace latentd
