// What needs no weights: validation of requests, sizes, previews.
#include "families/flux/flux_pipeline.h"

#include <cmath>
#include <functional>

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

FluxPipeline MakePipeline() {
  FluxParts parts;
  parts.variant = "dev";
  FluxConfig config;
  config.double_blocks = config.single_blocks = 1;
  config.heads = 2;
  config.guidance_embeds = true;
  parts.transformer = std::make_shared<const FluxTransformer>(config);
  AutoencoderKlConfig vae;
  vae.latent_channels = 16;
  vae.channels = {32, 32, 32, 32};
  parts.vae = std::make_shared<const AutoencoderKl>(vae);
  parts.clip = std::make_shared<const ClipTextModel>(ClipTextConfig());
  parts.t5 = std::make_shared<const T5Encoder>(T5Config());
  return FluxPipeline(std::move(parts));
}

TEST(FluxPipelineTest, ValidateFillsInDefaults) {
  const FluxPipeline pipeline = MakePipeline();
  GenerateParams params;
  ASSERT_TRUE(pipeline.Validate(params).ok());
  EXPECT_EQ(*params.width, 1024);
  EXPECT_EQ(*params.height, 1024);
  EXPECT_EQ(*params.steps, 28);
  EXPECT_EQ(*params.guidance, 3.5);
  EXPECT_EQ(*params.true_cfg_scale, 1.0);
  EXPECT_EQ(*params.sampler, "euler");
  EXPECT_EQ(*params.max_sequence_length, 512);
  EXPECT_EQ(params.seeds.size(), 1u);
  EXPECT_FALSE(params.negative_prompt.has_value());
  params.true_cfg_scale = 2.0;
  ASSERT_TRUE(pipeline.Validate(params).ok());
  EXPECT_FALSE(params.negative_prompt.has_value()) << "nothing is guided then";
}

TEST(FluxPipelineTest, ValidateNamesTheFieldAtFault) {
  const FluxPipeline pipeline = MakePipeline();
  const double nan = std::nan("");
  using Change = std::function<void(GenerateParams&)>;
  const std::vector<std::pair<std::string, Change>> bad = {
      {"params.prompt", [](auto& p) { p.prompt = std::string(1 << 20, 'x'); }},
      {"params.negative_prompt", [](auto& p) { p.negative_prompt = std::string(1 << 20, 'x'); }},
      {"params.width", [](auto& p) { p.width = 0; }},
      {"params.width", [](auto& p) { p.width = 1000; }},
      {"params.width", [](auto& p) { p.width = 8192; }},
      {"params.height", [](auto& p) { p.height = -16; }},
      {"params.height", [](auto& p) { p.width = 4096, p.height = 4096; }},
      {"params.steps", [](auto& p) { p.steps = 0; }},
      {"params.steps", [](auto& p) { p.steps = 1001; }},
      {"params.guidance", [=](auto& p) { p.guidance = nan; }},
      {"params.guidance", [](auto& p) { p.guidance = -1; }},
      {"params.guidance", [](auto& p) { p.guidance = 101; }},
      {"params.true_cfg_scale", [](auto& p) { p.true_cfg_scale = 0.5; }},
      {"params.true_cfg_scale", [=](auto& p) { p.true_cfg_scale = nan; }},
      {"params.sampler", [](auto& p) { p.sampler = "dpm++"; }},
      {"params.shift", [](auto& p) { p.shift = 0; }},
      {"params.shift", [=](auto& p) { p.shift = nan; }},
      {"params.shift", [](auto& p) { p.shift = 1000; }},
      {"params.max_sequence_length", [](auto& p) { p.max_sequence_length = 0; }},
      {"params.max_sequence_length", [](auto& p) { p.max_sequence_length = 513; }},
      {"params.count", [](auto& p) { p.seeds.resize(65); }},
      {"params.init_image.strength", [](auto& p) { p.strength = 0; }},
      {"params.init_image.strength", [](auto& p) { p.strength = 1.01; }},
      {"params.init_image.strength", [=](auto& p) { p.strength = nan; }},
      {"params.init_image.strength",
       [](auto& p) {
         p.strength = 1e-300, p.SetPicture(MediaRole::kInit, at::zeros({8, 8, 3}, at::kByte));
       }},
      {"params.init_image",
       [](auto& p) {
         p.SetPicture(MediaRole::kInit, at::zeros({8, 8, 4}, at::kByte));
       }},
      {"params.init_image",
       [](auto& p) {
         p.SetPicture(MediaRole::kInit, at::zeros({8, 8, 3}));
       }},
      {"params.init_image",
       [](auto& p) {
         p.SetPicture(MediaRole::kInit, at::zeros({0, 8, 3}, at::kByte));
       }},
      {"params.init_image",
       [](auto& p) {
         p.width = p.height = 64;  // else it is the picture's
         p.SetPicture(MediaRole::kInit, at::zeros({8, 20000, 3}, at::kByte));
       }},
      {"params.control_image",
       [](auto& p) {
         p.SetPicture(MediaRole::kControl, at::zeros({8, 8, 3}, at::kByte));
       }},
      {"params.control_image", [](auto& p) { p.grown_inputs = 128; }},
      {"params.control_image",
       [](auto& p) {
         p.grown_inputs = 128;
         p.SetPicture(MediaRole::kControl, at::zeros({8, 8, 4}, at::kByte));
       }},
      {"loras", [](auto& p) { p.grown_inputs = 192; }},
      {"params.noise",
       [](auto& p) {
         p.noise = at::zeros({1, 16, 8, 8});
       }},
  };
  for (const auto& [field, change] : bad) {
    GenerateParams params;
    change(params);
    const absl::Status status = pipeline.Validate(params);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_EQ(ErrorReason(status), "INVALID_FIELD") << field;
    EXPECT_EQ(GetErrorDetails(status)["field"], field) << status;
  }
}

TEST(FluxPipelineTest, PackingIsUndoneByUnpacking) {
  const at::Tensor latents = at::arange(2 * 16 * 6 * 10, at::kFloat).view({2, 16, 6, 10});
  const at::Tensor tokens = PackLatents(latents);
  EXPECT_EQ(tokens.sizes(), at::IntArrayRef({2, 15, 64}));
  EXPECT_TRUE(at::equal(UnpackLatents(tokens, 6, 10), latents));
  // Channel first, then row and column inside the 2×2 patch.
  EXPECT_EQ(tokens[0][0][1].item<float>(), latents[0][0][0][1].item<float>());
  EXPECT_EQ(tokens[0][0][2].item<float>(), latents[0][0][1][0].item<float>());
  EXPECT_EQ(tokens[0][0][4].item<float>(), latents[0][1][0][0].item<float>());
}

}  // namespace
}  // namespace latentd
