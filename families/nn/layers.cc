#include "families/nn/layers.h"

#include <algorithm>
#include <cmath>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "families/nn/kernels.h"

namespace latentd {

Linear Linear::Describe(ComponentLayout& layout, const std::string& name, int64_t in, int64_t out,
                        bool with_bias) {
  Linear linear;
  linear.weight = layout.Add(name + ".weight", {out, in});
  if (with_bias) linear.bias = layout.Add(name + ".bias", {out});
  return linear;
}

Conv2d Conv2d::Describe(ComponentLayout& layout, const std::string& name, int64_t in, int64_t out,
                        int64_t kernel, int64_t stride, int64_t padding) {
  Conv2d conv;
  conv.weight = layout.Add(name + ".weight", {out, in, kernel, kernel});
  conv.bias = layout.Add(name + ".bias", {out});
  conv.stride = stride;
  conv.padding = padding;
  return conv;
}

at::Tensor Conv2d::operator()(const WeightView& w, const at::Tensor& x) const {
  return at::conv2d(x, w(weight), w(bias), {stride, stride}, {padding, padding});
}

LayerNorm LayerNorm::Describe(ComponentLayout& layout, const std::string& name, int64_t dim, double eps) {
  LayerNorm norm;
  norm.weight = layout.Add(name + ".weight", {dim});
  norm.bias = layout.Add(name + ".bias", {dim});
  norm.dim = dim;
  norm.eps = eps;
  return norm;
}

at::Tensor LayerNorm::operator()(const WeightView& w, const at::Tensor& x) const {
  return at::layer_norm(x, {dim}, w(weight), w(bias), eps);
}

RmsNorm RmsNorm::Describe(ComponentLayout& layout, const std::string& name, int64_t dim, double eps) {
  RmsNorm norm;
  norm.weight = layout.Add(name + ".weight", {dim});
  norm.dim = dim;
  norm.eps = eps;
  return norm;
}

at::Tensor RmsNorm::operator()(const WeightView& w, const at::Tensor& x) const {
  return at::rms_norm(x, {dim}, w(weight), eps);
}

GroupNorm GroupNorm::Describe(ComponentLayout& layout, const std::string& name, int64_t channels,
                              int64_t groups, double eps) {
  GroupNorm norm;
  norm.weight = layout.Add(name + ".weight", {channels});
  norm.bias = layout.Add(name + ".bias", {channels});
  norm.groups = groups;
  norm.eps = eps;
  return norm;
}

at::Tensor GroupNorm::operator()(const WeightView& w, const at::Tensor& x) const {
  return at::group_norm(x, groups, w(weight), w(bias), eps);
}

Embedding Embedding::Describe(ComponentLayout& layout, const std::string& name, int64_t count, int64_t dim) {
  return {layout.Add(name + ".weight", {count, dim})};
}

at::Tensor Embedding::operator()(const WeightView& w, const at::Tensor& ids) const {
  return w.Rows(weight, ids);
}

at::Tensor ActivateInPlace(Activation kind, at::Tensor x) {
  switch (kind) {
    case Activation::kGeluTanh:
      GeluTanhTo(x, x);
      return x;
    case Activation::kGeluErf:
      return at::gelu_(x);
    case Activation::kQuickGelu:
      return x.mul_(at::sigmoid(x * 1.702));
    case Activation::kRelu:
      return x.relu_();
    case Activation::kSilu:
      return at::silu_(x);
  }
  return x;
}

void GeluTanhTo(at::Tensor out, const at::Tensor& x) {
  const bool own_kernel = x.is_cpu() && out.is_cpu() && x.scalar_type() == at::kFloat && x.is_contiguous() &&
                          out.stride(-1) == 1 && out.numel() > 0 &&
                          (out.is_contiguous() || (out.dim() == 3 && out.size(0) == 1));
  if (!own_kernel) {
    GeluTanhComposed(out, x);
    return;
  }
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const int64_t stride = out.is_contiguous() ? width : out.stride(-2);
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, kKernelGrain / width);
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) GeluTanhKernel(from + row * width, to + row * stride, width);
  });
}

void GeluTanhComposed(at::Tensor out, const at::Tensor& x) { at::gelu_out(out, x, "tanh"); }

at::Tensor FeedForward::operator()(const WeightView& w, const at::Tensor& x) const {
  return out(w, ActivateInPlace(activation, in(w, x)));
}

EmbedderMlp EmbedderMlp::Describe(ComponentLayout& layout, const std::string& name, int64_t in, int64_t out) {
  return {Linear::Describe(layout, name + ".linear_1", in, out),
          Linear::Describe(layout, name + ".linear_2", out, out)};
}

at::Tensor EmbedderMlp::operator()(const WeightView& w, const at::Tensor& x) const {
  return linear_2(w, ActivateInPlace(Activation::kSilu, linear_1(w, x)));
}

at::Tensor SinusoidalEmbedding(float value, int64_t dim, at::Device device, double max_period) {
  const int64_t half = dim / 2;
  at::Tensor angles = at::arange(half, at::TensorOptions(at::kFloat).device(device))
                          .mul_(-std::log(max_period))
                          .div_(static_cast<double>(half));
  angles = angles.exp_().mul_(value).unsqueeze_(0);
  return at::cat({angles.cos(), angles.sin()}, -1);
}

at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options) {
  std::optional<at::Tensor> bias;
  if (options.bias.defined()) bias = options.bias;
  std::optional<double> scale;
  if (options.scale != 0) scale = options.scale;
  at::Tensor y =
      at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias,
                                       /*dropout_p=*/0.0, options.causal, scale);
  return y.transpose(1, 2).flatten(2);
}

at::Tensor SplitHeads(const at::Tensor& x, int64_t head_dim) { return x.unflatten(-1, {-1, head_dim}); }

}  // namespace latentd
