// What needs no weights: validation of requests, sizes, where tiles lie.
#include "families/sd/sd_pipeline.h"

#include <cmath>
#include <functional>

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "families/sd/sd_denoiser.h"
#include "families/sd/sd_masks.h"
#include "families/sd15/sd15_pipeline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using Change = std::function<void(GenerateParams&)>;
using Bad = std::vector<std::pair<std::string, Change>>;

// Without encoders: what is not about prompts.
SdParts Parts(const UNetConfig& config) {
  SdParts parts;
  parts.variant = "base";
  parts.defaults = {
      .width = 512, .height = 512, .steps = 30, .guidance = 7.5, .strength = 0.75, .sampler = "euler"};
  parts.unet = std::make_shared<const UNet2DCondition>(config);
  AutoencoderKlConfig vae;
  vae.channels = {32, 32, 32, 32};
  parts.vae = std::make_shared<const AutoencoderKl>(vae);
  parts.scheduler = SchedulerConfig::Of(NoiseSchedule::Create({}));
  return parts;
}

UNetConfig Small(int64_t in_channels = 4) {
  UNetConfig config;
  config.in_channels = in_channels;
  config.levels = {UNetConfig::Level::Of(32, 4, 1, 1), UNetConfig::Level::Of(64, 4, 1, 0)};
  return config;
}

at::Tensor Grey(int64_t side = 16) { return at::full({side, side, 3}, 128, at::kByte); }

void ExpectRefused(const SdPipeline& pipeline, const Bad& bad) {
  for (const auto& [field, change] : bad) {
    GenerateParams params;
    change(params);
    const absl::Status status = pipeline.Validate(params);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_EQ(ErrorReason(status), "INVALID_FIELD") << field;
    EXPECT_EQ(GetErrorDetails(status)["field"], field) << status;
  }
}

TEST(SdPipelineTest, ValidateFillsInDefaults) {
  const Sd15Pipeline pipeline(Parts(Small()));
  GenerateParams params;
  ASSERT_TRUE(pipeline.Validate(params).ok());
  EXPECT_EQ(*params.width, 512);
  EXPECT_EQ(*params.steps, 30);
  EXPECT_EQ(*params.guidance, 7.5);
  EXPECT_EQ(*params.strength, 0.75);
  EXPECT_EQ(*params.sampler, "euler");
  EXPECT_EQ(params.seeds.size(), 1u);
  EXPECT_FALSE(params.true_cfg_scale.has_value());
}

TEST(SdPipelineTest, ValidateNamesTheFieldAtFault) {
  const double nan = std::nan("");
  ExpectRefused(Sd15Pipeline(Parts(Small())),
                {
                    {"params.true_cfg_scale", [](auto& p) { p.true_cfg_scale = 1; }},
                    {"params.shift", [](auto& p) { p.shift = 3; }},
                    {"params.max_sequence_length", [](auto& p) { p.max_sequence_length = 77; }},
                    {"params.width", [](auto& p) { p.width = 500; }},
                    {"params.height", [](auto& p) { p.width = p.height = 4096; }},
                    {"params.steps", [](auto& p) { p.steps = 0; }},
                    {"params.guidance", [=](auto& p) { p.guidance = nan; }},
                    {"params.guidance_list",
                     [](auto& p) {
                       p.guidance_list = {7, -1};
                     }},
                    {"params.guidance_list", [](auto& p) { p.guidance_list.resize(1001, 1); }},
                    {"params.guidance_rescale", [](auto& p) { p.guidance_rescale = 1.1; }},
                    {"params.prompt_syntax", [](auto& p) { p.prompt_syntax = "markdown"; }},
                    {"params.sampler", [](auto& p) { p.sampler = "magic"; }},
                    {"params.schedule", [](auto& p) { p.schedule = "magic"; }},
                    {"params.schedule", [](auto& p) { p.sampler = "ddim", p.schedule = "karras"; }},
                    {"params.eta", [](auto& p) { p.sampler = "ddim", p.eta = 2; }},
                    {"params.count", [](auto& p) { p.seeds.resize(65); }},
                    {"params.init_image.strength", [](auto& p) { p.strength = 0; }},
                    {"params.init_image.strength",
                     [](auto& p) { p.SetPicture(MediaRole::kInit, Grey()), p.strength = 0.001; }},
                    {"params.init_image",
                     [](auto& p) {
                       p.SetPicture(MediaRole::kInit, at::zeros({8, 8, 4}, at::kByte));
                     }},
                    {"params.init_latents",
                     [](auto& p) {
                       p.init_latents = at::zeros({1, 4, 8, 8});
                     }},
                    {"params.init_latents",
                     [](auto& p) {
                       p.init_latents = at::zeros({1, 4, 64, 64}), p.SetPicture(MediaRole::kInit, Grey());
                     }},
                    {"params.mask_image", [](auto& p) { p.SetPicture(MediaRole::kMask, Grey()); }},
                    {"params.mask_image",
                     [](auto& p) {
                       p.SetPicture(MediaRole::kInit, Grey());
                       p.SetPicture(MediaRole::kMask, at::zeros({8, 8, 1}, at::kByte));
                     }},
                    {"params.mask_image.gradient", [](auto& p) { p.gradient_mask = true; }},
                    {"params.denoising_start", [](auto& p) { p.denoising_start = 0.5; }},
                    {"params.denoising_end", [](auto& p) { p.denoising_end = 1.5; }},
                    {"params.denoise_tiles", [](auto& p) { p.tiles = DenoiseTiles{.width = 100}; }},
                    {"params.denoise_tiles", [](auto& p) { p.tiles = DenoiseTiles{.width = 16}; }},
                    {"params.denoise_tiles",
                     [](auto& p) { p.tiles = DenoiseTiles{.width = 64, .height = 64, .overlap = 40}; }},
                    {"params.noise",
                     [](auto& p) {
                       p.noise = at::zeros({1, 4, 8, 8});
                     }},
                    {"params.prompt_2", [](auto& p) { p.prompt_2 = "x"; }},
                    {"params.crop", [](auto& p) { p.crop = PixelPoint(); }},
                    {"params.aesthetic_score", [](auto& p) { p.aesthetic_score = 6; }},
                });
}

TEST(SdPipelineTest, AnInpaintingModelNeedsAMaskOfTwoValues) {
  const Sd15Pipeline pipeline(Parts(Small(9)));
  ExpectRefused(pipeline, {
                              {"params.mask_image", [](auto&) {}},
                              {"params.mask_image", [](auto& p) { p.SetPicture(MediaRole::kInit, Grey()); }},
                              {"params.mask_image.gradient",
                               [](auto& p) {
                                 p.SetPicture(MediaRole::kInit, Grey());
                                 p.SetPicture(MediaRole::kMask, Grey());
                                 p.gradient_mask = true;
                               }},
                          });
  GenerateParams params;
  params.SetPicture(MediaRole::kInit, Grey());
  params.SetPicture(MediaRole::kMask, Grey());
  EXPECT_TRUE(pipeline.Validate(params).ok());
}

TEST(SdMasks, DrawsAreInTheOrderOfTheOracle) {
  GenerateParams params;
  params.strength = 0.5;
  auto draws = [&](bool concat) {
    const SdDraws d = DrawsOf(params, concat);
    return std::vector<bool>{d.image, d.noise, d.masked};
  };
  EXPECT_THAT(draws(false), ElementsAre(false, true, false));
  params.SetPicture(MediaRole::kInit, Grey());
  EXPECT_THAT(draws(false), ElementsAre(true, true, false));
  params.denoising_start = 0.5;
  EXPECT_THAT(draws(false), ElementsAre(true, false, false));
  params.denoising_start.reset();
  params.SetPicture(MediaRole::kMask, Grey());
  EXPECT_THAT(draws(true), ElementsAre(true, true, true));
  params.strength = 1;
  EXPECT_THAT(draws(true), ElementsAre(false, true, true));
  EXPECT_THAT(draws(false), ElementsAre(true, true, true));
}

TEST(SdMasks, GreyIsCutAtHalfOrKept) {
  GenerateParams params;
  params.width = params.height = 16;
  for (const auto& [grey, binary] : {std::pair{127, 0.0}, {128, 1.0}, {0, 0.0}, {255, 1.0}}) {
    params.SetPicture(MediaRole::kMask, at::full({5, 7, 3}, grey, at::kByte));
    EXPECT_TRUE(at::equal(PixelMask(params, true), at::full({1, 1, 16, 16}, binary))) << grey;
    EXPECT_TRUE(at::allclose(PixelMask(params, false), at::full({1, 1, 16, 16}, grey / 255.0))) << grey;
  }
  EXPECT_EQ(LatentMask(PixelMask(params, true), 8).sizes(), at::IntArrayRef({1, 1, 2, 2}));
}

TEST(SdMasks, AGradientIsRepaintedFromWhiteToDark) {
  const SdMask mask{at::tensor({0.f, 0.3f, 0.6f, 1.f}).view({1, 1, 2, 2}), true};
  auto places = [&](double t) {
    const at::Tensor p = RepaintedPlaces(mask, t).flatten();
    return std::vector<float>(p.const_data_ptr<float>(), p.const_data_ptr<float>() + 4);
  };
  EXPECT_THAT(places(900), ElementsAre(0, 0, 0, 1));
  EXPECT_THAT(places(500), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(places(0), ElementsAre(0, 1, 1, 1));
}

TEST(SdTilesTest, CoverThePictureEvenlyAndCountAsOne) {
  struct Case {
    int64_t height, width, tile_height, tile_width, overlap;
    size_t tiles;
  };
  for (const Case& c : {Case{13, 19, 9, 8, 2, 6},
                        {64, 64, 64, 64, 8, 1},
                        {5, 9, 16, 16, 8, 1},
                        {20, 8, 8, 8, 0, 3},
                        {128, 256, 128, 128, 4, 3}}) {
    const auto tiles = LayTiles(c.height, c.width, c.tile_height, c.tile_width, c.overlap);
    EXPECT_EQ(tiles.size(), c.tiles);
    std::vector<at::Tensor> ones;
    for (const SdTile& tile : tiles) {
      EXPECT_LE(tile.top + tile.height, c.height);
      EXPECT_LE(tile.left + tile.width, c.width);
      ones.push_back(at::ones({1, 2, tile.height, tile.width}));
    }
    EXPECT_TRUE(
        at::allclose(MergeTiles(tiles, ones, c.height, c.width), at::ones({1, 2, c.height, c.width})));
  }
}

}  // namespace
}  // namespace latentd
