// The parts of a pipeline, each alone, against transformers, diffusers, tokenizers and Pillow.
#include "ATen/ATen.h"
#include "ATen/Version.h"
#include "absl/strings/str_cat.h"
#include "families/encoders/clip_text_model.h"
#include "families/encoders/t5_encoder.h"
#include "families/sampling/flow_match.h"
#include "families/sampling/noise.h"
#include "families/tokenizers/clip_tokenizer.h"
#include "families/tokenizers/t5_tokenizer.h"
#include "families/vae/autoencoder_kl.h"
#include "families/vae/resize.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

TEST(Tokenizers, ClipGivesTheIdsOfTransformers) {
  const Golden golden("tokenizers");
  auto tokenizer = ClipTokenizer::Load(GoldenPath("tiny-dev/tokenizer"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    const std::string text = golden.Text(absl::StrCat("text.", i));
    EXPECT_EQ((*tokenizer)->Encode(text, 77), golden.Ints(absl::StrCat("clip.", i))) << i << ": " << text;
  }
}

TEST(Tokenizers, T5GivesTheIdsOfTransformers) {
  const Golden golden("tokenizers");
  for (const auto& [name, folder] : {std::pair<std::string, std::string>{"t5", "tiny-dev/tokenizer_2"},
                                     {"t5_identity", "text/tokenizer-identity"}}) {
    auto tokenizer = T5Tokenizer::Load(GoldenPath(folder), 1000);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (int64_t i = 0; i < golden.Int("count"); ++i) {
      const std::string text = golden.Text(absl::StrCat("text.", i));
      EXPECT_EQ((*tokenizer)->Encode(text, 128), golden.Ints(absl::StrCat(name, ".", i)))
          << name << i << ": " << text;
      EXPECT_EQ((*tokenizer)->Encode(text, 7), golden.Ints(absl::StrCat(name, "_short.", i))) << name << i;
    }
  }
}

class ClipGolden : public testing::TestWithParam<const char*> {};

TEST_P(ClipGolden, HiddenStatesAndPooledRowAgree) {
  const c10::InferenceMode inference;
  const Golden golden(GetParam());
  const std::string folder = GoldenPath(golden.Setting("folder"));
  auto config = ClipTextConfig::Load(folder + "/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const ClipTextModel model(*config);
  auto files = WeightFiles::Open(folder);
  ASSERT_TRUE(files.ok()) << files.status();
  const bool prefixed = (*files)->tensors().count("text_model.final_layer_norm.weight") != 0;
  const auto weights = Load(folder, model.layout(), nullptr, prefixed ? "text_model." : "");
  const WeightView view(*weights, nullptr);
  double error = 0;
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    const ClipTextModel::Output output = model(view, golden.Ints(absl::StrCat("ids.", i)));
    error = std::max(error, RelativeError(output.hidden, golden[absl::StrCat("hidden.", i)]));
    error = std::max(error, RelativeError(output.pooled, golden[absl::StrCat("pooled.", i)]));
  }
  EXPECT_LE(Report(GetParam(), error), kBlockTolerance);
}
INSTANTIATE_TEST_SUITE_P(All, ClipGolden, testing::Values("clip-dev", "clip-eos2", "clip-gelu"));

class T5Golden : public testing::TestWithParam<const char*> {};

TEST_P(T5Golden, HiddenStatesAgree) {
  const c10::InferenceMode inference;
  const Golden golden(GetParam());
  const std::string folder = GoldenPath(golden.Setting("folder"));
  auto config = T5Config::Load(folder + "/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const T5Encoder model(*config);
  const auto weights = Load(folder, model.layout());
  const WeightView view(*weights, nullptr);
  double error = 0;
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    const at::Tensor hidden = model(view, golden.Ints(absl::StrCat("ids.", i)));
    error = std::max(error, RelativeError(hidden, golden[absl::StrCat("hidden.", i)]));
  }
  EXPECT_LE(Report(GetParam(), error), kBlockTolerance);
}
INSTANTIATE_TEST_SUITE_P(All, T5Golden, testing::Values("t5-gated", "t5-embed-tokens", "t5-relu"));

class VaeGolden : public testing::TestWithParam<const char*> {};

TEST_P(VaeGolden, PosteriorAndDecodedPictureAgree) {
  const c10::InferenceMode inference;
  const Golden golden(GetParam());
  const std::string folder = GoldenPath(golden.Setting("folder"));
  auto config = AutoencoderKlConfig::Load(folder + "/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const AutoencoderKl model(*config);
  auto files = WeightFiles::Open(folder);
  ASSERT_TRUE(files.ok()) << files.status();
  const VaeFileLayout layout = DetectVaeFileLayout(**files, *config);
  const auto weights = Load(folder, model.layout(), layout.key_map, layout.prefix);
  const WeightView view(*weights, nullptr);
  const AutoencoderKl::Posterior posterior = model.Encode(view, golden["picture"]);
  const std::string name = GetParam();
  EXPECT_LE(Report(name + " mean", RelativeError(posterior.mean, golden["mean"])), kBlockTolerance);
  EXPECT_LE(Report(name + " std", RelativeError(posterior.std, golden["std"])), kBlockTolerance);
  EXPECT_LE(
      Report(name + " decoded", RelativeError(model.Decode(view, golden["latents"]), golden["decoded"])),
      kBlockTolerance);
}
INSTANTIATE_TEST_SUITE_P(All, VaeGolden,
                         testing::Values("vae-plain", "vae-ldm", "vae-old-names", "vae-quant",
                                         "vae-no-attention"));

TEST(TiledVaeGolden, TilesAreCutAndBlendedAsByDiffusers) {
  const c10::InferenceMode inference;
  const Golden golden("vae-tiled");
  const std::string folder = GoldenPath(golden.Setting("folder"));
  auto config = AutoencoderKlConfig::Load(folder + "/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const AutoencoderKl model(*config);
  const auto weights = Load(folder, model.layout(), nullptr, "");
  const WeightView view(*weights, nullptr);
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    const auto tile = golden[absl::StrCat("tile.", i)].item<int64_t>();
    const AutoencoderKl::Posterior posterior = model.Encode(view, golden[absl::StrCat("picture.", i)], tile);
    const at::Tensor decoded = model.Decode(view, golden[absl::StrCat("latents.", i)], tile);
    const std::string name = absl::StrCat("vae in tiles of ", tile);
    EXPECT_LE(Report(name + " mean", RelativeError(posterior.mean, golden[absl::StrCat("mean.", i)])),
              kBlockTolerance);
    EXPECT_LE(Report(name + " std", RelativeError(posterior.std, golden[absl::StrCat("std.", i)])),
              kBlockTolerance);
    EXPECT_LE(Report(name + " decoded", RelativeError(decoded, golden[absl::StrCat("decoded.", i)])),
              kBlockTolerance);
    // A whole picture in one tile is the whole picture.
    const at::Tensor whole = model.Decode(view, golden[absl::StrCat("latents.", i)]);
    EXPECT_TRUE(at::equal(model.Decode(view, golden[absl::StrCat("latents.", i)], 1024), whole));
    EXPECT_GT(RelativeError(decoded, whole), 0) << "tiles are seen";
  }
}

class ScheduleGolden : public testing::TestWithParam<const char*> {};

TEST_P(ScheduleGolden, SigmasAndEulerStepsAgree) {
  const std::string name = GetParam();
  const Golden golden("schedule-" + name);
  auto config = FlowMatchConfig::Load(GoldenPath("schedulers/" + name + "/scheduler_config.json"));
  ASSERT_TRUE(config.ok()) << config.status();
  double sigma_error = 0, end_error = 0;
  int64_t cases = 0;
  for (int64_t steps : {1, 2, 4, 9, 20, 30}) {
    for (int64_t tokens : {15, 256, 4096}) {
      const std::string key = absl::StrCat(steps, ".", tokens);
      if (!golden.Has("sigmas." + key)) continue;
      ++cases;
      const std::vector<float> sigmas = FlowMatchSigmas(*config, steps, tokens);
      sigma_error = std::max(sigma_error, RelativeError(at::tensor(sigmas), golden["sigmas." + key]));
      at::Tensor x = golden["start." + key];
      for (size_t i = 0; i + 1 < sigmas.size(); ++i) {
        const at::Tensor t = at::full({}, sigmas[i] * 1000.0f);
        x = EulerStep(x, -0.7 * x + 0.3 * t.sin(), sigmas[i], sigmas[i + 1]);
      }
      end_error = std::max(end_error, RelativeError(x, golden["end." + key]));
    }
  }
  EXPECT_GE(cases, 15);
  EXPECT_LE(Report(name + " sigmas", sigma_error), 1e-6);
  EXPECT_LE(Report(name + " after Euler steps", end_error), 1e-4);
}
INSTANTIATE_TEST_SUITE_P(All, ScheduleGolden,
                         testing::Values("static-1", "static-3", "dynamic", "dynamic-linear",
                                         "dynamic-terminal", "static-terminal"));

// To the last bit with the kernels that made the goldens; others round the logarithms and cosines of the same
// draws in their own way.
TEST(Noise, IsThatOfTorchForTheSameSeed) {
  const Golden golden("noise");
  const double tolerance = at::get_cpu_capability() == golden.Setting("capability") ? 0 : 2e-6;
  for (const char* seed : {"0", "1", "42", "4294967303", "9223372036854775819", "18446744073709551615"}) {
    const std::vector<at::Tensor> draws = DrawNoise(std::stoull(seed), {1, 16, 6, 10}, 2);
    for (const auto& [name, draw] :
         {std::pair<const char*, at::Tensor>{"first.", draws[0]}, {"second.", draws[1]}}) {
      EXPECT_LE((draw - golden[absl::StrCat(name, seed)]).abs().max().item<double>(), tolerance)
          << name << seed;
    }
  }
}

TEST(Resize, GivesPillowsBytes) {
  const Golden golden("resize");
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    const at::Tensor from = golden[absl::StrCat("from.", i)].contiguous();
    const at::Tensor to = golden[absl::StrCat("to.", i)].contiguous();
    const std::vector<uint8_t> resized =
        ResizeLanczos(from.const_data_ptr<uint8_t>(), from.size(1), from.size(0), to.size(1), to.size(0));
    const std::vector<uint8_t> expected(to.const_data_ptr<uint8_t>(),
                                        to.const_data_ptr<uint8_t>() + to.numel());
    EXPECT_EQ(resized, expected) << i;
  }
}

}  // namespace
}  // namespace latentd
