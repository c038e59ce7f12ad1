// FLUX.1's transformer: double blocks, in which text and picture have weights of their own and attend to
// each other, then single blocks on both together. Names and numerics are those of diffusers'
// FluxTransformer2DModel; the blocks' design is that of Esser et al. 2024 (MM-DiT) and of Dehghani et al.
// 2023, "Scaling Vision Transformers to 22 Billion Parameters" (attention beside the MLP).
//
// One picture at a time: tokens are [1, tokens, dim]. Pictures of a batch are run one after the other, so
// that a picture's bytes do not depend on its batch; what does not depend on the picture is computed once.
//
//   FluxText text = transformer.PrepareText(view, t5, rows, columns);       // once per run
//   FluxConditioning c = transformer.PrepareConditioning(view, pooled, g);  // once per run
//   at::Tensor vec = transformer.Modulation(view, sigma, c);                // once per step
//   at::Tensor velocity = transformer(view, x, vec, text);                  // per picture
//
// Immutable after the constructor; any thread, each with a view of its own.
#ifndef LATENTD_FAMILIES_FLUX_FLUX_TRANSFORMER_H_
#define LATENTD_FAMILIES_FLUX_FLUX_TRANSFORMER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "cache/weights/component_layout.h"
#include "families/flux/flux_config.h"
#include "families/nn/layers.h"
#include "families/nn/live_floats.h"
#include "patcher/weight_view.h"

namespace latentd {

// What a joint sequence of text and picture tokens looks like to a double block. Both parts lie in one
// buffer, text first, so that single blocks need not join them.
struct FluxTokens {
  at::Tensor joint;        // [1, text + picture, dim], contiguous
  at::Tensor text, image;  // views of it
  static FluxTokens Join(const at::Tensor& text, const at::Tensor& image);
};

// A linear layer on the modulation input whose result is cut into vectors of `dim`.
struct FluxModulation {
  Linear linear;
  int64_t dim = 0;
};

// One of a double block's two sides.
struct FluxStream {
  FluxModulation modulation;  // shift, scale, gate of attention; shift, scale, gate of the MLP
  Linear q, k, v, out;
  RmsNorm norm_q, norm_k;
  FeedForward mlp;
};

struct FluxDoubleBlock {
  FluxStream image, text;
  int64_t head_dim = 0;
  static FluxDoubleBlock Describe(ComponentLayout& layout, const std::string& name, const FluxConfig& config);
  // Changes the tokens in place. `vec`: [1, dim], SiLU already applied. `rope`: see RopeTable.
  void operator()(const WeightView& w, FluxTokens& tokens, const at::Tensor& vec,
                  const at::Tensor& rope) const;
};

struct FluxSingleBlock {
  FluxModulation modulation;  // shift, scale, gate
  Linear q, k, v, mlp, out;
  RmsNorm norm_q, norm_k;
  int64_t head_dim = 0;
  static FluxSingleBlock Describe(ComponentLayout& layout, const std::string& name, const FluxConfig& config);
  // Changes the tokens in place; with `image_only`, the picture's alone: nobody reads the text that the last
  // block would make.
  void operator()(const WeightView& w, FluxTokens& tokens, const at::Tensor& vec, const at::Tensor& rope,
                  bool image_only = false) const;
};

// What depends on the prompt and the picture's size alone.
struct FluxText {
  at::Tensor tokens;  // [1, text, dim]
  at::Tensor rope;    // of text and picture together
};

struct FluxConditioning {
  at::Tensor guidance;  // [1, dim]; undefined for models without a guidance embedding
  at::Tensor pooled;    // [1, dim]
};

class FluxTransformer {
 public:
  explicit FluxTransformer(const FluxConfig& config);

  const std::shared_ptr<const ComponentLayout>& layout() const { return layout_; }
  const FluxConfig& config() const { return config_; }
  const std::vector<FluxDoubleBlock>& double_blocks() const { return double_blocks_; }
  const std::vector<FluxSingleBlock>& single_blocks() const { return single_blocks_; }

  // t5: [1, text, text_dim], in host memory or on the view's device; rows × columns picture tokens.
  FluxText PrepareText(const WeightView& w, const at::Tensor& t5, int64_t rows, int64_t columns) const;

  // pooled: [1, pooled_dim], in either place. `guidance` is ignored by models without a guidance embedding.
  FluxConditioning PrepareConditioning(const WeightView& w, const at::Tensor& pooled, double guidance) const;

  // The input of all modulations, [1, dim], at noise level `sigma`; SiLU applied.
  at::Tensor Modulation(const WeightView& w, float sigma, const FluxConditioning& conditioning) const;

  // Channels of a token that the view's weights take: in_channels, or more where a LoRA grows them.
  int64_t Inputs(const WeightView& w) const { return w.Stored(x_embedder_.weight).size(1); }

  // x: [1, rows · columns, Inputs(w)] → velocity [1, rows · columns, out_channels].
  at::Tensor operator()(const WeightView& w, const at::Tensor& x, const at::Tensor& vec,
                        const FluxText& text) const;

  // Upper estimate of activation bytes of one call, in fp32, with what `prompts` prompts are made into before
  // it.
  int64_t WorkingBytes(int64_t text_tokens, int64_t image_tokens, int64_t prompts,
                       const WeightUse& use) const;

 private:
  FluxConfig config_;
  std::shared_ptr<const ComponentLayout> layout_;
  Linear x_embedder_, context_embedder_;
  EmbedderMlp time_embedder_, text_embedder_;
  std::optional<EmbedderMlp> guidance_embedder_;
  std::vector<FluxDoubleBlock> double_blocks_;
  std::vector<FluxSingleBlock> single_blocks_;
  FluxModulation norm_out_;  // scale, shift
  Linear proj_out_;
};

// [N, C, h, w] latents ↔ [N, h/2 · w/2, 4·C] tokens of 2×2 places, channel first. Copies.
at::Tensor PackLatents(const at::Tensor& latents);
at::Tensor UnpackLatents(const at::Tensor& tokens, int64_t height, int64_t width);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_FLUX_FLUX_TRANSFORMER_H_
