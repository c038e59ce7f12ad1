// The parts of latentctl that need no server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cache/error.h"
#include "latentd/v1/cache.pb.h"
#include "server/ctl_images.h"
#include "server/ctl_session.h"
#include "server/ctl_text.h"
#include "server/sha256.h"

namespace latentd::ctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(CtlText, SizesAreShort) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1536), "1.50 KiB");
  EXPECT_EQ(HumanBytes(int64_t{23} << 30), "23.0 GiB");
}

TEST(CtlText, TimesAreShort) {
  EXPECT_EQ(HumanMs(1.26), "1.3 ms");
  EXPECT_EQ(HumanMs(12.3), "12 ms");
  EXPECT_EQ(HumanMs(1234), "1.23 s");
  EXPECT_EQ(HumanMs(75400), "1 min 15 s");
  EXPECT_EQ(HumanMs(2 * 3600e3 + 60e3), "2 h 1 min");
  EXPECT_EQ(HumanMs(600e3), "10 min");
}

TEST(CtlText, ATableAlignsItsColumns) {
  EXPECT_EQ(TableText({{"NAME", "SIZE"}, {"shapes-flux", "4.50 MiB"}, {"é", "12 B"}}),
            "NAME         SIZE\n"
            "shapes-flux  4.50 MiB\n"
            "é                12 B\n");
}

TEST(CtlText, ALoraIsANameAndMaybeAWeight) {
  EXPECT_EQ(ParseLora("night")->name(), "night");
  EXPECT_FALSE(ParseLora("night")->has_weight());
  EXPECT_EQ(ParseLora("night:0.5")->weight(), 0.5);
  EXPECT_EQ(ParseLora("night:-1")->weight(), -1);
  EXPECT_EQ(ParseLora("a:b")->name(), "a:b");
  EXPECT_EQ(ParseLora("a:b:0")->name(), "a:b");
  EXPECT_EQ(ErrorReason(ParseLora(":1").status()), "USAGE");
}

TEST(CtlText, OutputNamesDifferForSeveralPictures) {
  EXPECT_EQ(ExpandOutput("a.png", {.index = 0, .count = 1}), "a.png");
  EXPECT_EQ(ExpandOutput("a.png", {.index = 1, .count = 2}), "a-1.png");
  EXPECT_EQ(ExpandOutput("dir.d/a", {.index = 1, .count = 2}), "dir.d/a-1");
  EXPECT_EQ(ExpandOutput("{job}-{seed}-{index}.jpg", {.job = "j", .index = 1, .seed = 42, .count = 2}),
            "j-42-1.jpg");
}

TEST(CtlText, JsonLeavesBinaryDataOutUnlessAskedFor) {
  v1::GenerateResponse response;
  auto* chunk = response.mutable_event()->mutable_image_chunk();
  chunk->set_index(3);
  chunk->set_data("abc");
  EXPECT_EQ(nlohmann::json::parse(MessageJson(response, false))["event"]["imageChunk"]["data"], "");
  EXPECT_EQ(nlohmann::json::parse(MessageJson(response, true))["event"]["imageChunk"]["data"], "YWJj");
  EXPECT_EQ(response.event().image_chunk().data(), "abc");
}

TEST(CtlText, JsonShowsFieldsThatAreZero) {
  v1::CacheRecord record;
  record.set_key("k");
  const auto json = nlohmann::json::parse(MessageJson(record, false));
  EXPECT_EQ(json["lockCount"], 0);
  EXPECT_TRUE(json["holders"].empty());
}

TEST(CtlText, AnErrorShowsReasonAndDetails) {
  const auto error =
      MakeError(absl::StatusCode::kNotFound, "MODEL_NOT_FOUND", "no model", {{"model", "m\x1b"}});
  EXPECT_EQ(ErrorText(error, false), "latentctl: NOT_FOUND MODEL_NOT_FOUND: no model\n  model: m?\n");
  const auto json = nlohmann::json::parse(ErrorText(error, true));
  EXPECT_EQ(json["reason"], "MODEL_NOT_FOUND");
  EXPECT_EQ(json["details"]["model"], "m\x1b");
}

TEST(CtlText, ExitCodesTellWhoIsToBlame) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCodeOf(MakeError(absl::StatusCode::kUnavailable, "SERVER_DRAINING", "")), kExitFailed);
  EXPECT_EQ(ExitCodeOf(absl::UnavailableError("connection refused")), kExitUnreachable);
  EXPECT_EQ(ExitCodeOf(MakeError(absl::StatusCode::kDataLoss, "DAMAGED_DATA", "")), kExitLocal);
}

v1::JobEvent Header(int index, const std::string& data) {
  v1::JobEvent event;
  event.mutable_image_header()->set_index(index);
  event.mutable_image_header()->set_size(static_cast<int64_t>(data.size()));
  event.mutable_image_header()->set_sha256(Sha256Hex(data));
  return event;
}

v1::JobEvent Chunk(int index, int64_t offset, const std::string& data) {
  v1::JobEvent event;
  event.mutable_image_chunk()->set_index(index);
  event.mutable_image_chunk()->set_offset(offset);
  event.mutable_image_chunk()->set_data(data);
  return event;
}

TEST(CtlImages, ChunksMakeUpTheFile) {
  ImageReceiver receiver;
  EXPECT_FALSE(receiver.OnEvent(Header(0, "abcdef"))->has_value());
  EXPECT_FALSE(receiver.OnEvent(Chunk(0, 0, "abc"))->has_value());
  auto image = receiver.OnEvent(Chunk(0, 3, "def"));
  ASSERT_TRUE(image.ok() && image->has_value());
  EXPECT_EQ((*image)->data, "abcdef");
  EXPECT_TRUE(receiver.Finish().ok());
}

TEST(CtlImages, AWrongChecksumIsDamage) {
  ImageReceiver receiver;
  ASSERT_TRUE(receiver.OnEvent(Header(0, "abc")).ok());
  EXPECT_EQ(ErrorReason(receiver.OnEvent(Chunk(0, 0, "abd")).status()), "DAMAGED_DATA");
}

TEST(CtlImages, ChunksOutOfPlaceAreDamage) {
  for (const auto& chunk : {Chunk(0, 1, "a"), Chunk(1, 0, "a"), Chunk(0, 0, "abcd"), Chunk(0, 0, "")}) {
    ImageReceiver receiver;
    ASSERT_TRUE(receiver.OnEvent(Header(0, "abc")).ok());
    EXPECT_EQ(ErrorReason(receiver.OnEvent(chunk).status()), "DAMAGED_DATA") << chunk.ShortDebugString();
  }
}

TEST(CtlImages, AFileThatDoesNotEndIsDamage) {
  ImageReceiver receiver;
  ASSERT_TRUE(receiver.OnEvent(Header(0, "abc")).ok());
  ASSERT_TRUE(receiver.OnEvent(Chunk(0, 0, "ab")).ok());
  EXPECT_EQ(ErrorReason(receiver.Finish()), "DAMAGED_DATA");
  EXPECT_EQ(ErrorReason(receiver.OnEvent(Header(1, "abc")).status()), "DAMAGED_DATA");
}

TEST(CtlImages, TwoPixelsMakeOneCharacter) {
  const RgbImage image{1, 3, {1, 2, 3, 4, 5, 6, 7, 8, 9}};
  EXPECT_THAT(DrawHalfBlocks(image, 80, 24),
              ElementsAre("\x1b[38;2;1;2;3m\x1b[48;2;4;5;6m▀\x1b[0m", "\x1b[38;2;7;8;9m▀\x1b[0m"));
}

TEST(CtlImages, APictureFitsIntoTheTerminal) {
  const RgbImage wide{200, 100, std::vector<uint8_t>(200 * 100 * 3)};
  EXPECT_THAT(DrawHalfBlocks(wide, 80, 24), SizeIs(20));
  const RgbImage high{100, 200, std::vector<uint8_t>(200 * 100 * 3)};
  EXPECT_THAT(DrawHalfBlocks(high, 80, 24), SizeIs(24));
}

TEST(CtlImages, ASmallPictureIsEnlargedByAWholeNumber) {
  const RgbImage image{2, 1, {1, 1, 1, 2, 2, 2}};
  const RgbImage large = EnlargeToFit(image, 5, 24);
  EXPECT_EQ(large.width, 4);
  EXPECT_EQ(large.height, 2);
  EXPECT_EQ(large.pixels, (std::vector<uint8_t>{1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2,  //
                                                1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2}));
}

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
  for (const char* line : {"set steps 8", "set seed 18446744073709551615", "set negative_prompt dark sky",
                           "set true_cfg_scale 2.5", "set image_format IMAGE_FORMAT_JPEG"}) {
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
