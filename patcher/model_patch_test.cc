// Files as they come in from strangers, and what is understood of them.
#include "patcher/model_patch.h"

#include <limits>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using Tensors = std::map<std::string, at::Tensor>;
using testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Tensors Pair(const std::string& name = "a") {
  return {{name + ".lora_down.weight", at::ones({2, 8})}, {name + ".lora_up.weight", at::ones({6, 2})}};
}

Tensors With(Tensors tensors, const std::string& key, const at::Tensor& value) {
  tensors[key] = value;
  return tensors;
}

// Pair() with what it leaves out.
Tensors Sparse(const at::Tensor& places, const at::Tensor& values, const at::Tensor& size) {
  return With(With(With(Pair(), "a.bias_indices", places), "a.bias_values", values), "a.bias_size", size);
}

absl::Status StatusOf(const Tensors& tensors) { return ModelPatch::FromTensors(tensors).status(); }

const PatchLayer& Only(const std::shared_ptr<const ModelPatch>& patch) { return patch->layers().at(0); }

TEST(ModelPatchTest, TheScaleIsAlphaOverRankOrOne) {
  EXPECT_EQ(Only(*ModelPatch::FromTensors(Pair())).low_rank()->scale, 1);
  EXPECT_EQ(Only(*ModelPatch::FromTensors(With(Pair(), "a.alpha", at::scalar_tensor(1)))).low_rank()->scale,
            0.5);
}

TEST(ModelPatchTest, SparseBiasIsPartOfTheWeightsDifference) {
  const auto patch =
      ModelPatch::FromTensors(With(Sparse(at::tensor({5, 7}, at::kShort).reshape({2, 1}),
                                          at::tensor({4.0F}).to(at::kHalf), at::tensor({6, 8}, at::kShort)),
                                   "a.alpha", at::scalar_tensor(1)));
  ASSERT_TRUE(patch.ok()) << patch.status();
  const PatchLayer& layer = Only(*patch);
  EXPECT_EQ(layer.type, "LoRA+sparse");
  EXPECT_EQ(layer.low_rank(), nullptr);  // it cannot be computed beside the weight
  EXPECT_FALSE(layer.bias.defined());
  EXPECT_EQ(layer.bytes(), (16 + 12) * 4 + 2 * 2 + 2);
  const at::Tensor delta = layer.Delta({6, 8}, {});  // alpha / rank is 1/2
  EXPECT_EQ(delta[5][7].item<float>(), 0.5F * (2 + 4));
  EXPECT_EQ(delta.sum().item<float>(), 0.5F * (2 * 48 + 4));
}

TEST(ModelPatchTest, TwoFullKroneckerFactorsIgnoreAlpha) {
  const Tensors full = {
      {"a.lokr_w1", at::ones({2, 2})}, {"a.lokr_w2", at::ones({3, 4})}, {"a.alpha", at::scalar_tensor(8)}};
  EXPECT_EQ(std::get<Kronecker>(Only(*ModelPatch::FromTensors(full)).math).scale, 1);
  const Tensors low_rank = {{"a.lokr_w1", at::ones({2, 2})},
                            {"a.lokr_w2_a", at::ones({3, 4})},
                            {"a.lokr_w2_b", at::ones({4, 4})},
                            {"a.alpha", at::scalar_tensor(8)}};
  EXPECT_EQ(std::get<Kronecker>(Only(*ModelPatch::FromTensors(low_rank)).math).scale, 2);
}

// A convolution of 6 inputs and 6 outputs, where a magnitude's shape alone does not say what it is of.
TEST(ModelPatchTest, PeftsMagnitudesAreOfTheOutputsAndLycorisOfWhatTheirShapeSays) {
  const at::Tensor down = at::randn({2, 6, 3, 3}), up = at::randn({6, 2, 1, 1}),
                   weight = at::randn({6, 6, 3, 3});
  const at::Tensor numbers = at::rand({6}) + 0.5;
  const at::Tensor sum = weight + at::einsum("or,rikl->oikl", {up.flatten(1), down});
  const auto scaled = [&](at::IntArrayRef over, at::IntArrayRef shape) {
    const at::Tensor norm = sum.square().sum(over, /*keepdim=*/true).sqrt();
    return (sum * numbers.view(shape) / norm - weight).flatten(1);
  };
  const at::Tensor by_output = scaled({1, 2, 3}, {6, 1, 1, 1}), by_input = scaled({0, 2, 3}, {1, 6, 1, 1});
  struct Row {
    std::string suffix;
    std::vector<int64_t> shape;
    const at::Tensor& expected;
  };
  for (const Row& row : std::vector<Row>{{"lora_magnitude_vector", {1, 6, 1, 1}, by_output},
                                         {"lora_magnitude_vector.default.weight", {1, 6, 1, 1}, by_output},
                                         {"magnitude", {1, 6, 1, 1}, by_output},
                                         {"lora_magnitude_vector", {6}, by_output},
                                         {"dora_scale", {6, 1, 1, 1}, by_output},
                                         {"dora_scale", {1, 6, 1, 1}, by_input}}) {
    const auto patch = ModelPatch::FromTensors({{"a.lora_A.weight", down},
                                                {"a.lora_B.weight", up},
                                                {"a." + row.suffix, numbers.reshape(row.shape)}});
    ASSERT_TRUE(patch.ok()) << row.suffix << ": " << patch.status();
    EXPECT_EQ(Only(*patch).type, "LoCon+DoRA");
    EXPECT_TRUE(at::allclose(Only(*patch).Delta(weight.sizes(), weight), row.expected, 1e-4, 1e-5))
        << row.suffix;
  }
}

TEST(ModelPatchTest, AMagnitudeMayBeNamedInAnotherWayThanItsLayer) {
  const std::pair<std::string, std::string> names[] = {
      {"lora_unet_mid_block_attn_to_q", "lora_unet.mid_block.attn.to_q"},
      {"lora_unet_mid_block_attn_to_q", "unet.mid_block.attn.to_q"},
      {"lora_unet_mid_block_attn_to_q", "mid_block.attn.to_q"},
      {"lora_transformer_transformer_blocks_0_attn_to_q", "transformer.transformer_blocks.0.attn.to_q"},
      {"lora_unet_double_blocks_0_img_attn_qkv", "diffusion_model.double_blocks.0.img_attn.qkv"},
      {"lora_te1_text_model_encoder_q_proj", "text_encoder.text_model.encoder.q_proj"},
      {"unet.mid_block.attn.to_q", "lora_unet_mid_block_attn_to_q"}};
  for (const auto& [layer, magnitude] : names) {
    for (const char* suffix : {".dora_scale", ".lora_magnitude_vector", ".magnitude"}) {
      Tensors tensors = With(Pair(layer), magnitude + suffix, at::ones({6, 1}));
      tensors.merge(Pair("lora_unet_other"));
      const auto patch = ModelPatch::FromTensors(tensors);
      ASSERT_TRUE(patch.ok()) << magnitude << ": " << patch.status();
      ASSERT_EQ((*patch)->layers().size(), 2u);
      for (const PatchLayer& found : (*patch)->layers()) {
        EXPECT_EQ(found.type, found.name == layer ? "LoRA+DoRA" : "LoRA") << found.name;
      }
    }
  }
  // One that may be of two, or of none, is of none.
  for (const char* magnitude : {"a.b.dora_scale", "x.y.dora_scale"}) {
    Tensors tensors = With(Pair("lora_unet_a_b"), magnitude, at::ones({6, 1}));
    tensors.merge(Pair("lycoris_a_b"));
    EXPECT_THAT(std::string(StatusOf(tensors).message()), HasSubstr("has magnitudes but no low-rank part"));
  }
}

TEST(ModelPatchTest, TheUpPartsBiasIsScaledAsTheUpPartIs) {
  const std::vector<std::string> spellings[] = {
      {".lora_A.weight", ".lora_B.weight", ".lora_B.bias"},
      {".lora.down.weight", ".lora.up.weight", ".lora.up.bias"},
      {".lora_down.weight", ".lora_up.weight", ".lora_up.bias"},
      {".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight", ".lora_linear_layer.up.bias"}};
  for (const auto& names : spellings) {
    const auto patch = ModelPatch::FromTensors({{"a" + names[0], at::ones({2, 8})},
                                                {"a" + names[1], at::ones({6, 2})},
                                                {"a" + names[2], at::ones({6})},
                                                {"a.alpha", at::scalar_tensor(1)}});
    ASSERT_TRUE(patch.ok()) << names[2] << ": " << patch.status();
    EXPECT_EQ(Only(*patch).type, "LoRA+bias");
    EXPECT_EQ(Only(*patch).bias_scale, 0.5);
  }
}

TEST(ModelPatchTest, DoublesAndEightBitFloatsAreRead) {
  // All that 8 bits can say, but what is not finite.
  for (const at::ScalarType type : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const at::Tensor all = at::arange(256, at::kByte).view(type).to(at::kFloat);
    const at::Tensor numbers = at::where(all.isfinite(), all, at::zeros({})).reshape({2, 128});
    const auto patch = ModelPatch::FromTensors({{"a.lora_down.weight", numbers.to(type)},
                                                {"a.lora_up.weight", at::eye(2).to(type)},
                                                {"a.alpha", at::scalar_tensor(2).to(type)}});
    ASSERT_TRUE(patch.ok()) << patch.status();
    EXPECT_TRUE(at::equal(Only(*patch).Delta({2, 128}, {}), numbers)) << at::toString(type);
  }
  const auto patch = ModelPatch::FromTensors({{"a.lora_down.weight", at::full({2, 8}, 0.1, at::kDouble)},
                                              {"a.lora_up.weight", at::eye(2, at::kDouble)},
                                              {"a.alpha", at::scalar_tensor(2, at::kDouble)}});
  ASSERT_TRUE(patch.ok()) << patch.status();
  EXPECT_TRUE(at::equal(Only(*patch).Delta({2, 8}, {}), at::full({2, 8}, 0.1F)));
  // Beyond what is computed in.
  EXPECT_THAT(
      std::string(StatusOf(With(Pair(), "a.lora_up.weight", at::full({6, 2}, 1e300, at::kDouble))).message()),
      HasSubstr("finite"));
  EXPECT_FALSE(
      StatusOf(With(Pair(), "a.lora_up.weight", at::full({6, 2}, kNaN).to(at::kFloat8_e4m3fn))).ok());
}

TEST(ModelPatchTest, LayersOfAllKindsMayStandInOneFile) {
  Tensors tensors = Pair("a");
  tensors["b.diff"] = at::ones({4, 4});
  tensors["c.w_norm"] = at::ones({4});
  tensors["d.weight"] = at::ones({4});
  tensors["d.on_input"] = at::scalar_tensor(1, at::kLong);
  tensors["e.oft_blocks"] = at::ones({2, 3, 3});
  tensors["f.oft_blocks"] = at::ones({1, 2, 4, 4});
  tensors["g.diff_b"] = at::ones({4});
  tensors["bundle_emb.x.clip_l"] = at::ones({4, 4});
  const auto patch = ModelPatch::FromTensors(tensors);
  ASSERT_TRUE(patch.ok()) << patch.status();
  std::vector<std::string> types;
  for (const PatchLayer& layer : (*patch)->layers()) types.push_back(layer.type);
  EXPECT_THAT(types,
              testing::ElementsAre("LoRA", "full diff", "norm", "IA3", "OFT", "BOFT", "bias diff only"));
  EXPECT_EQ((*patch)->ignored(), 1);
  EXPECT_EQ((*patch)->bytes(), 4 * (16 + 12 + 16 + 4 + 4 + 18 + 32 + 4));
}

TEST(ModelPatchTest, WhatIsNotFiniteIsRefused) {
  for (float value : {kInfinity, -kInfinity, kNaN}) {
    for (const Tensors& tensors :
         {With(Pair(), "a.alpha", at::scalar_tensor(value)),
          With(Pair(), "a.lora_up.weight", at::full({6, 2}, value)),
          With(Pair(), "a.dora_scale", at::full({1, 8}, value)),
          With(Pair(), "a.diff_b", at::full({6}, value)), With({}, "a.diff", at::full({2, 2}, value)),
          Tensors{{"a.weight", at::full({4}, value)}, {"a.on_input", at::scalar_tensor(0)}},
          Tensors{{"a.weight", at::ones({4})}, {"a.on_input", at::scalar_tensor(value)}}}) {
      const absl::Status status = StatusOf(tensors);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("finite"));
    }
  }
}

// Each is one layer "a" that must not load.
TEST(ModelPatchTest, ShapesThatLieAreRefused) {
  const at::Tensor huge = at::empty({1'000'000'000, 1}, at::TensorOptions().device(at::kMeta));
  const std::vector<Tensors> files = {
      {{"a.lora_down.weight", huge}, {"a.lora_up.weight", huge.t()}},
      With(Pair(), "a.lora_up.weight", at::ones({6, 3})),
      With(Pair(), "a.lora_up.weight", at::ones({6})),
      With(Pair(), "a.lora_down.weight", at::ones({0, 8})),
      With(Pair(), "a.lora_mid.weight", at::ones({3, 3, 1, 1})),
      With(Pair(), "a.dora_scale", at::ones({1, 7})),
      With(Pair(), "a.dora_scale", at::ones({7, 1})),
      With(Pair(), "a.lora_magnitude_vector", at::ones({8})),
      With(Pair(), "a.alpha", at::ones({2})),
      With(Pair(), "a.diff_b", at::ones({2, 3})),
      {{"a.hada_w1_a", at::ones({4, 2})},
       {"a.hada_w1_b", at::ones({2, 4})},
       {"a.hada_w2_a", at::ones({5, 2})},
       {"a.hada_w2_b", at::ones({2, 4})}},
      {{"a.lokr_w1", at::ones({2})}, {"a.lokr_w2", at::ones({2, 2})}},
      {{"a.lokr_w1", at::ones({2, 2})}, {"a.lokr_w2_a", at::ones({2, 2})}, {"a.lokr_w2_b", at::ones({3, 2})}},
      {{"a.weight", at::ones({2, 2})}, {"a.on_input", at::scalar_tensor(0)}},
      {{"a.a1.weight", at::ones({4, 2})},
       {"a.a2.weight", at::ones({2, 4})},
       {"a.b1.weight", at::ones({6, 2})},
       {"a.b2.weight", at::ones({2, 5})}},
      {{"a.oft_blocks", at::ones({2, 3, 4})}},
      {{"a.oft_blocks", at::ones({2, 3, 3})}, {"a.rescale", at::ones({5, 1})}},
      {{"a.oft_blocks", at::ones({9, 2, 4, 4})}},
      {{"a.oft_blocks", at::ones({70, 2, 4, 4})}},
      {{"a.diff", at::ones({0, 2})}},
  };
  for (size_t i = 0; i < files.size(); ++i) {
    const absl::Status status = StatusOf(files[i]);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << i << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("layer a: ")) << i;
  }
}

TEST(ModelPatchTest, LayersThatAreNotWholeAreRefused) {
  const std::vector<Tensors> files = {
      {{"a.lora_down.weight", at::ones({2, 8})}},
      {{"a.alpha", at::scalar_tensor(1)}},
      {{"a.lora_mid.weight", at::ones({2, 2, 3, 3})}},
      {{"a.hada_w1_a", at::ones({4, 2})}},
      {{"a.lokr_w1", at::ones({2, 2})}},
      {{"a.lokr_w1", at::ones({2, 2})}, {"a.lokr_w2", at::ones({2, 2})}, {"a.lokr_w2_a", at::ones({2, 2})}},
      {{"a.on_input", at::scalar_tensor(0)}},
      {{"a.a1.weight", at::ones({4, 2})}},
      {{"a.rescale", at::ones({4, 1})}},
      {{"a.oft_blocks.1", at::ones({2, 3, 3})}},
      {{"a.oft_blocks", at::ones({2, 3, 3})}, {"a.oft_blocks.0", at::ones({2, 3, 3})}},
      {{"a.dora_scale", at::ones({4, 1})}},
      {{"a.dora_scale", at::ones({2, 1})}, {"a.diff", at::ones({2, 2})}},
      With(Pair(), "a.diff", at::ones({6, 8})),
      With(With(Pair(), "a.diff_b", at::ones({6})), "a.lora_B.bias", at::ones({6})),
      With(With(Pair(), "a.dora_scale", at::ones({6, 1})), "a.lora_magnitude_vector", at::ones({6})),
      With(Pair(), "a.lora_A.default.weight", at::ones({2, 8})),
      // Pair() is a [6, 8].
      With(Pair(), "a.bias_indices", at::zeros({2, 1}, at::kShort)),
      Sparse(at::zeros({2, 1}, at::kShort), at::ones({1}), at::tensor({6, 7}, at::kShort)),
      Sparse(at::zeros({2, 1}, at::kShort), at::ones({1}), at::tensor({6, 8, 1}, at::kShort)),
      Sparse(at::zeros({2, 1}, at::kShort), at::ones({1}), at::tensor({6.0, 8.0})),
      Sparse(at::zeros({2, 1}, at::kShort), at::ones({2}), at::tensor({6, 8}, at::kShort)),
      Sparse(at::zeros({2, 1}), at::ones({1}), at::tensor({6, 8}, at::kShort)),
      Sparse(at::full({2, 1}, 6, at::kShort), at::ones({1}), at::tensor({6, 8}, at::kShort)),
      Sparse(at::full({2, 1}, -1, at::kShort), at::ones({1}), at::tensor({6, 8}, at::kShort)),
      Sparse(at::zeros({2, 1}, at::kShort), at::full({1}, NAN), at::tensor({6, 8}, at::kShort)),
      {{"a.diff", at::ones({6, 8})},
       {"a.bias_indices", at::zeros({2, 1}, at::kShort)},
       {"a.bias_values", at::ones({1})},
       {"a.bias_size", at::tensor({6, 8}, at::kShort)}},
  };
  for (size_t i = 0; i < files.size(); ++i) {
    const absl::Status status = StatusOf(files[i]);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << i << ": " << status;
  }
}

TEST(ModelPatchTest, AFileWithUnknownKeysIsRefusedAsAWhole) {
  for (const char* key :
       {"b.mystery", "b.weight", "b.lora_down.wait", "a.diff_m", "unet:0:down", "a.oft_blocks.x"}) {
    const absl::Status status = StatusOf(With(Pair(), key, at::ones({2, 2})));
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << key;
    EXPECT_THAT(std::string(status.message()), HasSubstr(key));
  }
}

TEST(ModelPatchTest, AFileWithoutLayersIsRefused) {
  EXPECT_EQ(StatusOf({}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(StatusOf({{"model.weight", at::ones({2, 2})}}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(StatusOf({{"bundle_emb.x", at::ones({2, 2})}}).code(), absl::StatusCode::kInvalidArgument);
}

TEST(ModelPatchTest, NumbersThatAreNoFloatsAreRefused) {
  EXPECT_EQ(StatusOf(With(Pair(), "a.lora_up.weight", at::ones({6, 2}, at::kLong))).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ModelPatchTest, AMillionKeysAreRefusedBeforeAnyIsRead) {
  NamedShapes shapes;
  for (int i = 0; i < 1'000'000; ++i)
    shapes.emplace_hint(shapes.end(), absl::StrCat(i + 1'000'000, ".diff"), std::vector<int64_t>{1, 1});
  EXPECT_EQ(PatchKeys::Group(shapes).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace latentd
