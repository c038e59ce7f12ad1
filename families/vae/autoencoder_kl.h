// The convolutional picture autoencoder of SD, SDXL, SD3 and FLUX.1. Architecture: Rombach et al. 2022,
// "High-Resolution Image Synthesis with Latent Diffusion Models"; names and numerics are those of
// diffusers' AutoencoderKL.
//
// Pictures are [batch, 3, height, width] in [-1, 1], latents [batch, latent_channels, height/s, width/s] as
// the encoder gives them; scaling_factor and the like are applied by ToModel and FromModel alone.
//
// Immutable after the constructor; any thread, each with a view of its own.
#ifndef LATENTD_FAMILIES_VAE_AUTOENCODER_KL_H_
#define LATENTD_FAMILIES_VAE_AUTOENCODER_KL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "cache/weights/component_layout.h"
#include "cache/weights/key_map.h"
#include "cache/weights/weight_files.h"
#include "families/nn/layers.h"
#include "families/nn/live_floats.h"
#include "patcher/weight_view.h"

namespace latentd {

struct AutoencoderKlConfig {
  int64_t in_channels = 3, out_channels = 3, latent_channels = 4;
  std::vector<int64_t> channels = {64};  // per level, from full resolution down
  int64_t layers_per_block = 1, groups = 32;
  bool mid_attention = true, quant_conv = true, post_quant_conv = true;
  double scaling_factor = 0.18215, shift_factor = 0;
  // Of each latent channel; empty, or both of latent_channels entries. Pipelines that do not read them clear
  // them.
  std::vector<float> latents_mean, latents_std;

  // Pixels per latent place and direction.
  int64_t scale() const { return int64_t{1} << (channels.size() - 1); }

  // Of a config.json. Errors: those of JsonConfig; UNSUPPORTED_MODEL for other block types.
  static absl::StatusOr<AutoencoderKlConfig> Load(const std::string& path);
};

class AutoencoderKl {
 public:
  explicit AutoencoderKl(const AutoencoderKlConfig& config);

  const std::shared_ptr<const ComponentLayout>& layout() const { return layout_; }
  const AutoencoderKlConfig& config() const { return config_; }

  struct Posterior {
    at::Tensor mean, std;
    at::Tensor Sample(const at::Tensor& noise) const;
  };
  // `tile`: pixels of a tile's side, a multiple of 4·scale(); 0: the whole picture at once.
  Posterior Encode(const WeightView& w, const at::Tensor& picture, int64_t tile = 0) const;
  at::Tensor Decode(const WeightView& w, const at::Tensor& latents, int64_t tile = 0) const;

  // (z − shift − mean)·scale / std, and back.
  at::Tensor ToModel(const at::Tensor& latents) const;
  at::Tensor FromModel(const at::Tensor& latents) const;

  // Upper estimates of activation bytes for one picture of that size, in fp32, from its pixels or latents in
  // host memory to what becomes of them there.
  int64_t EncodeBytes(int64_t width, int64_t height, int64_t tile, const WeightUse& use) const;
  int64_t DecodeBytes(int64_t width, int64_t height, int64_t tile, const WeightUse& use) const;

 private:
  struct Resnet {
    GroupNorm norm1, norm2;
    Conv2d conv1, conv2;
    std::optional<Conv2d> shortcut;
    static Resnet Describe(ComponentLayout& layout, const std::string& name, int64_t in, int64_t out,
                           int64_t groups);
    at::Tensor operator()(const WeightView& w, const at::Tensor& x) const;
  };
  struct SelfAttention {
    GroupNorm norm;
    Linear q, k, v, out;
    at::Tensor operator()(const WeightView& w, const at::Tensor& x) const;
  };
  struct Middle {
    Resnet first, second;
    std::optional<SelfAttention> attention;
    at::Tensor operator()(const WeightView& w, const at::Tensor& x) const;
  };
  struct Level {
    std::vector<Resnet> resnets;
    std::optional<Conv2d> resample;  // absent in the last level
  };
  Middle DescribeMiddle(ComponentLayout& layout, const std::string& name) const;
  void DescribeEncoder(ComponentLayout& layout);
  void DescribeDecoder(ComponentLayout& layout);
  static at::Tensor OfChannels(const std::vector<float>& values, const at::Tensor& like);  // [1, n, 1, 1]
  at::Tensor EncodeMoments(const WeightView& w, const at::Tensor& picture) const;
  at::Tensor DecodeWhole(const WeightView& w, const at::Tensor& latents) const;
  class Estimate;

  AutoencoderKlConfig config_;
  std::shared_ptr<const ComponentLayout> layout_;
  struct {
    Conv2d in, out;
    std::vector<Level> levels;
    Middle middle;
    GroupNorm norm_out;
  } encoder_, decoder_;
  std::optional<Conv2d> quant_conv_, post_quant_conv_;
};

// How a VAE file names its tensors: canonical, with diffusers' old attention names, or in the LDM layout
// (ae.safetensors, first_stage_model.…).
struct VaeFileLayout {
  const KeyMap* key_map = nullptr;  // lives as long as the program
  std::string prefix;
};
VaeFileLayout DetectVaeFileLayout(const WeightFiles& files, const AutoencoderKlConfig& config);

// Whether a checkpoint of a whole model has a VAE, where DetectVaeFileLayout finds it.
bool HasVae(const WeightFiles& checkpoint);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_VAE_AUTOENCODER_KL_H_
