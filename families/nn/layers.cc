#include "families/nn/layers.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "families/nn/host_conv.h"
#include "families/nn/kernels.h"
#include "patcher/host_gemm.h"
#include "patcher/overlay.h"

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

namespace {

// A convolution, the fastest way. `bias` may be undefined.
at::Tensor Convolve(const WeightView& w, const at::Tensor& x, const at::Tensor& kernel,
                    const at::Tensor& bias, int64_t stride, int64_t padding) {
  const int64_t in = kernel.size(1), out = kernel.size(0), side = kernel.size(2);
  const bool own = x.is_cpu() && x.scalar_type() == at::kFloat &&
                   x.is_contiguous(at::MemoryFormat::ChannelsLast) && kernel.scalar_type() == at::kFloat &&
                   kernel.is_contiguous() && x.numel() > 0;
  const std::optional<at::Tensor> given = bias.defined() ? std::make_optional(bias) : std::nullopt;
  if (own && side == 1 && stride == 1 && padding == 0) {
    // A product of matrices, without the library's copies of both.
    const at::Tensor places = x.permute({0, 2, 3, 1});
    return HostLinear(places, kernel.view({out, in}), given).permute({0, 3, 1, 2});
  }
  const HostConvShape shape{x.size(0), in, out, x.size(2), x.size(3), stride};
  const HostConvWay way = own && side == 3 && padding == 1 ? ChooseHostConv(shape) : HostConvWay::kLibrary;
  if (way == HostConvWay::kLibrary) return at::conv2d(x, kernel, given, {stride, stride}, {padding, padding});
  const at::Tensor workspace = w.Workspace(HostConvWorkspace(way, shape));
  const at::Tensor added = bias.defined() ? bias : at::zeros({out}, x.options());
  return way == HostConvWay::kWinograd ? WinogradConv3x3(x, kernel, added, workspace)
                                       : WindowsConv3x3(x, kernel, added, stride, workspace);
}

// y[:, :, place] += up · inner[:, :, place]
void AddPlaceByPlace(at::Tensor& y, const at::Tensor& inner, const at::Tensor& up) {
  at::Tensor rows = y.permute({0, 2, 3, 1});
  if (!rows.is_contiguous()) {
    y.add_(at::conv2d(inner, up.view({up.size(0), up.size(1), 1, 1})));
    return;
  }
  at::Tensor flat = rows.view({-1, up.size(0)});
  HostAddProduct(flat, inner.permute({0, 2, 3, 1}).reshape({-1, up.size(1)}), up);
}

}  // namespace

at::Tensor Conv2d::operator()(const WeightView& w, const at::Tensor& x) const {
  at::Tensor y = Convolve(w, x, w.ComputeWeight(weight), w(bias), stride, padding);
  if (const Sidecar* beside = w.Beside(weight)) {
    AddPlaceByPlace(y, Convolve(w, x, beside->down, at::Tensor(), stride, padding), beside->up);
  }
  return y;
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

namespace {

at::Tensor Normed(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, int64_t groups,
                  double eps, bool silu) {
  const bool own_kernel = x.is_cpu() && x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat &&
                          x.numel() > 0 && x.is_contiguous(at::MemoryFormat::ChannelsLast);
  return own_kernel ? GroupNormHost(x, weight, bias, groups, eps, silu)
                    : GroupNormComposed(x, weight, bias, groups, eps, silu);
}

}  // namespace

at::Tensor GroupNorm::operator()(const WeightView& w, const at::Tensor& x) const {
  return Normed(x, w(weight), w(bias), groups, eps, /*silu=*/false);
}

at::Tensor GroupNorm::WithSilu(const WeightView& w, const at::Tensor& x) const {
  return Normed(x, w(weight), w(bias), groups, eps, /*silu=*/true);
}

at::Tensor GroupNormComposed(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                             int64_t groups, double eps, bool silu) {
  at::Tensor y = at::group_norm(x, groups, weight, bias, eps);
  return silu ? at::silu_(y) : y;
}

at::Tensor GroupNormHost(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                         int64_t groups, double eps, bool silu) {
  // Sums in fp32 over few places, and those in fp64 in a fixed order: equal for any number of threads.
  constexpr int64_t kPlaces = 256;
  const int64_t batch = x.size(0), channels = x.size(1), places = x.size(2) * x.size(3);
  const int64_t parts = (places + kPlaces - 1) / kPlaces, of_group = channels / groups;
  const at::Tensor sums = at::empty({batch * parts, 2, channels}, x.options());
  const at::Tensor scales = at::empty({batch, 2, channels}, x.options());
  at::Tensor y = at::empty_like(x);
  const float *from = x.const_data_ptr<float>(), *scaled = weight.const_data_ptr<float>(),
              *shifted = bias.const_data_ptr<float>();
  float *sum = sums.mutable_data_ptr<float>(), *scale = scales.mutable_data_ptr<float>(),
        *to = y.mutable_data_ptr<float>();
  const auto rows_of = [&](int64_t part) { return std::min(kPlaces, places - part % parts * kPlaces); };
  const auto start_of = [&](int64_t part) {
    return (part / parts * places + part % parts * kPlaces) * channels;
  };
  const int64_t grain = std::max<int64_t>(1, kKernelGrain / (kPlaces * channels));
  at::parallel_for(0, batch * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      float* of_part = sum + part * 2 * channels;
      ChannelSumsKernel(from + start_of(part), rows_of(part), channels, of_part, of_part + channels);
    }
  });
  for (int64_t map = 0; map < batch; ++map) {
    float* of_map = scale + map * 2 * channels;
    for (int64_t group = 0; group < groups; ++group) {
      double total = 0, squares = 0;
      for (int64_t part = map * parts; part < (map + 1) * parts; ++part) {
        const float* of_part = sum + part * 2 * channels + group * of_group;
        for (int64_t c = 0; c < of_group; ++c) {
          total += of_part[c];
          squares += of_part[channels + c];
        }
      }
      const double count = static_cast<double>(places * of_group), mean = total / count;
      const double rstd = 1 / std::sqrt(std::max(0.0, squares / count - mean * mean) + eps);
      for (int64_t c = group * of_group; c < (group + 1) * of_group; ++c) {
        of_map[c] = static_cast<float>(scaled[c] * rstd);
        of_map[channels + c] = static_cast<float>(shifted[c] - mean * rstd * scaled[c]);
      }
    }
  }
  at::parallel_for(0, batch * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const float* of_map = scale + part / parts * 2 * channels;
      ScaleShiftKernel(from + start_of(part), of_map, of_map + channels, to + start_of(part), rows_of(part),
                       channels, silu);
    }
  });
  return y;
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

at::Tensor GatedGelu(const at::Tensor& x) {
  const bool own_kernel = x.is_cpu() && x.scalar_type() == at::kFloat && x.is_contiguous() && x.numel() > 0;
  if (!own_kernel) return GatedGeluComposed(x);
  std::vector<int64_t> shape = x.sizes().vec();
  const int64_t width = shape.back(), dim = width / 2;
  shape.back() = dim;
  at::Tensor y = at::empty(shape, x.options());
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  at::parallel_for(0, x.numel() / width, std::max<int64_t>(1, kKernelGrain / width),
                   [&](int64_t begin, int64_t end) {
                     GatedGeluKernel(from + begin * width, to + begin * dim, end - begin, dim);
                   });
  return y;
}

at::Tensor GatedGeluComposed(const at::Tensor& x) {
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  return at::gelu(halves[1]).mul_(halves[0]);
}

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
