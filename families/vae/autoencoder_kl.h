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
#include <functional>
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
#include "families/vae/tiling.h"
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
  ~AutoencoderKl();
  AutoencoderKl(const AutoencoderKl&) = delete;
  AutoencoderKl& operator=(const AutoencoderKl&) = delete;

  const std::shared_ptr<const ComponentLayout>& layout() const { return layout_; }
  const AutoencoderKlConfig& config() const { return config_; }

  struct Posterior {
    at::Tensor mean, std;
    at::Tensor Sample(const at::Tensor& noise) const;
  };
  // Multiplications and additions that a slice has at most, where a stage has no more by itself: some tenths
  // of a second on a few cores, and less than a denoising step of the models that have such a VAE.
  static constexpr double kSliceFlops = 5e10;

  // One picture's or latents' way through the network, a slice at a time. No longer than its model; one
  // thread at a time.
  class Pass {
   public:
    // Does the next slice: stages of the network for one tile, as many as have `flops` together and one at
    // least. True: it was the last one. After a slice that threw, the pass is good for nothing.
    bool Slice(const WeightView& w, double flops = kSliceFlops);
    // What came of it. REQUIRES: Slice returned true. Once.
    at::Tensor Take() { return tiles_.Take(); }

   private:
    friend class AutoencoderKl;
    struct Stage;
    Pass(const std::vector<Stage>& stages, TileWalk tiles) : stages_(stages), tiles_(std::move(tiles)) {}

    const std::vector<Stage>& stages_;
    TileWalk tiles_;
    at::Tensor x_;     // before the next stage; undefined before the first
    size_t next_ = 0;  // stage
  };
  // Of pictures [1, 3, H, W] to moments, of latents [1, C, h, w] to pictures. `tile`: pixels of a tile's
  // side, a multiple of 4·scale(); 0: the whole picture at once.
  Pass BeginEncode(const at::Tensor& picture, int64_t tile = 0) const;
  Pass BeginDecode(const at::Tensor& latents, int64_t tile = 0) const;
  static Posterior PosteriorOf(const at::Tensor& moments);

  // All slices at once.
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
    double Flops(const ComponentLayout& layout) const;  // of a place of what comes out
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
  };
  struct Level {
    std::vector<Resnet> resnets;
    std::optional<Conv2d> resample;  // absent in the last level
  };
  Middle DescribeMiddle(ComponentLayout& layout, const std::string& name) const;
  void DescribeEncoder(ComponentLayout& layout);
  void DescribeDecoder(ComponentLayout& layout);
  static at::Tensor OfChannels(const std::vector<float>& values, const at::Tensor& like);  // [1, n, 1, 1]
  // The forward passes as lists.
  void ListEncoder();
  void ListDecoder();
  void ListMiddle(std::vector<Pass::Stage>& stages, const Middle& middle, double places);
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
  std::vector<Pass::Stage> encode_stages_, decode_stages_;  // point to the layers above
};

// A part of a forward pass that is done in one go.
struct AutoencoderKl::Pass::Stage {
  std::function<at::Tensor(const WeightView&, const at::Tensor&)> run;
  double flops_per_place;           // of what comes out
  double flops_per_two_places = 0;  // of attention: for each place and each that it looks at
  double places;                    // of what comes out, for each place that went into the network
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
