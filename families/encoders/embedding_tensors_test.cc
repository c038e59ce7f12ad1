// Which textual inversions there are in a file, by the names of its tensors.
#include "families/encoders/embedding_tensors.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "families/encoders/text_embedding.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A tensor of that shape whose numbers are all `value`.
struct Entry {
  std::string name;
  std::vector<int64_t> shape;
  float value = 0.5f;
  std::string dtype = "F32";
};

template <typename Number>
void Append(std::string& data, int64_t count, Number value) {
  for (int64_t i = 0; i < count; ++i) data.append(reinterpret_cast<const char*>(&value), sizeof value);
}

class EmbeddingTensorsTest : public testing::Test {
 protected:
  EmbeddingTensorsTest()
      : path_(absl::StrCat(testing::TempDir(), "/inversions-", getpid(), ".safetensors")) {}
  ~EmbeddingTensorsTest() override { std::filesystem::remove(path_); }

  std::shared_ptr<const WeightFiles> Open(const std::vector<Entry>& entries) {
    std::string data;
    std::vector<std::string> fields;
    for (const Entry& e : entries) {
      int64_t count = 1;
      for (int64_t extent : e.shape) count *= extent;
      const size_t begin = data.size();
      if (e.dtype == "F32") Append(data, count, e.value);
      if (e.dtype == "F64") Append(data, count, static_cast<double>(e.value));
      if (e.dtype == "I64") Append(data, count, static_cast<int64_t>(e.value));
      if (e.dtype == "F8_E4M3") Append<uint8_t>(data, count, 0x3C);  // 1.5
      if (e.dtype == "F8_E5M2") Append<uint8_t>(data, count, 0x3E);  // 1.5
      fields.push_back(absl::StrCat("\"", e.name, "\":{\"dtype\":\"", e.dtype, "\",\"shape\":[",
                                    absl::StrJoin(e.shape, ","), "],\"data_offsets\":[", begin, ",",
                                    data.size(), "]}"));
    }
    const std::string header = absl::StrCat("{", absl::StrJoin(fields, ","), "}");
    const uint64_t length = header.size();
    std::string file(sizeof length, 0);
    std::memcpy(file.data(), &length, sizeof length);
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << file << header << data;
    return *WeightFiles::Open(path_);
  }

  // "name: tensors of clip_l | tensors of clip_g" of each.
  static std::vector<std::string> Texts(const std::vector<EmbeddingTensors>& found) {
    std::vector<std::string> texts;
    for (const EmbeddingTensors& e : found) {
      texts.push_back(
          absl::StrCat(e.name, ": ", absl::StrJoin(e.clip_l, " "), " | ", absl::StrJoin(e.clip_g, " ")));
    }
    return texts;
  }
  std::vector<std::string> Of(const std::vector<Entry>& entries) {
    return Texts(*EmbeddingsOf(*Open(entries)));
  }

  const std::string path_;
};

TEST_F(EmbeddingTensorsTest, AFileOfOneHasNoOtherName) {
  EXPECT_THAT(Of({{"emb_params", {3, 8}}}), ElementsAre(": emb_params | "));
  EXPECT_THAT(Of({{"string_to_param.*", {3, 8}}, {"string_to_token.*", {}, 265, "I64"}}),
              ElementsAre(": string_to_param.* | "));
  EXPECT_THAT(Of({{"clip_g", {2, 8}}, {"clip_l", {2, 8}}}), ElementsAre(": clip_l | clip_g"));
}

TEST_F(EmbeddingTensorsTest, SeveralTokensOfAFileAreOneEach) {
  EXPECT_THAT(Of({{"<dog>", {2, 8}}, {"<cat>", {8}}, {"owl", {1, 8}}}),
              ElementsAre("cat: <cat> | ", "dog: <dog> | ", "owl: owl | "));
  EXPECT_THAT(Of({{"string_to_param.a", {2, 8}}, {"string_to_param.b", {8}}}),
              ElementsAre("a: string_to_param.a | ", "b: string_to_param.b | "));
  EXPECT_THAT(Of({{"cat.clip_l", {2, 8}}, {"cat.clip_g", {2, 4}}, {"dog.clip_l", {8}}}),
              ElementsAre("cat: cat.clip_l | cat.clip_g", "dog: dog.clip_l | "));
}

TEST_F(EmbeddingTensorsTest, NumberedTokensOfOneVectorAreOne) {
  const std::vector<Entry> cat = {{"<cat>", {8}, 1}, {"<cat>_1", {1, 8}, 2}, {"<cat>_2", {8}, 3}};
  EXPECT_THAT(Of(cat), ElementsAre(": <cat> <cat>_1 <cat>_2 | "));
  const auto files = Open(cat);
  const auto embedding = TextEmbedding::Load(files, EmbeddingsOf(*files)->at(0),
                                             LoadContext([] { return false; }, [](int64_t, int64_t) {}));
  ASSERT_TRUE(embedding.ok()) << embedding.status();
  EXPECT_EQ((*embedding)->shape().tokens, 3);
  EXPECT_TRUE(
      at::equal((*embedding)->vectors(EmbeddingEncoder::kClipL).select(1, 0), at::tensor({1.f, 2.f, 3.f})));
  // A gap, and what has vectors of its own, are others.
  EXPECT_THAT(Of({{"a", {8}}, {"a_2", {8}}, {"b", {2, 8}}, {"b_1", {8}}}),
              ElementsAre("a: a | ", "a_2: a_2 | ", "b: b | ", "b_1: b_1 | "));
}

TEST_F(EmbeddingTensorsTest, WhatALoraBringsIsFoundByItsName) {
  const std::vector<Entry> file = {{"bundle_emb.sks.string_to_param.*", {2, 8}},
                                   {"bundle_emb.tok.clip_l", {4, 8}},
                                   {"bundle_emb.tok.clip_g", {4, 4}},
                                   {"bundle_emb.old.emb_params", {8}},
                                   {"bundle_emb.far.t5", {2, 16}},
                                   {"lora_unet_a.lora_down.weight", {2, 8}}};
  EXPECT_THAT(Texts(BundledEmbeddings(*Open(file))),
              ElementsAre("old: bundle_emb.old.emb_params | ", "sks: bundle_emb.sks.string_to_param.* | ",
                          "tok: bundle_emb.tok.clip_l | bundle_emb.tok.clip_g"));
}

TEST_F(EmbeddingTensorsTest, DoublesAndEightBitFloatsAreRead) {
  for (const std::string dtype : {"F64", "F8_E4M3", "F8_E5M2"}) {
    const auto files = Open({{"x", {2, 8}, 1.5f, dtype}});
    const auto embedding = TextEmbedding::Load(files, EmbeddingsOf(*files)->at(0),
                                               LoadContext([] { return false; }, [](int64_t, int64_t) {}));
    ASSERT_TRUE(embedding.ok()) << dtype << ": " << embedding.status();
    EXPECT_TRUE(at::equal((*embedding)->vectors(EmbeddingEncoder::kClipL), at::full({2, 8}, 1.5f))) << dtype;
  }
}

TEST_F(EmbeddingTensorsTest, WhatIsNoneIsRefused) {
  std::vector<Entry> many;
  for (size_t i = 0; i <= kMaxEmbeddingsOfAFile; ++i) many.push_back({absl::StrCat("t", i), {1}});
  for (const std::vector<Entry>& file : {std::vector<Entry>{},
                                         {{"clip_l", {8}}, {"other", {8}}},
                                         {{"clip_l", {8}}, {"text_encoders_1", {8}}},
                                         many}) {
    EXPECT_EQ(ErrorReason(EmbeddingsOf(*Open(file)).status()), "INVALID_EMBEDDING");
  }
  // Vectors of one name that do not fit each other.
  const auto files = Open({{"a", {8}}, {"a_1", {4}}});
  EXPECT_THAT(std::string(TextEmbedding::Describe(*files, EmbeddingsOf(*files)->at(0)).status().message()),
              HasSubstr("a_1 has 4 columns"));
}

}  // namespace
}  // namespace latentd
