// The layers that all networks are made of: small structs of Slots. Describing a layer adds its tensors to a
// ComponentLayout under the names of diffusers and transformers; calling it reads them through a WeightView.
// No layer holds a tensor, and none knows of LoRAs or devices.
//
//   ComponentLayout layout;
//   const Linear to_q = Linear::Describe(layout, "transformer_blocks.0.attn.to_q", 3072, 3072);
//   at::Tensor q = to_q(view, x);                                  // x [batch, tokens, 3072]
//
// Immutable after Describe, so one network is called from any number of threads, each with a view of its
// own. Activations are in the view's compute type and on its device. Shape errors, and tensors on another
// device, are bugs and end in a c10::Error.
#ifndef LATENTD_FAMILIES_NN_LAYERS_H_
#define LATENTD_FAMILIES_NN_LAYERS_H_

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"
#include "cache/weights/component_layout.h"
#include "patcher/weight_view.h"

namespace latentd {

// y = x·Wᵀ + b on the last dimension, with whatever LoRAs the view has for it.
struct Linear {
  Slot weight, bias;
  static Linear Describe(ComponentLayout& layout, const std::string& name, int64_t in, int64_t out,
                         bool with_bias = true);
  at::Tensor operator()(const WeightView& w, const at::Tensor& x) const { return w.Linear(weight, bias, x); }
};

// x [batch, in, h, w] → [batch, out, h', w'], with whatever LoRAs the view has for it. In host memory fastest
// with channels last; so is its result then.
struct Conv2d {
  Slot weight, bias;
  int64_t stride = 1, padding = 0;
  static Conv2d Describe(ComponentLayout& layout, const std::string& name, int64_t in, int64_t out,
                         int64_t kernel, int64_t stride = 1, int64_t padding = 0);
  at::Tensor operator()(const WeightView& w, const at::Tensor& x) const;
};

// (x − mean) / sqrt(var + eps) · weight + bias over the last dimension; variance is the biased one.
struct LayerNorm {
  Slot weight, bias;
  int64_t dim = 0;
  double eps = 1e-5;
  static LayerNorm Describe(ComponentLayout& layout, const std::string& name, int64_t dim, double eps);
  at::Tensor operator()(const WeightView& w, const at::Tensor& x) const;
};

// x · rsqrt(mean(x²) + eps) · weight over the last dimension.
struct RmsNorm {
  Slot weight;
  int64_t dim = 0;
  double eps = 1e-6;
  static RmsNorm Describe(ComponentLayout& layout, const std::string& name, int64_t dim, double eps);
  at::Tensor operator()(const WeightView& w, const at::Tensor& x) const;
};

// Over channel groups of x [batch, channels, h, w]. A kernel of our own in host memory, with channels last;
// GroupNormComposed, of ATen's operators, elsewhere.
struct GroupNorm {
  Slot weight, bias;
  int64_t groups = 32;
  double eps = 1e-6;
  static GroupNorm Describe(ComponentLayout& layout, const std::string& name, int64_t channels,
                            int64_t groups, double eps);
  at::Tensor operator()(const WeightView& w, const at::Tensor& x) const;
  // SiLU of it, in the same passes.
  at::Tensor WithSilu(const WeightView& w, const at::Tensor& x) const;
};
at::Tensor GroupNormHost(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                         int64_t groups, double eps, bool silu);
at::Tensor GroupNormComposed(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                             int64_t groups, double eps, bool silu);

// Rows of a table: ids int64 [...] → [..., dim]. Takes the rows first and converts what it took. `ids` may be
// in host memory, where they are made.
struct Embedding {
  Slot weight;
  static Embedding Describe(ComponentLayout& layout, const std::string& name, int64_t count, int64_t dim);
  at::Tensor operator()(const WeightView& w, const at::Tensor& ids) const;
};

enum class Activation { kGeluTanh, kGeluErf, kQuickGelu, kRelu, kSilu };

// Applies `kind`; may overwrite `x` and return it. Quick GELU is x·sigmoid(1.702x).
at::Tensor ActivateInPlace(Activation kind, at::Tensor x);

// out = gelu_tanh(x). `out` has x's shape and may be a slice of wider rows. A kernel of our own in host
// memory; GeluTanhComposed, which is ATen's, elsewhere.
void GeluTanhTo(at::Tensor out, const at::Tensor& x);
void GeluTanhComposed(at::Tensor out, const at::Tensor& x);

// a · gelu(b) for x = [a | b] on the last dimension, with erf. A kernel of our own in host memory.
at::Tensor GatedGelu(const at::Tensor& x);
at::Tensor GatedGeluComposed(const at::Tensor& x);

// out(act(in(x))).
struct FeedForward {
  Linear in, out;
  Activation activation = Activation::kGeluTanh;
  at::Tensor operator()(const WeightView& w, const at::Tensor& x) const;
};

// Linear → SiLU → Linear: what turns a sinusoid or a pooled text into a modulation input.
struct EmbedderMlp {
  Linear linear_1, linear_2;
  static EmbedderMlp Describe(ComponentLayout& layout, const std::string& name, int64_t in, int64_t out);
  at::Tensor operator()(const WeightView& w, const at::Tensor& x) const;
};

// [cos(v·f_i) | sin(v·f_i)] with f_i = max_period^(−i/half), i < half = dim/2, in fp32, computed on `device`.
// v: a number. → [1, dim].
at::Tensor SinusoidalEmbedding(float value, int64_t dim, at::Device device, double max_period = 10000);

// softmax(q·kᵀ · scale + bias)·v. q, k, v: [batch, tokens, heads, head_dim]; `bias`, where defined, is added
// to the scores, [1 or batch, heads, tokens, tokens]. → [batch, tokens, heads · head_dim].
struct AttentionOptions {
  at::Tensor bias;
  bool causal = false;
  double scale = 0;  // 0: 1/sqrt(head_dim)
};
at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options = {});

// x [..., heads · dim] → [..., heads, dim], without a copy.
at::Tensor SplitHeads(const at::Tensor& x, int64_t head_dim);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_NN_LAYERS_H_
