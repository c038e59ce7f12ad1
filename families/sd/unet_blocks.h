// What a Stable Diffusion UNet is built of: residual convolutions that take the time, and transformers over
// the places of a feature map that read the text. Names and numerics are those of diffusers' ResnetBlock2D,
// Transformer2DModel and BasicTransformerBlock; the design is that of Rombach et al. 2022, "High-Resolution
// Image Synthesis with Latent Diffusion Models", section 3.3, with the gated feed-forward of Shazeer 2020,
// "GLU Variants Improve Transformer".
//
// Feature maps are [batch, channels, h, w], in channels-last order in host memory: there, a convolution is
// faster in it and a transformer's tokens need no copy. Immutable after Describe; any thread, each with a
// view of its own.
#ifndef LATENTD_FAMILIES_SD_UNET_BLOCKS_H_
#define LATENTD_FAMILIES_SD_UNET_BLOCKS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "cache/weights/component_layout.h"
#include "families/nn/layers.h"
#include "families/sd/unet_config.h"
#include "patcher/weight_view.h"

namespace latentd {

struct UNetResnet {
  GroupNorm norm1, norm2;
  Conv2d conv1, conv2;
  Linear time;
  std::optional<Conv2d> shortcut;
  static UNetResnet Describe(ComponentLayout& layout, const std::string& name, int64_t in, int64_t out,
                             const UNetConfig& config);
  // `time_embedding`: [batch, time_dim], SiLU already applied.
  at::Tensor operator()(const WeightView& w, const at::Tensor& x, const at::Tensor& time_embedding) const;
};

struct UNetAttention {
  Linear q, k, v, out;
  int64_t head_dim = 0;
  static UNetAttention Describe(ComponentLayout& layout, const std::string& name, int64_t dim,
                                int64_t context_dim, int64_t heads);
  // x: [batch, tokens, dim], context: [batch, tokens', context_dim].
  at::Tensor operator()(const WeightView& w, const at::Tensor& x, const at::Tensor& context) const;
};

// Self-attention, attention to the text, feed-forward; each on a norm, each added.
struct UNetTransformerBlock {
  LayerNorm norm1, norm2, norm3;
  UNetAttention self_attention, cross_attention;
  Linear ff_in, ff_out;
  static UNetTransformerBlock Describe(ComponentLayout& layout, const std::string& name, int64_t dim,
                                       int64_t context_dim, int64_t heads);
  // Changes x in place.
  void operator()(const WeightView& w, at::Tensor& x, const at::Tensor& context) const;
};

// A transformer over the places of a feature map, added to it.
struct UNetTransformer {
  GroupNorm norm;
  std::variant<Linear, Conv2d> in, out;
  std::vector<UNetTransformerBlock> blocks;
  // Continues the layout's block with the way in, and begins one for each transformer block.
  static UNetTransformer Describe(ComponentLayout& layout, const std::string& name, int64_t dim,
                                  int64_t heads, int64_t blocks, const UNetConfig& config);
  at::Tensor operator()(const WeightView& w, const at::Tensor& x, const at::Tensor& context) const;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_UNET_BLOCKS_H_
