#include "server/ctl/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "cache/base/error.h"
#include "latentd/v1/cache.pb.h"
#include "latentd/v1/denoise.pb.h"

namespace latentd::ctl {
namespace {

using ::testing::ElementsAre;

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

TEST(CtlText, ShortSizesHaveAtMostSixColumns) {
  EXPECT_EQ(ShortBytes(0), "0");
  EXPECT_EQ(ShortBytes(1000), "1000");
  EXPECT_EQ(ShortBytes(1536), "1.50Ki");
  EXPECT_EQ(ShortBytes(999 << 10), "999Ki");
  EXPECT_EQ(ShortBytes((1000 << 10) - 1), "0.98Mi");
  EXPECT_EQ(ShortBytes(int64_t{23} << 30), "23.0Gi");
  EXPECT_EQ(ShortBytes(-2048), "-2.00Ki");
}

TEST(CtlText, ShortTimesHaveAtMostSixColumns) {
  EXPECT_EQ(ShortMs(0.2), "0ms");
  EXPECT_EQ(ShortMs(850), "850ms");
  EXPECT_EQ(ShortMs(9999), "9.9s");
  EXPECT_EQ(ShortMs(59'999), "59s");
  EXPECT_EQ(ShortMs(75'400), "1m15s");
  EXPECT_EQ(ShortMs(3600e3), "1h00m");
  EXPECT_EQ(ShortMs(50 * 3600e3), "2d02h");
}

TEST(CtlText, OnlyTheWholeIsAHundredPercent) {
  EXPECT_EQ(Percent(0, 10), "0%");
  EXPECT_EQ(Percent(1, 1000), "<1%");
  EXPECT_EQ(Percent(999, 1000), "99%");
  EXPECT_EQ(Percent(1000, 1000), "100%");
  EXPECT_EQ(Percent(3, 2), "150%");
  EXPECT_EQ(Percent(0, 0), "0%");
  EXPECT_EQ(Percent(1, 0), "");
}

TEST(CtlText, KeysLoseMostOfTheirHashes) {
  EXPECT_EQ(ShortKey("shapes@9e1a8f0544496637:transformer"), "shapes@9e1a8f:transformer");
  EXPECT_EQ(ShortKey("m@9e1a8f0544496637:conditioning/text_encoder/104745b72c10e55f4097a82efc30eb28"),
            "m@9e1a8f:conditioning/text_encoder/104745");
  EXPECT_EQ(ShortKey("decade-facade/deadbeefdeadbeefs"), "decade-facade/deadbeefdeadbeefs");
  EXPECT_EQ(ShortKey("pin"), "pin");
}

TEST(CtlText, WhatIsTooLongIsCutAtItsEndOrInItsMiddle) {
  EXPECT_EQ(FitText("abcdef", 6), "abcdef");
  EXPECT_EQ(FitText("abcdef", 4), "abc…");
  EXPECT_EQ(FitText("äöüß", 3), "äö…");
  EXPECT_EQ(FitText("abcdef", 4, true), "ab…f");
  EXPECT_EQ(FitText("abcdef", 5, true), "ab…ef");
  EXPECT_EQ(FitText("abcdef", 1), "…");
  EXPECT_EQ(FitText("abcdef", 0), "");
}

TEST(CtlText, ATableIsMadeToFit) {
  const std::vector<Column> columns = {{"NAME", false, 0, 4}, {"SIZE", true, 5}, {"NOTE", false, 0, 4}};
  const Rows rows = {{"a long name", "12", "some note"}, {"b"}};
  EXPECT_THAT(FitTable(columns, rows, 0),
              ElementsAre("NAME          SIZE  NOTE", "a long name     12  some note", "b"));
  EXPECT_THAT(FitTable(columns, rows, 24),
              ElementsAre("NAME      SIZE  NOTE", "a long…     12  some no…", "b"));
  EXPECT_THAT(FitTable(columns, rows, 10), ElementsAre("NAME   SI…", "a l…     …", "b"));
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

TEST(CtlText, ALoraMayHaveStepsAndBlocks) {
  const auto lora = ParseLora("a/night:0.5@0.25-1,transformer.proj_out=0,text_encoder=-2");
  ASSERT_TRUE(lora.ok()) << lora.status();
  EXPECT_EQ(lora->name(), "a/night");
  EXPECT_EQ(lora->weight(), 0.5);
  EXPECT_EQ(lora->start(), 0.25);
  EXPECT_EQ(lora->end(), 1);
  EXPECT_EQ(lora->block_weights().at("transformer.proj_out"), 0);
  EXPECT_EQ(lora->block_weights().at("text_encoder"), -2);
  EXPECT_EQ(LoraText(*lora), "a/night:0.5@0.25-1,text_encoder=-2,transformer.proj_out=0");
  const auto limited = ParseLora("night:2,only=unet+text_encoder,unet.conv_in=3");
  ASSERT_TRUE(limited.ok()) << limited.status();
  EXPECT_EQ(limited->name(), "night");
  ASSERT_EQ(limited->only_size(), 2);
  EXPECT_EQ(limited->only(1), "text_encoder");
  EXPECT_EQ(LoraText(*limited), "night:2,only=unet+text_encoder,unet.conv_in=3");
  for (const char* bad : {"a@x-1", "a,=1", "a,b=x", "@0-1"}) {
    EXPECT_EQ(ErrorReason(ParseLora(bad).status()), "USAGE") << bad;
  }
}

TEST(CtlText, ALorasNameMayHaveTheSignsThatFollowIt) {
  EXPECT_EQ(ParseLora("a, b (c) @home")->name(), "a, b (c) @home");
  const auto lora = ParseLora("a, b@2:0.5@0-0.5,x=2");
  ASSERT_TRUE(lora.ok()) << lora.status();
  EXPECT_EQ(lora->name(), "a, b@2");
  EXPECT_EQ(lora->weight(), 0.5);
  EXPECT_EQ(lora->end(), 0.5);
  EXPECT_EQ(lora->block_weights().at("x"), 2);
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

}  // namespace
}  // namespace latentd::ctl
