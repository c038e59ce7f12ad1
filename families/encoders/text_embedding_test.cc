// Textual inversion files, good ones and as an attacker would make them.
#include "families/encoders/text_embedding.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "families/prompt/embedding_triggers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::HasSubstr;

struct Entry {
  std::string name;
  std::vector<int64_t> shape;
  std::string dtype = "F32";
  std::string data;
};

Entry Floats(const std::string& name, std::vector<int64_t> shape, float value = 0.5f) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  Entry entry{.name = name, .shape = std::move(shape), .data = {}};
  for (int64_t i = 0; i < count; ++i) entry.data.append(reinterpret_cast<const char*>(&value), sizeof value);
  return entry;
}

Entry Halves(const std::string& name, std::vector<int64_t> shape, const std::string& dtype, uint16_t bits) {
  Entry entry = Floats(name, std::move(shape));
  std::string data;
  for (size_t i = 0; i < entry.data.size() / sizeof(float); ++i)
    data.append(reinterpret_cast<const char*>(&bits), sizeof bits);
  entry.dtype = dtype;
  entry.data = data;
  return entry;
}

class TextEmbeddingTest : public testing::Test {
 protected:
  TextEmbeddingTest() : path_(absl::StrCat(testing::TempDir(), "/embedding-", getpid(), ".safetensors")) {}
  ~TextEmbeddingTest() override { std::filesystem::remove(path_); }

  static std::string File(const std::vector<Entry>& entries) {
    std::string data;
    std::vector<std::string> fields;
    for (const Entry& e : entries) {
      const size_t begin = data.size();
      data += e.data;
      fields.push_back(absl::StrCat("\"", e.name, "\":{\"dtype\":\"", e.dtype, "\",\"shape\":[",
                                    absl::StrJoin(e.shape, ","), "],\"data_offsets\":[", begin, ",",
                                    data.size(), "]}"));
    }
    const std::string header = absl::StrCat("{", absl::StrJoin(fields, ","), "}");
    const uint64_t length = header.size();
    std::string file(sizeof length, 0);
    std::memcpy(file.data(), &length, sizeof length);
    return file + header + data;
  }

  absl::StatusOr<std::shared_ptr<const TextEmbedding>> Load(const std::string& file) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << file;
    ASSIGN_OR_RETURN(const auto files, WeightFiles::Open(path_));
    ASSIGN_OR_RETURN(const std::vector<EmbeddingTensors> found, EmbeddingsOf(*files));
    EXPECT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].name, "");
    ASSIGN_OR_RETURN(const TextEmbeddingShape shape, TextEmbedding::Describe(*files, found[0]));
    auto embedding =
        TextEmbedding::Load(files, found[0], LoadContext([] { return false; }, [](int64_t, int64_t) {}));
    if (embedding.ok()) {
      EXPECT_EQ((*embedding)->shape().ToString(), shape.ToString());
      EXPECT_EQ((*embedding)->bytes(), shape.bytes());
    }
    return embedding;
  }
  absl::StatusOr<std::shared_ptr<const TextEmbedding>> Load(const std::vector<Entry>& entries) {
    return Load(File(entries));
  }

  const std::string path_;
};

TEST_F(TextEmbeddingTest, LayoutsAreToldByTheirNames) {
  struct Case {
    std::vector<Entry> entries;
    int64_t tokens;
    std::string shape, family;
  };
  for (const Case& c : std::vector<Case>{
           {{Floats("emb_params", {3, 768})}, 3, "clip_l 768", "SD 1.x"},
           {{Floats("<my-cat>", {768})}, 1, "clip_l 768", "SD 1.x"},
           {{Floats("*", {75, 1024})}, 75, "clip_l 1024", "SD 2.x"},
           {{Floats("clip_g", {2, 1280}), Floats("clip_l", {2, 768})}, 2, "clip_l 768, clip_g 1280", "SDXL"},
           {{Floats("text_encoders_0", {2, 768}), Floats("text_encoders_1", {2, 1280})},
            2,
            "clip_l 768, clip_g 1280",
            "SDXL"},
           {{Floats("clip_g", {1, 1280})}, 1, "clip_g 1280", "SDXL"},
           {{Floats("text_encoders_0", {24})}, 1, "clip_l 24", ""},
           {{Floats("clip_l", {4, 24}), Floats("clip_g", {4, 40})}, 4, "clip_l 24, clip_g 40", ""},
       }) {
    const auto embedding = Load(c.entries);
    ASSERT_TRUE(embedding.ok()) << c.entries[0].name << ": " << embedding.status();
    const TextEmbeddingShape& shape = (*embedding)->shape();
    EXPECT_EQ(shape.tokens, c.tokens);
    EXPECT_EQ(shape.ToString(), c.shape);
    EXPECT_EQ(shape.family(), c.family);
    for (const EmbeddingEncoder encoder : {EmbeddingEncoder::kClipL, EmbeddingEncoder::kClipG}) {
      const at::Tensor& vectors = (*embedding)->vectors(encoder);
      ASSERT_EQ(vectors.defined(), shape.columns(encoder) > 0);
      if (!vectors.defined()) continue;
      EXPECT_EQ(vectors.sizes().vec(), (std::vector{c.tokens, shape.columns(encoder)}));
    }
  }
}

TEST_F(TextEmbeddingTest, HalvesAreWidenedExactly) {
  for (const auto& [dtype, bits] : {std::pair<std::string, uint16_t>{"F16", 0x3E00}, {"BF16", 0x3FC0}}) {
    const auto embedding = Load({Halves("x", {2, 4}, dtype, bits)});
    ASSERT_TRUE(embedding.ok()) << embedding.status();
    EXPECT_TRUE(at::equal((*embedding)->vectors(EmbeddingEncoder::kClipL), at::full({2, 4}, 1.5f))) << dtype;
    EXPECT_EQ((*embedding)->bytes(), 32);
  }
}

TEST_F(TextEmbeddingTest, WhatIsNoEmbeddingIsRefusedWithAReason) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  Entry almost = Floats("x", {2, 8});
  const float nan = NAN;
  std::memcpy(almost.data.data() + almost.data.size() - sizeof nan, &nan, sizeof nan);
  Entry numbers = Floats("x", {2, 8});
  numbers.dtype = "I32";
  struct Case {
    std::vector<Entry> entries;
    std::string message;
  };
  for (const Case& c : std::vector<Case>{
           {{almost}, "not finite"},
           {{Floats("clip_l", {1, 8}), Floats("clip_g", {1, 8}, kInf)},
            "clip_g holds a value that is not finite"},
           {{Halves("x", {1, 8}, "F16", 0x7C00)}, "not finite"},
           {{numbers}, "holds I32"},
           {{Floats("x", {0, 8})}, "0 vectors"},
           {{Floats("x", {8, 0})}, "0 columns"},
           {{Floats("x", {0})}, "0 columns"},
           {{Floats("x", {})}, "0 dimensions"},
           {{Floats("x", {1, 2, 8})}, "3 dimensions"},
           {{Floats("x", {76, 8})}, "76 vectors"},
           {{Floats("x", {1, (1 << 16) + 1})}, "columns"},
           {{}, "it has 0 tensors"},
           {{Floats("a", {1, 8}), Floats("clip_l", {1, 8})}, "it has 2 tensors (a, clip_l)"},
           {{Floats("clip_l", {1, 8}), Floats("text_encoders_1", {1, 8})}, "2 tensors"},
           {{Floats("clip_l", {1, 8}), Floats("clip_g", {1, 8}), Floats("clip_l_out", {1, 8})}, "3 tensors"},
           {{Floats("clip_l", {1, 8}), Floats("clip_g", {2, 8})}, "where the other encoder has 1"},
       }) {
    const auto status = Load(c.entries).status();
    EXPECT_EQ(ErrorReason(status), "INVALID_EMBEDDING") << c.message << ": " << status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
  }
  std::vector<Entry> many;
  for (int i = 0; i < 500; ++i) many.push_back(Floats(absl::StrCat(std::string(5000, 'x'), i), {1}));
  EXPECT_LT(Load(many).status().message().size(), 1000u);
}

TEST_F(TextEmbeddingTest, BrokenFilesArePicklesOrCorrupt) {
  const std::string good = File({Floats("x", {2, 8})});
  for (size_t size : {size_t{0}, size_t{7}, size_t{8}, size_t{30}, good.size() - 1}) {
    EXPECT_EQ(ErrorReason(Load(good.substr(0, size)).status()), "CORRUPT_FILE") << size;
  }
  EXPECT_EQ(ErrorReason(Load(good + "x").status()), "CORRUPT_FILE");
  std::string giant = good;
  giant[5] = 1;  // a header of a terabyte
  EXPECT_EQ(ErrorReason(Load(giant).status()), "CORRUPT_FILE");
  EXPECT_EQ(ErrorReason(Load(std::string("\x80\x02}q\x00X\x01\x00\x00\x00*", 12)).status()), "UNSAFE_FILE");
  EXPECT_EQ(ErrorReason(Load(std::string("PK\x03\x04") + std::string(64, 'x')).status()), "UNSAFE_FILE");
}

}  // namespace
}  // namespace latentd
