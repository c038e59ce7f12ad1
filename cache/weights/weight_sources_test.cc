// What of a file is a weight, what is beside a network, and what cannot be read. The layouts of marks are
// ComfyUI's (comfy/ops.py, QUANTIZATION.md) and bitsandbytes'.
#include "cache/weights/weight_sources.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

struct Tensor {
  std::string name, dtype, shape, bytes;
};

template <typename T>
std::string BytesOf(std::initializer_list<T> values) {
  return std::string(reinterpret_cast<const char*>(values.begin()), sizeof(T) * values.size());
}

class WeightSourcesTest : public testing::Test {
 protected:
  WeightSourcesTest() { layout_->Add("a.weight", {2}); }
  ~WeightSourcesTest() override { std::filesystem::remove(path_); }

  std::shared_ptr<const WeightFiles> Open(std::vector<Tensor> tensors, const std::string& metadata = "") {
    std::string header, data;
    for (const Tensor& t : tensors) {
      absl::StrAppend(&header, header.empty() && metadata.empty() ? "" : ",", "\"", t.name,
                      "\":{\"dtype\":\"", t.dtype, "\",\"shape\":[", t.shape, "],\"data_offsets\":[",
                      data.size(), ",", data.size() + t.bytes.size(), "]}");
      data += t.bytes;
    }
    header = absl::StrCat("{", metadata, header, "}");
    while (header.size() % 8 != 0) header += ' ';
    const uint64_t length = header.size();
    std::ofstream out(path_, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), 8);
    out << header << data;
    out.close();
    auto files = WeightFiles::Open(path_);
    EXPECT_TRUE(files.ok()) << files.status();
    return files.ok() ? *files : nullptr;
  }
  absl::Status Check(std::vector<Tensor> tensors, const std::string& metadata = "") {
    return CheckWeights(*Open(std::move(tensors), metadata), *layout_, nullptr, "");
  }

  const std::string path_ = absl::StrCat(testing::TempDir(), "/weight_sources.", getpid(), ".safetensors");
  const std::shared_ptr<ComponentLayout> layout_ = std::make_shared<ComponentLayout>();
  const Tensor a_{"a.weight", "F32", "2", BytesOf({1.f, 2.f})};
  const std::string f32_ = BytesOf({1.f});
};

TEST_F(WeightSourcesTest, WhatIsNoneOfANetworksEndsNoLoad) {
  const auto files = Open({a_,
                           {"loss.logvar", "F32", "1", f32_},
                           {"model_ema.decay", "F32", "1", f32_},
                           {"text_projection.weight", "F32", "1", f32_},
                           {"vision_model.x.weight", "F32", "1", f32_},
                           {"decoder.block.0.w", "F32", "1", f32_},
                           {"a.counter", "I64", "1", BytesOf({int64_t{1}})},
                           {"b.packed", "F4", "2", "x"},
                           {"c", "F8_E8M0", "1", "x"},
                           {"position_ids", "I64", "1", BytesOf({int64_t{1}})}});
  EXPECT_TRUE(CheckWeights(*files, *layout_, nullptr, "").ok());
  const WeightSources sources = FindWeightSources(*files, *layout_, nullptr, "");
  EXPECT_THAT(sources.extra,
              ElementsAre("a.counter", "b.packed", "c", "decoder.block.0.w", "loss.logvar", "model_ema.decay",
                          "text_projection.weight", "vision_model.x.weight"));
  EXPECT_THAT(sources.known, ElementsAre("position_ids"));
  EXPECT_THAT(TensorsOf(*files, *layout_, nullptr, ""), ElementsAre("position_ids", "a.weight"));
}

TEST_F(WeightSourcesTest, AnUnknownPartOfTheNetworkIsNamed) {
  EXPECT_THAT(std::string(Check({a_, {"a.gate", "F32", "1", f32_}}).message()),
              HasSubstr("not known to this architecture: a.gate"));
  // A VAE has a decoder: what is in there and is not known is no other model's.
  layout_->Add("decoder.conv.weight", {1});
  EXPECT_EQ(ErrorReason(Check(
                {a_, {"decoder.conv.weight", "F32", "1", f32_}, {"decoder.new.weight", "F32", "1", f32_}})),
            "WEIGHTS_MISMATCH");
}

TEST_F(WeightSourcesTest, NumbersOf64BitsAreReadAs32) {
  const auto files = Open({{"a.weight", "F64", "2", BytesOf({0.5, 3.0})}});
  EXPECT_EQ(WeightBytes(*files, *layout_, nullptr, ""), 8);
  const LoadContext context([] { return false; }, [](int64_t, int64_t) {});
  const auto set = LoadWeights(files, layout_, nullptr, "", context);
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ((*set)->bytes(), 8);
  const float* numbers = static_cast<const float*>((**set)[Slot{0}].data.const_data_ptr());
  EXPECT_EQ(numbers[0], 0.5f);
  EXPECT_EQ(numbers[1], 3.f);
}

TEST_F(WeightSourcesTest, ComfyUisMarksAreReadOrRefusedByName) {
  const Tensor fp8{"a.weight", "F8_E4M3", "2", "88"}, scale{"a.weight_scale", "F32", "", f32_};
  const auto mark = [](const std::string& text) {
    return Tensor{"a.comfy_quant", "U8", absl::StrCat(text.size()), text};
  };
  EXPECT_TRUE(Check({fp8, scale, mark(R"({"format": "float8_e4m3fn"})")}).ok());
  EXPECT_TRUE(Check({fp8, scale, {"a.input_scale", "F32", "", f32_}}).ok());
  EXPECT_THAT(std::string(Check({fp8, scale, mark(R"({"format": "nvfp4"})")}).message()),
              HasSubstr("ComfyUI's nvfp4"));
  EXPECT_EQ(ErrorReason(Check({fp8, scale, mark("{}")})), "UNSUPPORTED_MODEL");
  EXPECT_EQ(ErrorReason(Check({fp8, scale, mark("no json")})), "UNSUPPORTED_MODEL");
  const auto metadata = [](const std::string& format) {
    return absl::StrCat(R"("__metadata__":{"_quantization_metadata":"{\"layers\": {\"a\": {\"format\": \")",
                        format, R"(\"}, \"other\": {\"format\": \"mxfp8\"}}}"})");
  };
  EXPECT_TRUE(Check({fp8, scale}, metadata("float8_e4m3fn")).ok());
  EXPECT_THAT(std::string(Check({fp8, scale}, metadata("mxfp8")).message()), HasSubstr("ComfyUI's mxfp8"));
  EXPECT_EQ(ErrorReason(Check({fp8, {"a.weight_scale", "F32", "2", f32_ + f32_}})), "UNSUPPORTED_DTYPE");
}

TEST_F(WeightSourcesTest, OtherQuantisationsAreNamed) {
  const Tensor packed{"a.weight", "U8", "1", "x"};
  EXPECT_THAT(
      std::string(Check({packed, {"a.weight.quant_state.bitsandbytes__nf4", "U8", "1", "x"}}).message()),
      HasSubstr("bitsandbytes' NF4, which is not read; use the model in bf16"));
  EXPECT_THAT(std::string(Check({{"a.qweight", "I32", "1", f32_}, {"a.qzeros", "I32", "1", f32_}}).message()),
              HasSubstr("GPTQ or AWQ"));
  EXPECT_THAT(std::string(Check({{"a.qweight", "I8", "1", "x"}, {"a.wscales", "F32", "1", f32_}}).message()),
              HasSubstr("SVDQuant"));
  EXPECT_EQ(ErrorReason(Check({packed})), "UNSUPPORTED_DTYPE");
}

}  // namespace
}  // namespace latentd
