#include "server/media/picture_record.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include "cache/base/error.h"

namespace latentd {
namespace {

using google::protobuf::util::MessageDifferencer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::PictureRecord Full() {
  v1::PictureRecord record;
  record.set_version(kRecordVersion);
  record.set_model("sd/m");
  record.set_model_id("m@1");
  auto& lora = *record.add_loras();
  lora.set_id("lora/a@2");
  lora.mutable_lora()->set_name("styles/a");
  lora.mutable_lora()->set_weight(1.0 / 3);
  for (const char* block : {"z", "b", "q", "a", "unet.mid"})
    (*lora.mutable_lora()->mutable_block_weights())[block] = 0.1;
  record.set_patch_mode(v1::PATCH_MODE_SIDECAR);
  auto& embedding = *record.add_embeddings();
  embedding.set_name("cat");
  embedding.set_id("embedding/cat@3");
  v1::GenerateParams& params = *record.mutable_params();
  params.set_prompt("夜, <cat>");
  params.set_negative_prompt("a: b");
  params.set_width(64);
  params.set_height(72);
  params.set_steps(3);
  params.set_guidance(0.1 + 0.2);
  params.set_sampler("dpmpp_sde");
  params.set_schedule("exponential");
  params.set_seed(~uint64_t{0});
  params.mutable_init_image()->set_strength(0.7);
  record.set_init_image_sha256("ab");
  return record;
}

std::string FileOf(const PictureNotes& notes) { return *EncodePng(std::vector<uint8_t>(12), 2, 2, notes); }

TEST(PictureRecord, ComesBackFromAFile) {
  const v1::PictureRecord record = Full();
  const auto back = RecordOfFile(FileOf(NotesOf(record)));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(MessageDifferencer::Equals(*back, record)) << back->DebugString();
  EXPECT_THAT(DifferencesOf(*back, record), ElementsAre());
  const v1::GenerateRequest request = RequestOf(*back);
  EXPECT_EQ(request.model(), "sd/m");
  EXPECT_EQ(request.loras(0).block_weights_size(), 5);
  EXPECT_EQ(request.patch_mode(), v1::PATCH_MODE_SIDECAR);
  EXPECT_TRUE(request.params().picture_metadata());
  EXPECT_EQ(request.params().guidance(), 0.1 + 0.2);
}

// A map's order is nobody's to rely on.
TEST(PictureRecord, MapsAreWrittenInOrder) {
  EXPECT_THAT(NotesOf(Full()).record,
              HasSubstr(R"("block_weights":{"a":0.1,"b":0.1,"q":0.1,"unet.mid":0.1,"z":0.1})"));
  const std::string once = NotesOf(Full()).record;
  for (int i = 0; i < 20; ++i) EXPECT_EQ(NotesOf(Full()).record, once);
}

TEST(PictureRecord, IsWrittenAsA1111WritesIt) {
  EXPECT_EQ(
      NotesOf(Full()).parameters,
      "夜, <cat> <lora:a:0.333333>\nNegative prompt: a: b\nSteps: 3, Sampler: DPM++ SDE, Schedule type: "
      "Exponential, CFG scale: 0.3, Seed: 18446744073709551615, Size: 64x72, Model: m, Denoising strength: "
      "0.7");
  v1::PictureRecord record;
  record.set_model("a, \"b\"");
  EXPECT_THAT(NotesOf(record).parameters, HasSubstr(R"(Model: "a, \"b\"")"));
}

TEST(PictureRecord, DifferencesAreNamedByTheirPath) {
  v1::PictureRecord other = Full();
  other.mutable_loras(0)->set_id("lora/a@9");
  other.mutable_params()->set_steps(4);
  other.mutable_params()->clear_schedule();
  other.set_model_id("m@5");
  EXPECT_THAT(DifferencesOf(Full(), other),
              ElementsAre("loras.styles/a.id", "model_id", "params.schedule", "params.steps"));
}

TEST(PictureRecord, WhatIsNoneIsRefused) {
  EXPECT_EQ(ErrorReason(RecordOfFile(FileOf({})).status()), "NO_RECORD");
  EXPECT_EQ(ErrorReason(RecordOfFile("").status()), "NO_RECORD");
  for (const char* text : {"{", "[]", "{}", R"({"version":2})", R"({"version":1,"later":true})", "null",
                           R"({"version":1,"params":{"steps":"x"}})"}) {
    EXPECT_EQ(ErrorReason(RecordOfFile(FileOf({.record = text, .parameters = ""})).status()), "BAD_RECORD")
        << text;
  }
  EXPECT_FALSE(RecordOfFile(FileOf({.record = std::string(100000, '['), .parameters = ""})).ok());
}

TEST(PictureRecord, KnowsWhichPicturesAreToBeGivenAgain) {
  v1::PictureRecord record = Full();
  record.set_init_latents_sha256("cd");
  const auto inputs = InputsOf(record);
  ASSERT_EQ(inputs.size(), 2u);
  EXPECT_EQ(inputs[0].flag, "--image");
  EXPECT_EQ(inputs[1].flag, "--latents");
  EXPECT_EQ(inputs[1].sha256, "cd");
}

}  // namespace
}  // namespace latentd
