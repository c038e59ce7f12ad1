// The strength of layers by the header of their file, as peft reads its configs.
#include "patcher/adapter_config.h"

#include <cmath>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "patcher/model_patch.h"
#include "patcher/module_pattern.h"

namespace latentd {
namespace {

using testing::HasSubstr;
using Tensors = std::map<std::string, at::Tensor>;
using Metadata = std::map<std::string, std::string>;

Metadata Config(const std::string& json) { return {{"format", "pt"}, {"lora_adapter_metadata", json}}; }

// A pair of rank 4, as diffusers names it.
Tensors Pair(const std::string& name) {
  return {{name + ".lora_A.weight", at::ones({4, 8})}, {name + ".lora_B.weight", at::ones({6, 4})}};
}

double ScaleOf(Tensors tensors, const Metadata& metadata) {
  const auto patch = ModelPatch::FromTensors(tensors, metadata);
  EXPECT_TRUE(patch.ok()) << patch.status();
  return patch.ok() ? (*patch)->layers().at(0).low_rank()->scale : NAN;
}

TEST(AdapterConfigTest, TheScaleIsTheConfigsAlphaOverItsRank) {
  EXPECT_EQ(ScaleOf(Pair("transformer.x"), {}), 1);
  EXPECT_EQ(ScaleOf(Pair("transformer.x"), Config("")), 1);
  EXPECT_EQ(ScaleOf(Pair("transformer.x"), Config("null")), 1);
  EXPECT_EQ(ScaleOf(Pair("transformer.x"), Config(R"({"transformer.r": 4, "transformer.lora_alpha": 1})")),
            0.25);
  EXPECT_EQ(
      ScaleOf(Pair("transformer.x"),
              Config(R"({"transformer.r": 4, "transformer.lora_alpha": 1, "transformer.use_rslora": true})")),
      0.5);
  // Names without a prefix, as a component saves itself.
  EXPECT_EQ(ScaleOf(Pair("x"), Config(R"({"r": 4, "lora_alpha": 12})")), 3);
  // Another component's says nothing.
  EXPECT_EQ(ScaleOf(Pair("transformer.x"), Config(R"({"text_encoder.r": 4, "text_encoder.lora_alpha": 1})")),
            1);
  EXPECT_EQ(ScaleOf(Pair("text_encoder_2.x"), Config(R"({"text_encoder.r": 5, "text_encoder_2.r": 4,
                                                         "text_encoder_2.lora_alpha": 2})")),
            0.5);
  // What is left out is 8.
  EXPECT_EQ(ScaleOf(Pair("transformer.x"), Config(R"({"transformer.r": 4})")), 2);
}

TEST(AdapterConfigTest, PatternsGiveModulesTheirOwn) {
  const auto config = [](const std::string& patterns) {
    return Config(absl::StrCat(R"({"t.r": 4, "t.lora_alpha": 4, )", patterns, "}"));
  };
  EXPECT_EQ(ScaleOf(Pair("t.a.to_q"), config(R"("t.alpha_pattern": {"to_q": 1})")), 0.25);
  EXPECT_EQ(ScaleOf(Pair("t.a.no_to_q"), config(R"("t.alpha_pattern": {"to_q": 1})")), 1);
  EXPECT_EQ(ScaleOf(Pair("t.a.to_q"), config(R"("t.alpha_pattern": {"to": 1})")), 1);
  EXPECT_EQ(ScaleOf(Pair("t.a.to_q"), config(R"("t.alpha_pattern": {"^to_q": 1})")), 1);
  EXPECT_EQ(ScaleOf(Pair("t.a.to_q"), config(R"("t.alpha_pattern": {"^a.to_q": 1})")), 0.25);
  // The first in the order of the file.
  EXPECT_EQ(ScaleOf(Pair("t.a.to_q"), config(R"("t.alpha_pattern": {".*_q": 2, "to_q": 1})")), 0.5);
  EXPECT_EQ(ScaleOf(Pair("t.a.to_q"), config(R"("t.alpha_pattern": {"to_q": 1, ".*_q": 2})")), 0.25);
  EXPECT_EQ(
      ScaleOf(Pair("t.a.to_q"), Config(R"({"t.r": 16, "t.lora_alpha": 4, "t.rank_pattern": {"to_[qk]": 4},
                                                "t.alpha_pattern": null})")),
      1);
  // CLIP's modules, as transformers 4 and 5 call them.
  for (const char* pattern : {"text_model.encoder.q", "^encoder.q", "^text_model.encoder.q"}) {
    EXPECT_EQ(ScaleOf(Pair("t.text_model.encoder.q"),
                      config(absl::StrCat(R"("t.alpha_pattern": {")", pattern, R"(": 1})"))),
              0.25)
        << pattern;
  }
}

TEST(AdapterConfigTest, AnAlphaAmongTheTensorsGoesFirst) {
  Tensors tensors = Pair("unet.x");
  tensors["unet.x.alpha"] = at::scalar_tensor(2);
  EXPECT_EQ(ScaleOf(tensors, Config(R"({"unet.r": 4, "unet.lora_alpha": 1})")), 0.5);
}

TEST(AdapterConfigTest, TheBiasOfAnUpPartHasTheScaleToo) {
  Tensors tensors = Pair("unet.x");
  tensors["unet.x.lora_B.bias"] = at::ones({6});
  const auto patch = ModelPatch::FromTensors(tensors, Config(R"({"unet.r": 4, "unet.lora_alpha": 1})"));
  ASSERT_TRUE(patch.ok()) << patch.status();
  EXPECT_EQ((*patch)->layers()[0].bias_scale, 0.25);
  // A difference of the bias stands beside the pair, and has none.
  tensors.erase("unet.x.lora_B.bias");
  tensors["unet.x.diff_b"] = at::ones({6});
  EXPECT_EQ((*ModelPatch::FromTensors(tensors, Config(R"({"unet.r": 4, "unet.lora_alpha": 1})")))
                ->layers()[0]
                .bias_scale,
            1);
}

TEST(AdapterConfigTest, FactorsOfAKroneckerProductMayBeFull) {
  const Tensors tensors = {{"x.lokr_w1", at::ones({2, 2})}, {"x.lokr_w2", at::ones({3, 4})}};
  const auto patch = ModelPatch::FromTensors(tensors, Config(R"({"peft_type": "LOKR", "r": 8, "alpha": 4})"));
  ASSERT_TRUE(patch.ok()) << patch.status();
  EXPECT_EQ(std::get<Kronecker>((*patch)->layers()[0].math).scale, 0.5);
}

TEST(AdapterConfigTest, WhatCannotBeMeantIsRefused) {
  const std::pair<std::string, std::string> configs[] = {
      {"{", "no JSON"},
      {"[]", "no JSON object"},
      {R"({"t.r": "4"})", "no number"},
      {R"({"t.r": 1e300})", "no number"},
      {R"({"t.r": 4, "t.lora_alpha": null})", "no number"},
      {R"({"t.r": 4, "t.use_rslora": 1})", "use_rslora"},
      {R"({"t.r": 4, "t.rank_pattern": []})", "no object"},
      {R"({"t.r": 4, "t.rank_pattern": {"(": 4}})", "no regular expression"},
      {R"({"t.r": 4, "t.alpha_pattern": {"x": "1"}})", "no number"},
      {R"({"t.r": 16})", "rank 4"},
      {R"({"t.r": 4, "t.rank_pattern": {"x": 8}})", "rank 4"},
      // Nothing that takes for ever.
      {R"({"t.r": 4, "t.alpha_pattern": {"(x+x+)+[yz]": 1}})", "too long"},
  };
  const std::string name = "t." + std::string(40, 'x');
  for (const auto& [json, message] : configs) {
    Tensors tensors = Pair(name);
    for (auto& [key, tensor] : Pair("t.x")) tensors[key] = tensor;
    const absl::Status status = ModelPatch::FromTensors(tensors, Config(json)).status();
    EXPECT_EQ(ErrorReason(status), "INVALID_LORA") << json;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message)) << json;
  }
}

TEST(ModulePatternTest, MatchesTheEndFromADotOn) {
  struct Row {
    std::string pattern, path;
    bool matches;
  };
  for (const Row& row : std::vector<Row>{
           {"to_q", "to_q", true},
           {"to_q", "a.to_q", true},
           {"to_q", "ato_q", false},
           {"to_q", "a.to_q.b", false},
           {"a.to_q", "axto_q", true},  // a dot is any character
           {"^to_q", "a.to_q", false},
           {"^to_q", "to_q", true},
           {"(to_q|to_k)", "b.to_k", true},
           {"to_q|to_k", "b.to_k", true},
           {"blocks\\.\\d+\\..*", "blocks.12.attn.to_q", true},
           {"blocks\\.\\d+", "blocks.12.attn", false},
           {"(?!a).*q", "b.q", true},
           {"[^.]+\\.q", "aa.q", true},
           {"", "a.", true},
           {"", "a", false},
       }) {
    const auto pattern = ModulePattern::Compile(row.pattern);
    ASSERT_TRUE(pattern.ok()) << row.pattern;
    EXPECT_EQ(*pattern->Matches(row.path), row.matches) << row.pattern << " on " << row.path;
  }
  EXPECT_FALSE(ModulePattern::Compile(std::string(5000, 'a')).ok());
  EXPECT_FALSE(ModulePattern::Compile("a[").ok());
}

}  // namespace
}  // namespace latentd
