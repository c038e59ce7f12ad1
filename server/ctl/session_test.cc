#include "server/ctl/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cache/base/error.h"

namespace latentd::ctl {
namespace {

using ::testing::HasSubstr;

v1::SessionRequest Request(SessionScript& script, const std::string& line) {
  auto command = script.Parse(line);
  EXPECT_TRUE(command.ok()) << command.status();
  return command.ok() ? command->request : v1::SessionRequest();
}

TEST(CtlSession, LinesBecomeRequests) {
  SessionScript script({});
  EXPECT_EQ(Request(script, "generate a red circle").denoise().params().prompt(), "a red circle");
  const auto loras = Request(script, "loras a:1 b:0.5").set_loras();
  ASSERT_EQ(loras.loras_size(), 2);
  EXPECT_EQ(loras.loras(1).name(), "b");
  EXPECT_EQ(loras.loras(1).weight(), 0.5);
  EXPECT_EQ(Request(script, "loras").set_loras().loras_size(), 0);
  EXPECT_EQ(Request(script, "cancel job-7").cancel().job_id(), "job-7");
  EXPECT_TRUE(Request(script, " close ").has_close());
}

TEST(CtlSession, CancelWithoutANameMeansTheLastJob) {
  SessionScript script({});
  EXPECT_EQ(script.Parse("cancel").status().code(), absl::StatusCode::kInvalidArgument);
  const std::string job = Request(script, "generate x").denoise().job_id();
  EXPECT_EQ(Request(script, "cancel").cancel().job_id(), job);
}

TEST(CtlSession, EveryJobHasItsOwnName) {
  SessionScript script({});
  EXPECT_NE(Request(script, "generate x").denoise().job_id(),
            Request(script, "generate x").denoise().job_id());
}

TEST(CtlSession, SetChangesTheJobsThatFollow) {
  v1::GenerateParams start;
  start.set_steps(4);
  SessionScript script(start);
  EXPECT_EQ(Request(script, "generate x").denoise().params().steps(), 4);
  for (const char* line :
       {"set steps 8", "set seed 18446744073709551615", "set negative_prompt dark sky",
        "set true_cfg_scale 2.5", "set image_format IMAGE_FORMAT_JPEG", "set vae_tiling VAE_TILING_ALWAYS"}) {
    auto command = script.Parse(line);
    ASSERT_TRUE(command.ok()) << command.status();
    EXPECT_EQ(command->kind, SessionCommand::Kind::kNothing);
  }
  const auto params = Request(script, "generate x").denoise().params();
  EXPECT_EQ(params.steps(), 8);
  EXPECT_EQ(params.seed(), 18446744073709551615u);
  EXPECT_EQ(params.negative_prompt(), "dark sky");
  EXPECT_EQ(params.true_cfg_scale(), 2.5);
  EXPECT_EQ(params.image_format(), v1::IMAGE_FORMAT_JPEG);
  EXPECT_EQ(params.vae_tiling(), v1::VAE_TILING_ALWAYS);
  ASSERT_TRUE(script.Parse("set steps").ok());
  EXPECT_FALSE(Request(script, "generate x").denoise().params().has_steps());
}

TEST(CtlSession, AMessageCanBeGivenAsJson) {
  SessionScript script({});
  const auto request =
      Request(script, R"({"requestId": "r", "denoise": {"jobId": "j", "params": {"prompt": "p"}}})");
  EXPECT_EQ(request.request_id(), "r");
  EXPECT_EQ(request.denoise().job_id(), "j");
  EXPECT_EQ(Request(script, "cancel").cancel().job_id(), "j");
  EXPECT_EQ(Request(script, R"({"denoise": {}})").denoise().job_id(), "job-1");
}

TEST(CtlSession, EmptyLinesAndCommentsAreNothing) {
  SessionScript script({});
  EXPECT_EQ(script.Parse("")->kind, SessionCommand::Kind::kNothing);
  EXPECT_EQ(script.Parse("# generate x")->kind, SessionCommand::Kind::kNothing);
  EXPECT_EQ(script.Parse("wait")->kind, SessionCommand::Kind::kWait);
}

TEST(CtlSession, WhatIsNotUnderstoodIsAnErrorWithTheCommands) {
  SessionScript script({});
  for (const char* line : {"paint x", "generate", "set colour red", "set steps many", "{", "loras :1"}) {
    EXPECT_EQ(ErrorReason(script.Parse(line).status()), "USAGE") << line;
  }
  EXPECT_THAT(std::string(script.Parse("paint x").status().message()), HasSubstr("generate PROMPT"));
}

}  // namespace
}  // namespace latentd::ctl
