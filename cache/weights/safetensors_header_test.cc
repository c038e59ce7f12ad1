#include "cache/weights/safetensors_header.h"

#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

std::string File(const std::string& json, size_t data_bytes) {
  std::string file(8, '\0');
  const uint64_t length = json.size();
  std::memcpy(file.data(), &length, 8);
  return file + json + std::string(data_bytes, '\1');
}

absl::StatusOr<SafetensorsHeader> Parse(const std::string& file) {
  return ParseSafetensorsHeader(file, static_cast<int64_t>(file.size()));
}

TEST(SafetensorsHeader, NamesShapesAndOffsetsAreRead) {
  auto header =
      Parse(File(R"({"__metadata__":{"k":"v"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
                 R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})",
                 16));
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_EQ(header->tensors[0].name, "a");
  EXPECT_EQ(header->tensors[1].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(header->tensors[1].bytes, 12);
  EXPECT_EQ(header->tensors[1].offset - header->tensors[0].offset, 4);
  EXPECT_EQ(header->metadata.at("k"), "v");
}

// The config that diffusers writes names every module of a large model.
TEST(SafetensorsHeader, TheConfigOfAnAdapterIsKeptInFull) {
  const std::string config = "{\\\"unet.target_modules\\\": [" + std::string(100'000, '7') + "]}";
  auto header = Parse(File(R"({"__metadata__":{"lora_adapter_metadata":")" + config + R"("}})", 0));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->metadata.at("lora_adapter_metadata").size(), config.size() - 2);
}

TEST(SafetensorsHeader, AFileThatIsCutShortSaysByHowMuch) {
  const std::string file = File(R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})", 16);
  const auto header = Parse(file.substr(0, file.size() - 5));
  EXPECT_EQ(ErrorReason(header.status()), "CORRUPT_FILE");
  EXPECT_NE(header.status().message().find("cut short: these bytes end 5 bytes behind its end"),
            std::string::npos)
      << header.status();
}

// The types of the safetensors library 0.8; of less than a byte, only whole bytes make a tensor.
TEST(SafetensorsHeader, AllTypesThereAreMayStandInAFile) {
  for (const char* type : {"U16", "F16", "I16", "BF16"}) {
    EXPECT_TRUE(
        Parse(File(absl::StrCat(R"({"a":{"dtype":")", type, R"(","shape":[3],"data_offsets":[0,6]}})"), 6))
            .ok())
        << type;
  }
  EXPECT_TRUE(Parse(File(R"({"a":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}})", 3)).ok());
  EXPECT_TRUE(Parse(File(R"({"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}})", 3)).ok());
  EXPECT_TRUE(Parse(File(R"({"a":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}})", 8)).ok());
  EXPECT_FALSE(Parse(File(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2)).ok());
  EXPECT_FALSE(Parse(File(R"({"a":{"dtype":"F3","shape":[8],"data_offsets":[0,3]}})", 3)).ok());
}

TEST(SafetensorsHeader, AnEmptyTensorHasNoBytes) {
  EXPECT_TRUE(Parse(File(R"({"a":{"dtype":"F32","shape":[0,4],"data_offsets":[0,0]}})", 0)).ok());
}

TEST(SafetensorsHeader, WhatElseATensorHasIsSkipped) {
  EXPECT_TRUE(
      Parse(
          File(R"({"a":{"note":"x","list":[1,"y",{"z":-1}],"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
               4))
          .ok());
}

TEST(SafetensorsHeader, LongTextsOfMetadataAreCutBetweenCharacters) {
  std::string text = "x";
  for (int i = 0; i < 5000; ++i) text += "\u00e9";
  auto header = Parse(File("{\"__metadata__\":{\"k\":\"" + text + "\"}}", 0));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->metadata.at("k"), text.substr(0, 4095));
}

struct Lie {
  const char* what;
  std::string file;
};

class LyingHeader : public testing::TestWithParam<Lie> {};

TEST_P(LyingHeader, IsCorrupt) {
  auto header = Parse(GetParam().file);
  ASSERT_FALSE(header.ok());
  EXPECT_EQ(header.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ErrorReason(header.status()), "CORRUPT_FILE");
}

std::string One(const std::string& fields, size_t data) { return File("{\"a\":{" + fields + "}}", data); }

INSTANTIATE_TEST_SUITE_P(
    All, LyingHeader,
    testing::Values(
        Lie{"empty", ""}, Lie{"seven bytes", "1234567"}, Lie{"length 2^64-1", std::string(8, '\xff')},
        Lie{"length 2^63", std::string(7, '\0') + '\x80'}, Lie{"no json", File("{{", 0)},
        Lie{"an array", File("[]", 0)}, Lie{"nested", File(std::string(100000, '['), 0)},
        Lie{"no dtype", One(R"("shape":[1],"data_offsets":[0,4])", 4)},
        Lie{"unknown dtype", One(R"("dtype":"F3","shape":[1],"data_offsets":[0,4])", 4)},
        Lie{"shape too small", One(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])", 8)},
        Lie{"overflow",
            One(R"("dtype":"F32","shape":[4611686018427387904,4611686018427387904],"data_offsets":[0,4])",
                4)},
        Lie{"overflow behind a zero",
            One(R"("dtype":"F32","shape":[0,4611686018427387904,4611686018427387904],"data_offsets":[0,0])",
                0)},
        Lie{"overflow before a zero",
            One(R"("dtype":"F32","shape":[4611686018427387904,4611686018427387904,0],"data_offsets":[0,0])",
                0)},
        Lie{"shape of shapes", One(R"("dtype":"F32","shape":[[1]],"data_offsets":[0,4])", 4)},
        Lie{"shape is an object", One(R"("dtype":"F32","shape":{},"data_offsets":[0,4])", 4)},
        Lie{"shape is a number", One(R"("dtype":"F32","shape":1,"data_offsets":[0,4])", 4)},
        Lie{"shape of text", One(R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])", 4)},
        Lie{"shape is null", One(R"("dtype":"F32","shape":null,"data_offsets":[0,4])", 4)},
        Lie{"dtype is a number", One(R"("dtype":1,"shape":[1],"data_offsets":[0,4])", 4)},
        Lie{"dtype is a list", One(R"("dtype":["F32"],"shape":[1],"data_offsets":[0,4])", 4)},
        Lie{"three offsets", One(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,4])", 4)},
        Lie{"one offset", One(R"("dtype":"F32","shape":[1],"data_offsets":[4])", 4)},
        Lie{"offset of 2^63", One(R"("dtype":"F32","shape":[1],"data_offsets":[0,9223372036854775808])", 4)},
        Lie{"a tensor is a number", File(R"({"a":1})", 0)}, Lie{"a tensor is null", File(R"({"a":null})", 0)},
        Lie{"a tensor is a list", File(R"({"a":[1]})", 0)}, Lie{"text", File(R"("a")", 0)},
        Lie{"number", File("1", 0)}, Lie{"metadata is a list", File(R"({"__metadata__":["k"]})", 0)},
        Lie{"metadata is text", File(R"({"__metadata__":"k"})", 0)},
        Lie{"metadata nests", File(R"({"__metadata__":{"k":{"l":"m"}}})", 0)},
        Lie{"dtype twice", One(R"("dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4])", 4)},
        Lie{"deep in what is skipped",
            One(R"("x":[[[1]]],"dtype":"F32","shape":[1],"data_offsets":[0,4])", 4)},
        Lie{"negative", One(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])", 4)},
        Lie{"float size", One(R"("dtype":"F32","shape":[1e308],"data_offsets":[0,4])", 4)},
        Lie{"17 dimensions",
            One(R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1])", 1)},
        Lie{"reversed", One(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])", 4)},
        Lie{"past the end", One(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])", 4)},
        Lie{"bytes left over", One(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])", 8)},
        Lie{"gap", One(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])", 8)},
        Lie{"overlap",
            File(
                R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                4)},
        Lie{"twice",
            File(
                R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                4)},
        Lie{"NUL in a name",
            File("{\"a\\u0000b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4)},
        Lie{"metadata of another kind", File(R"({"__metadata__":{"k":1}})", 0)}),
    [](const auto& info) { return "Case" + std::to_string(info.index); });

TEST(SafetensorsHeader, RandomlyDamagedHeadersNeverCrash) {
  const std::string good = File(
      R"({"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}})",
      19);
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    std::string bad = good;
    for (int k = 0; k < 3; ++k) bad[random() % bad.size()] = static_cast<char>(random());
    if (random() % 4 == 0) bad.resize(random() % bad.size());
    auto header = Parse(bad);
    if (!header.ok()) continue;
    for (const TensorInfo& t : header->tensors)
      EXPECT_LE(t.offset + t.bytes, static_cast<int64_t>(bad.size()));
  }
}

}  // namespace
}  // namespace latentd
