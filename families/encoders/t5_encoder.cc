#include "families/encoders/t5_encoder.h"

#include <algorithm>
#include <cmath>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "families/config/json_config.h"

namespace latentd {
namespace {

// The bucket of a distance key − query: one half of the buckets for each sign; in each half, small distances
// have a bucket of their own, larger ones share buckets of logarithmic width. fp32, as the oracle computes
// it.
int64_t Bucket(int64_t distance, int64_t buckets, int64_t max_distance) {
  const int64_t half = buckets / 2, exact = half / 2;
  const int64_t sign_offset = distance > 0 ? half : 0;
  distance = std::abs(distance);
  if (distance < exact) return sign_offset + distance;
  const float ratio =
      std::log(static_cast<float>(distance) / static_cast<float>(exact)) /
      static_cast<float>(std::log(static_cast<double>(max_distance) / static_cast<double>(exact))) *
      static_cast<float>(half - exact);
  return sign_offset + std::min(exact + static_cast<int64_t>(ratio), half - 1);
}

}  // namespace

absl::StatusOr<T5Config> T5Config::Load(const std::string& path) {
  ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path));
  T5Config config;
  config.vocabulary = json.Int("vocab_size", 32128, 1, 1 << 22);
  config.dim = json.Int("d_model", 512, 1, 1 << 16);
  config.head_dim = json.Int("d_kv", 64, 1, 1 << 12);
  config.heads = json.Int("num_heads", 8, 1, 1024);
  config.hidden = json.Int("d_ff", 2048, 1, 1 << 18);
  config.layers = json.Int("num_layers", 6, 1, 256);
  config.buckets = json.Int("relative_attention_num_buckets", 32, 4, 4096);
  config.max_distance = json.Int("relative_attention_max_distance", 128, 2, 1 << 20);
  config.eps = json.Double("layer_norm_epsilon", 1e-6, 0, 1);
  const std::string kind = json.String("feed_forward_proj", "relu");
  absl::string_view activation = kind;
  config.gated = absl::ConsumePrefix(&activation, "gated-");
  if (kind == "gated-gelu" || activation == "gelu_new") {
    config.activation = Activation::kGeluTanh;
  } else if (activation == "gelu") {
    config.activation = Activation::kGeluErf;
  } else if (activation == "silu") {
    config.activation = Activation::kSilu;
  } else if (activation != "relu") {
    json.Fail(MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                        absl::StrCat(json.label(), ": feed_forward_proj ", kind, " is not supported"),
                        {{"file", json.label()}, {"key", "feed_forward_proj"}, {"value", kind}}));
  }
  RETURN_IF_ERROR(json.status());
  return config;
}

T5Encoder::T5Encoder(const T5Config& config) : config_(config) {
  auto layout = std::make_shared<ComponentLayout>();
  const int64_t inner = config.heads * config.head_dim;
  layout->BeginBlock("shared", ComponentLayout::Residency::kStays);
  tokens_ = Embedding::Describe(*layout, "shared", config.vocabulary, config.dim);
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string name = absl::StrCat("encoder.block.", i);
    layout->BeginBlock(name);
    const std::string attention = name + ".layer.0.SelfAttention";
    const std::string ff = name + ".layer.1.DenseReluDense";
    Layer layer;
    layer.attention_norm = RmsNorm::Describe(*layout, name + ".layer.0.layer_norm", config.dim, config.eps);
    layer.q = Linear::Describe(*layout, attention + ".q", config.dim, inner, false);
    layer.k = Linear::Describe(*layout, attention + ".k", config.dim, inner, false);
    layer.v = Linear::Describe(*layout, attention + ".v", config.dim, inner, false);
    if (i == 0) {
      relative_bias_ =
          Embedding::Describe(*layout, attention + ".relative_attention_bias", config.buckets, config.heads);
    }
    layer.out = Linear::Describe(*layout, attention + ".o", inner, config.dim, false);
    layer.ff_norm = RmsNorm::Describe(*layout, name + ".layer.1.layer_norm", config.dim, config.eps);
    layer.wi_0 =
        Linear::Describe(*layout, ff + (config.gated ? ".wi_0" : ".wi"), config.dim, config.hidden, false);
    if (config.gated) layer.wi_1 = Linear::Describe(*layout, ff + ".wi_1", config.dim, config.hidden, false);
    layer.wo = Linear::Describe(*layout, ff + ".wo", config.hidden, config.dim, false);
    layers_.push_back(layer);
  }
  layout->BeginBlock("encoder.final_layer_norm", ComponentLayout::Residency::kStays);
  final_norm_ = RmsNorm::Describe(*layout, "encoder.final_layer_norm", config.dim, config.eps);
  layout_ = std::move(layout);
}

at::Tensor T5Encoder::PositionBias(const WeightView& w, int64_t length) const {
  // Distances repeat along diagonals: one bucket per distance, then a sliding view of them.
  std::vector<int64_t> buckets;
  for (int64_t distance = 1 - length; distance < length; ++distance) {
    buckets.push_back(Bucket(distance, config_.buckets, config_.max_distance));
  }
  const at::Tensor by_distance =
      relative_bias_(w, at::tensor(buckets, at::kLong)).t().contiguous();  // [heads, 2L−1]
  // Row q of the result starts at distance −q, which is at index length − 1 − q.
  const int64_t stride = by_distance.stride(0);
  at::Tensor flipped = by_distance.as_strided({config_.heads, length, length}, {stride, 1, 1}).flip(1);
  return flipped.unsqueeze(0);
}

at::Tensor T5Encoder::operator()(const WeightView& w, const std::vector<int64_t>& ids) const {
  at::Tensor x = tokens_(w, at::tensor(ids, at::kLong)).unsqueeze(0);
  const AttentionOptions options = {
      .bias = PositionBias(w, static_cast<int64_t>(ids.size())), .causal = false, .scale = 1.0};
  for (const Layer& layer : layers_) {
    const at::Tensor n = layer.attention_norm(w, x);
    const at::Tensor attended =
        Attention(SplitHeads(layer.q(w, n), config_.head_dim), SplitHeads(layer.k(w, n), config_.head_dim),
                  SplitHeads(layer.v(w, n), config_.head_dim), options);
    x = x + layer.out(w, attended);
    const at::Tensor m = layer.ff_norm(w, x);
    at::Tensor hidden = ActivateInPlace(config_.activation, layer.wi_0(w, m));
    if (config_.gated) hidden.mul_(layer.wi_1(w, m));
    x = x + layer.wo(w, hidden);
  }
  return final_norm_(w, x);
}

int64_t T5Encoder::WorkingBytes(int64_t length, const WeightUse& use) const {
  constexpr int64_t kSlackBytes = 256 << 10;
  const int64_t dim = length * config_.dim, inner = length * config_.heads * config_.head_dim,
                hidden = length * config_.hidden, beside = length * use.beside_rank;
  LiveFloats live;
  live.Hold(config_.heads * length * length);  // of distances
  live.Hold(2 * dim);                          // x and a norm
  live.Reach(4 * inner + AttentionScratch(length, length, config_.head_dim));
  live.Hold(inner);  // what was attended
  live.Reach(2 * dim + beside);
  live.Reach(dim + (config_.gated ? 2 : 1) * hidden + beside);
  live.Reach(3 * dim + hidden + beside);
  return live.PeakBytes(ConvertedFloats(*layout_, use, /*first_block=*/1), kSlackBytes);
}

}  // namespace latentd
