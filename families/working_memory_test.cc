// What networks take of host memory, as counted, and what their estimates say. The architectures are the
// published ones, in full depth of levels and with every kind of block, and narrow, so that it takes seconds.
#include "families/working_memory.h"

#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/memory_account.h"
#include "families/encoders/clip_text_model.h"
#include "families/encoders/t5_encoder.h"
#include "families/flux/flux_transformer.h"
#include "families/sd/unet.h"
#include "families/vae/autoencoder_kl.h"
#include "families/vae/picture_codec.h"
#include "gtest/gtest.h"
#include "patcher/weight_view.h"

namespace latentd {
namespace {

// Pictures of this size and more are estimated closely; of smaller ones, what a network has whatever the size
// counts.
constexpr int64_t kCloseFrom = 512;
constexpr double kClose = 1.3;

WeightSet Zeros(const std::shared_ptr<const ComponentLayout>& layout, at::ScalarType type = at::kFloat) {
  std::vector<Weight> weights;
  for (const TensorDecl& tensor : layout->tensors()) weights.push_back({at::zeros(tensor.shape, type)});
  return WeightSet(layout, std::move(weights));
}

// What `compute` takes, against the estimate. `beside`: bytes of the estimate that are not looked at closely.
void Compare(const std::string& what, int64_t estimate, bool close, const std::function<void()>& compute,
             int64_t beside = 0) {
  auto account = MemoryAccount::Open();
  {
    c10::InferenceMode inference;
    MemoryAccount::Scope scope(account);
    compute();
  }
  const int64_t taken = account->peak_bytes();
  std::cout << what << ": promised " << estimate << ", taken " << taken << ", "
            << static_cast<double>(estimate) / static_cast<double>(taken) << "\n";
  EXPECT_GE(estimate, taken) << what;
  if (close) {
    EXPECT_LE(static_cast<double>(estimate - beside), kClose * static_cast<double>(taken)) << what;
  }
}

// ------------------------------------------------------------------------------------------------ denoisers

TEST(WorkingMemory, OfTheFluxTransformer) {
  FluxConfig config;
  config.double_blocks = 2;
  config.single_blocks = 2;
  config.heads = 4;
  config.head_dim = 64;
  config.axes = {16, 24, 24};
  config.text_dim = 256;
  const FluxTransformer transformer(config);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const WeightSet weights = Zeros(transformer.layout(), type);
    for (const int64_t side : {256, 512, 768, 1024}) {
      for (const int64_t text : {64, 512}) {
        if (type != at::kFloat && (side > 512 || text != 512)) continue;
        const WeightView view(weights, nullptr);
        const int64_t rows = side / 16;
        const at::Tensor t5 = at::zeros({1, text, config.text_dim}),
                         pooled = at::zeros({1, config.pooled_dim});
        const at::Tensor x = at::zeros({1, rows * rows, config.in_channels});
        Compare(absl::StrCat("flux ", toString(type), " ", side, " px, ", text, " tokens"),
                transformer.WorkingBytes(text, rows * rows, 1, {.converted = type != at::kFloat}),
                side >= kCloseFrom, [&] {
                  const FluxText prompt = transformer.PrepareText(view, t5, rows, rows);
                  const FluxConditioning conditioning = transformer.PrepareConditioning(view, pooled, 3.5);
                  transformer(view, x, transformer.Modulation(view, 0.5F, conditioning), prompt);
                });
      }
    }
  }
}

struct UNetCase {
  const char* name;
  bool sdxl;
  int64_t side, batch;
};

class UNetMemory : public testing::TestWithParam<UNetCase> {};

TEST_P(UNetMemory, IsEstimatedClosely) {
  const UNetCase& c = GetParam();
  UNetConfig config = c.sdxl ? UNetConfig::SdxlBase() : UNetConfig::Sd15();
  constexpr int64_t kNarrower = 5;
  for (UNetConfig::Level& level : config.levels) {
    level.channels /= kNarrower;
    level.heads = 2;
    for (std::vector<int64_t>* way : {&level.down, &level.up}) {
      for (int64_t& layers : *way) layers = std::min<int64_t>(layers, 2);
    }
  }
  config.middle = std::min<int64_t>(*config.middle, 2);
  config.context_dim = 64;
  if (c.sdxl) config.added_dim = 2816;
  const UNet2DCondition unet(config);
  constexpr int64_t kTokens = 77;
  const WeightSet weights = Zeros(unet.layout());
  const WeightView view(weights, nullptr);
  const int64_t side = c.side / 8;
  const at::Tensor x = at::zeros({c.batch, config.in_channels, side, side});
  const at::Tensor context = at::zeros({c.batch, kTokens, config.context_dim});
  const at::Tensor pooled = at::zeros({c.batch, 1280}), ids = at::zeros({c.batch, 6});
  Compare(absl::StrCat(c.name, " ", c.side, " px, batch of ", c.batch),
          unet.WorkingBytes(c.batch, kTokens, side, side, {}), c.side >= kCloseFrom, [&] {
            const UNetConditioning conditioning = unet.PrepareConditioning(view, context, pooled, ids);
            unet(view, x, unet.TimeEmbedding(view, 500, 1, conditioning), conditioning.context);
          });
}
INSTANTIATE_TEST_SUITE_P(All, UNetMemory,
                         testing::Values(UNetCase{"sd15", false, 256, 2}, UNetCase{"sd15", false, 512, 1},
                                         UNetCase{"sd15", false, 512, 2}, UNetCase{"sd15", false, 768, 2},
                                         UNetCase{"sdxl", true, 512, 2}, UNetCase{"sdxl", true, 768, 1},
                                         UNetCase{"sdxl", true, 1024, 2}));

// ------------------------------------------------------------------------------------------------- pictures

class VaeMemory : public testing::TestWithParam<int64_t> {
 protected:
  static AutoencoderKlConfig Config(int64_t latent_channels, int64_t width) {
    AutoencoderKlConfig config;
    config.latent_channels = latent_channels;
    config.channels = {width, 2 * width, 4 * width, 4 * width};
    config.layers_per_block = 2;
    config.groups = 8;
    config.quant_conv = config.post_quant_conv = latent_channels == 4;
    return config;
  }
};

TEST_P(VaeMemory, OfDecodingAndEncodingIsEstimatedClosely) {
  const int64_t side = GetParam();
  for (const auto& [channels, width] : std::vector<std::pair<int64_t, int64_t>>{{16, 32}, {4, 24}}) {
    const AutoencoderKl vae(Config(channels, width));
    const WeightSet weights = Zeros(vae.layout());
    for (const int64_t tile : {int64_t{0}, int64_t{256}}) {
      if (tile >= side) continue;
      // Of other widths the library takes the convolutions, and may copy or not.
      const bool close = side >= kCloseFrom && width % 16 == 0;
      const std::string what = absl::StrCat("vae ", width, " wide, ", side, " px, tiles of ", tile);
      {
        const WeightView view(weights, nullptr);
        const at::Tensor latents = at::zeros({1, channels, side / 8, side / 8});
        // The last convolution, to 3 channels, is the library's: what comes and what comes out may be copied,
        // or not.
        const int64_t part = tile == 0 ? side : tile;
        const int64_t copies = (width + 2 * 3) * part * part * int64_t{sizeof(float)};
        Compare(
            "decode " + what, vae.DecodeBytes(side, side, tile, {}), close,
            [&] {
              PictureDecoder decoder(vae, latents);
              while (!decoder.over()) ASSERT_TRUE(decoder.Slice(view, tile).ok());
            },
            copies);
      }
      if (side > 768) continue;
      const WeightView view(weights, nullptr);
      const at::Tensor image = at::zeros({side, side, 3}, at::kByte);
      Compare("encode " + what, vae.EncodeBytes(side, side, tile, {}), close, [&] {
        PictureEncoder encoder(vae, {{ResizePicture(image, side, side)}});
        while (!encoder.Slice(view, tile)) {
        }
      });
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Sides, VaeMemory, testing::Values(256, 512, 768, 1024));

// ---------------------------------------------------------------------------------------------------- texts

// Small whatever the picture: that much does not matter.
constexpr int64_t kBeside = 256 << 10;

TEST(WorkingMemory, OfTheTextEncoders) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const WeightUse use{.converted = type != at::kFloat};
    ClipTextConfig clip_config = ClipTextConfig::ClipL();
    clip_config.layers = 2;
    const ClipTextModel clip(clip_config);
    const WeightSet clip_weights = Zeros(clip.layout(), type);
    const WeightView clip_view(clip_weights, nullptr);
    Compare(
        absl::StrCat("clip ", toString(type)), clip.WorkingBytes(use), true,
        [&] { clip(clip_view, std::vector<int64_t>(static_cast<size_t>(clip_config.positions), 7)); },
        kBeside);
    for (const int64_t length : {77, 512}) {
      T5Config config;
      config.layers = 2;
      config.dim = 256;
      config.hidden = 640;
      config.gated = true;
      config.activation = Activation::kGeluTanh;
      const T5Encoder t5(config);
      const WeightSet weights = Zeros(t5.layout(), type);
      const WeightView view(weights, nullptr);
      Compare(
          absl::StrCat("t5 ", toString(type), " ", length, " tokens"), t5.WorkingBytes(length, use), true,
          [&] { t5(view, std::vector<int64_t>(static_cast<size_t>(length), 7)); }, kBeside);
    }
  }
}

}  // namespace
}  // namespace latentd
