// The denoiser of Stable Diffusion 1, 2 and XL: a UNet that reads text by cross-attention. Names and
// numerics are those of diffusers' UNet2DConditionModel. Architecture: Rombach et al. 2022, "High-Resolution
// Image Synthesis with Latent Diffusion Models"; Podell et al. 2023, "SDXL", section 2.2 (numbers about the
// picture).
//
//   UNetConditioning c = unet.PrepareConditioning(view, context, pooled, time_ids);  // once per run
//   at::Tensor time = unet.TimeEmbedding(view, timestep, guidance, c);               // once per step
//   at::Tensor output = unet(view, x, time, c.context);                              // per picture
//
// The batch of a call is that of the conditioning: 2 with classifier-free guidance, unwanted first. Any
// latent size is taken; on the way up, a map is brought to the size that its level had on the way down.
//
// Immutable after the constructor; any thread, each with a view of its own.
#ifndef LATENTD_FAMILIES_SD_UNET_H_
#define LATENTD_FAMILIES_SD_UNET_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "cache/weights/component_layout.h"
#include "families/nn/layers.h"
#include "families/nn/live_floats.h"
#include "families/sd/unet_blocks.h"
#include "families/sd/unet_config.h"
#include "patcher/weight_view.h"

namespace latentd {

// What depends on prompt and picture size alone, where the weights are.
struct UNetConditioning {
  at::Tensor context;  // [batch, tokens, context_dim]
  at::Tensor added;    // [batch, time_dim]; undefined for models without
};

class UNet2DCondition {
 public:
  explicit UNet2DCondition(const UNetConfig& config);

  const std::shared_ptr<const ComponentLayout>& layout() const { return layout_; }
  const UNetConfig& config() const { return config_; }

  // context: [batch, tokens, context_dim]; pooled: [batch, pooled_dim] and time_ids: [batch, n], both ignored
  // by models without an added embedding. In host memory or on the view's device.
  UNetConditioning PrepareConditioning(const WeightView& w, const at::Tensor& context,
                                       const at::Tensor& pooled, const at::Tensor& time_ids) const;

  // What the resnets take, [1 or batch, time_dim]; SiLU applied. `timestep`: 0 to 999. `guidance` is read by
  // models that embed it; others are guided by their caller.
  at::Tensor TimeEmbedding(const WeightView& w, float timestep, double guidance,
                           const UNetConditioning& conditioning) const;

  // Given each part's canonical name and result, in order of use.
  using Observer = std::function<void(const std::string& name, const at::Tensor& result)>;

  // x: [batch, in_channels, h, w] → [batch, out_channels, h, w].
  at::Tensor operator()(const WeightView& w, const at::Tensor& x, const at::Tensor& time_embedding,
                        const at::Tensor& context, const Observer& observer = nullptr) const;

  // Upper estimate of activation bytes of one call on latents of that size, in fp32, and with its
  // conditioning.
  int64_t WorkingBytes(int64_t batch, int64_t tokens, int64_t height, int64_t width,
                       const WeightUse& use) const;

 private:
  // A resnet, and the transformer that follows it in levels with attention.
  struct Stage {
    std::string name;  // "down_blocks.0"
    int64_t index = 0;
    UNetResnet resnet;
    std::optional<UNetTransformer> transformer;
  };
  struct Level {
    std::string name;
    std::vector<Stage> stages;
    std::optional<Conv2d> resample;
  };
  struct Call;  // one forward pass
  class Estimate;
  // With so many transformer blocks behind the resnet; 0: with no attention.
  Stage DescribeStage(ComponentLayout& layout, const std::string& level, size_t index, int64_t in,
                      const UNetConfig::Level& of, int64_t transformer_layers) const;
  void DescribeMiddle(ComponentLayout& layout);
  static at::Tensor GuidanceEmbedding(double guidance, int64_t dim);
  void DescribeDown(ComponentLayout& layout);
  void DescribeUp(ComponentLayout& layout);

  UNetConfig config_;
  std::shared_ptr<const ComponentLayout> layout_;
  EmbedderMlp time_embedding_;
  Linear guidance_embedding_;  // of models that embed it
  std::optional<EmbedderMlp> add_embedding_;
  Conv2d conv_in_, conv_out_;
  GroupNorm norm_out_;
  std::vector<Level> down_, up_;
  std::optional<Stage> middle_;
  std::optional<UNetResnet> middle_end_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_UNET_H_
