#include "families/sd/unet_blocks.h"

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"

namespace latentd {
namespace {

constexpr double kTransformerNormEps = 1e-6, kLayerNormEps = 1e-5;
constexpr int64_t kFeedForwardFactor = 4;

// [batch, channels, h, w] ↔ [batch, h·w, channels]; no copy where channels are last in memory.
at::Tensor ToTokens(const at::Tensor& x) { return x.permute({0, 2, 3, 1}).flatten(1, 2); }
at::Tensor ToMap(const at::Tensor& tokens, int64_t height, int64_t width) {
  return tokens.unflatten(1, {height, width}).permute({0, 3, 1, 2});
}

}  // namespace

UNetResnet UNetResnet::Describe(ComponentLayout& layout, const std::string& name, int64_t in, int64_t out,
                                const UNetConfig& config) {
  UNetResnet resnet;
  resnet.norm1 = GroupNorm::Describe(layout, name + ".norm1", in, config.groups, config.norm_eps);
  resnet.conv1 = Conv2d::Describe(layout, name + ".conv1", in, out, 3, 1, 1);
  resnet.time = Linear::Describe(layout, name + ".time_emb_proj", config.time_dim(), out);
  resnet.norm2 = GroupNorm::Describe(layout, name + ".norm2", out, config.groups, config.norm_eps);
  resnet.conv2 = Conv2d::Describe(layout, name + ".conv2", out, out, 3, 1, 1);
  if (in != out) resnet.shortcut = Conv2d::Describe(layout, name + ".conv_shortcut", in, out, 1);
  return resnet;
}

at::Tensor UNetResnet::operator()(const WeightView& w, const at::Tensor& x,
                                  const at::Tensor& time_embedding) const {
  at::Tensor h = conv1(w, norm1.WithSilu(w, x));
  h = h.add_(time(w, time_embedding).unsqueeze(-1).unsqueeze(-1));
  h = conv2(w, norm2.WithSilu(w, h));
  return h.add_(shortcut ? (*shortcut)(w, x) : x);
}

UNetAttention UNetAttention::Describe(ComponentLayout& layout, const std::string& name, int64_t dim,
                                      int64_t context_dim, int64_t heads) {
  return {Linear::Describe(layout, name + ".to_q", dim, dim, /*with_bias=*/false),
          Linear::Describe(layout, name + ".to_k", context_dim, dim, /*with_bias=*/false),
          Linear::Describe(layout, name + ".to_v", context_dim, dim, /*with_bias=*/false),
          Linear::Describe(layout, name + ".to_out.0", dim, dim), dim / heads};
}

at::Tensor UNetAttention::operator()(const WeightView& w, const at::Tensor& x,
                                     const at::Tensor& context) const {
  return out(w, Attention(SplitHeads(q(w, x), head_dim), SplitHeads(k(w, context), head_dim),
                          SplitHeads(v(w, context), head_dim)));
}

UNetTransformerBlock UNetTransformerBlock::Describe(ComponentLayout& layout, const std::string& name,
                                                    int64_t dim, int64_t context_dim, int64_t heads) {
  UNetTransformerBlock block;
  block.norm1 = LayerNorm::Describe(layout, name + ".norm1", dim, kLayerNormEps);
  block.self_attention = UNetAttention::Describe(layout, name + ".attn1", dim, dim, heads);
  block.norm2 = LayerNorm::Describe(layout, name + ".norm2", dim, kLayerNormEps);
  block.cross_attention = UNetAttention::Describe(layout, name + ".attn2", dim, context_dim, heads);
  block.norm3 = LayerNorm::Describe(layout, name + ".norm3", dim, kLayerNormEps);
  block.ff_in = Linear::Describe(layout, name + ".ff.net.0.proj", dim, 2 * kFeedForwardFactor * dim);
  block.ff_out = Linear::Describe(layout, name + ".ff.net.2", kFeedForwardFactor * dim, dim);
  return block;
}

void UNetTransformerBlock::operator()(const WeightView& w, at::Tensor& x, const at::Tensor& context) const {
  const at::Tensor normed = norm1(w, x);
  x.add_(self_attention(w, normed, normed));
  x.add_(cross_attention(w, norm2(w, x), context));
  x.add_(ff_out(w, GatedGelu(ff_in(w, norm3(w, x)))));
}

UNetTransformer UNetTransformer::Describe(ComponentLayout& layout, const std::string& name, int64_t dim,
                                          int64_t heads, int64_t blocks, const UNetConfig& config) {
  auto projection = [&](const std::string& end) -> std::variant<Linear, Conv2d> {
    if (config.linear_projection) return Linear::Describe(layout, name + end, dim, dim);
    return Conv2d::Describe(layout, name + end, dim, dim, 1);
  };
  UNetTransformer transformer;
  transformer.norm = GroupNorm::Describe(layout, name + ".norm", dim, config.groups, kTransformerNormEps);
  transformer.in = projection(".proj_in");
  for (int64_t i = 0; i < blocks; ++i) {
    const std::string block = absl::StrCat(name, ".transformer_blocks.", i);
    layout.BeginBlock(block);
    transformer.blocks.push_back(
        UNetTransformerBlock::Describe(layout, block, dim, config.context_dim, heads));
  }
  transformer.out = projection(".proj_out");
  return transformer;
}

at::Tensor UNetTransformer::operator()(const WeightView& w, const at::Tensor& x,
                                       const at::Tensor& context) const {
  const int64_t height = x.size(2), width = x.size(3);
  const at::Tensor normed = norm(w, x);
  // A fresh tensor in either case: the blocks write to it.
  at::Tensor tokens = std::holds_alternative<Linear>(in) ? std::get<Linear>(in)(w, ToTokens(normed))
                                                         : ToTokens(std::get<Conv2d>(in)(w, normed));
  for (const UNetTransformerBlock& block : blocks) block(w, tokens, context);
  at::Tensor y = std::holds_alternative<Linear>(out) ? ToMap(std::get<Linear>(out)(w, tokens), height, width)
                                                     : std::get<Conv2d>(out)(w, ToMap(tokens, height, width));
  return y.add_(x);
}

}  // namespace latentd
