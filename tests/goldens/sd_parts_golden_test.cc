// The networks of SD 1.5 and SDXL against diffusers and transformers: every part of the UNets, every hidden
// state of the text encoders, from folders and from checkpoints in one file.
#include <set>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "families/encoders/clip_keys.h"
#include "families/encoders/clip_text_model.h"
#include "families/sd/sd_keys.h"
#include "families/sd/unet.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

class UNetGolden : public testing::TestWithParam<const char*> {};

TEST_P(UNetGolden, EveryPartAndTheOutputAgree) {
  const c10::InferenceMode inference;
  const std::string name = GetParam();
  const Golden golden("unet-" + name);
  const std::string folder = GoldenPath(golden.Setting("folder") + "/unet");
  const auto config = UNetConfig::Load(folder + "/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const UNet2DCondition unet(*config);
  const auto weights = Load(folder, unet.layout());
  const WeightView view(*weights, nullptr);
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    auto value = [&](const std::string& key) { return golden[absl::StrCat(i, ".", key)]; };
    at::Tensor pooled, time_ids;
    if (config->added_dim > 0) pooled = value("pooled"), time_ids = value("time_ids");
    const UNetConditioning conditioning = unet.PrepareConditioning(view, value("context"), pooled, time_ids);
    const at::Tensor time = unet.TimeEmbedding(view, value("timestep").item<float>(), 1, conditioning);
    std::set<std::string> seen;
    double worst = 0;
    const at::Tensor output = unet(view, value("x"), time, conditioning.context,
                                   [&](const std::string& part, const at::Tensor& result) {
                                     const double error = RelativeError(result, value(part));
                                     EXPECT_LE(error, kBlockTolerance) << part;
                                     worst = std::max(worst, error);
                                     seen.insert(part);
                                   });
    Report(absl::StrCat(name, " ", i, ", the worst of ", seen.size(), " parts"), worst);
    EXPECT_LE(Report(absl::StrCat(name, " ", i, " output"), RelativeError(output, value("output"))),
              kBlockTolerance);
    EXPECT_GT(seen.size(), 20u);
    EXPECT_GE(unet.WorkingBytes(2, 154, output.size(2), output.size(3), {}),
              output.numel() * int64_t{sizeof(float)});
  }
}
INSTANTIATE_TEST_SUITE_P(All, UNetGolden,
                         testing::Values("sd15", "sd15-inpaint", "sdxl", "sdxl-inpaint", "refiner"),
                         [](const auto& info) { return "Case" + std::to_string(info.index); });

class ClipTapGolden : public testing::TestWithParam<const char*> {};

TEST_P(ClipTapGolden, EveryHiddenStateAndThePooledRowAgree) {
  const c10::InferenceMode inference;
  const Golden golden(GetParam());
  const std::string folder = GoldenPath(golden.Setting("folder"));
  const bool projection = golden.Int("projection") != 0;
  const auto config = ClipTextConfig::Load(folder + "/config.json", projection);
  ASSERT_TRUE(config.ok()) << config.status();
  const ClipTextModel model(*config);
  const auto files = WeightFiles::Open(folder);
  ASSERT_TRUE(files.ok()) << files.status();
  const ClipFileLayout layout = DetectClipFileLayout(**files, "");
  ASSERT_TRUE(layout.known);
  EXPECT_EQ(layout.projection, projection);
  const auto weights = Load(folder, model.layout(), layout.key_map, layout.prefix);
  const WeightView view(*weights, nullptr);
  double state_error = 0, pooled_error = 0;
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    const std::vector<int64_t> ids = golden.Ints(absl::StrCat("ids.", i));
    for (int64_t skip = 0; skip < golden.Int("layers"); ++skip) {
      for (const bool normed : {false, true}) {
        const at::Tensor expected = golden[absl::StrCat(normed ? "normed." : "raw.", i, ".", skip)];
        for (const bool pooled : {false, true}) {
          const ClipTextModel::Output output =
              model(view, ids, {.skip = skip, .final_norm = normed, .pooled = pooled});
          state_error = std::max(state_error, RelativeError(output.hidden, expected));
          ASSERT_EQ(output.pooled.defined(), pooled);
          if (!pooled) continue;
          pooled_error =
              std::max(pooled_error, RelativeError(output.pooled, golden[absl::StrCat("pooled.", i)]));
        }
      }
    }
    EXPECT_LE(RelativeError(model(view, ids).hidden, golden[absl::StrCat("last.", i)]), kBlockTolerance);
  }
  EXPECT_LE(Report(absl::StrCat(GetParam(), " hidden states"), state_error), kBlockTolerance);
  EXPECT_LE(Report(absl::StrCat(GetParam(), " pooled"), pooled_error), kBlockTolerance);
}
INSTANTIATE_TEST_SUITE_P(All, ClipTapGolden,
                         testing::Values("clip-l", "clip-l-eos2", "clip-g", "clip-g-eos2"),
                         [](const auto& info) { return "Case" + std::to_string(info.index); });

}  // namespace
}  // namespace latentd
