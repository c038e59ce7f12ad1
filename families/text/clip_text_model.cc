#include "families/text/clip_text_model.h"

#include <algorithm>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "families/config/json_config.h"

namespace latentd {
namespace {

constexpr int64_t kOldConfigEos = 2;

int64_t PooledRow(const std::vector<int64_t>& ids, int64_t eos) {
  if (eos == kOldConfigEos) return std::max_element(ids.begin(), ids.end()) - ids.begin();
  const auto found = std::find(ids.begin(), ids.end(), eos);
  return found == ids.end() ? 0 : found - ids.begin();
}

}  // namespace

absl::StatusOr<ClipTextConfig> ClipTextConfig::Load(const std::string& path) {
  ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path));
  ClipTextConfig config;
  config.vocabulary = json.Int("vocab_size", 49408, 1, 1 << 22);
  config.positions = json.Int("max_position_embeddings", 77, 2, 4096);
  config.dim = json.Int("hidden_size", 512, 1, 1 << 16);
  config.hidden = json.Int("intermediate_size", 2048, 1, 1 << 18);
  config.layers = json.Int("num_hidden_layers", 12, 1, 256);
  config.heads = json.Int("num_attention_heads", 8, 1, 1024);
  config.eps = json.Double("layer_norm_eps", 1e-5, 0, 1);
  config.eos = json.Int("eos_token_id", 49407, 0, 1 << 22);
  const std::string activation = json.String("hidden_act", "quick_gelu");
  if (activation == "gelu") {
    config.activation = Activation::kGeluErf;
  } else if (activation != "quick_gelu" || config.dim % config.heads != 0) {
    json.Fail(MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                        absl::StrCat(json.label(), ": hidden_act ", activation, ", hidden_size ", config.dim,
                                     ", num_attention_heads ", config.heads, " are not supported"),
                        {{"file", json.label()}}));
  }
  RETURN_IF_ERROR(json.status());
  return config;
}

ClipTextModel::ClipTextModel(const ClipTextConfig& config) : config_(config) {
  auto layout = std::make_shared<ComponentLayout>();
  layout->BeginBlock("embeddings", ComponentLayout::Residency::kStays);
  tokens_ = Embedding::Describe(*layout, "embeddings.token_embedding", config.vocabulary, config.dim);
  positions_ = Embedding::Describe(*layout, "embeddings.position_embedding", config.positions, config.dim);
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string name = absl::StrCat("encoder.layers.", i);
    layout->BeginBlock(name);
    Layer layer;
    layer.norm1 = LayerNorm::Describe(*layout, name + ".layer_norm1", config.dim, config.eps);
    layer.q = Linear::Describe(*layout, name + ".self_attn.q_proj", config.dim, config.dim);
    layer.k = Linear::Describe(*layout, name + ".self_attn.k_proj", config.dim, config.dim);
    layer.v = Linear::Describe(*layout, name + ".self_attn.v_proj", config.dim, config.dim);
    layer.out = Linear::Describe(*layout, name + ".self_attn.out_proj", config.dim, config.dim);
    layer.norm2 = LayerNorm::Describe(*layout, name + ".layer_norm2", config.dim, config.eps);
    layer.mlp.in = Linear::Describe(*layout, name + ".mlp.fc1", config.dim, config.hidden);
    layer.mlp.out = Linear::Describe(*layout, name + ".mlp.fc2", config.hidden, config.dim);
    layer.mlp.activation = config.activation;
    layers_.push_back(layer);
  }
  layout->BeginBlock("final_layer_norm", ComponentLayout::Residency::kStays);
  final_norm_ = LayerNorm::Describe(*layout, "final_layer_norm", config.dim, config.eps);
  layout_ = std::move(layout);
}

ClipTextModel::Output ClipTextModel::operator()(const WeightView& w, const std::vector<int64_t>& ids) const {
  const auto length = static_cast<int64_t>(ids.size());
  const int64_t head_dim = config_.dim / config_.heads;
  at::Tensor x =
      tokens_(w, at::tensor(ids, at::kLong)).unsqueeze(0) + positions_(w, at::arange(length, at::kLong));
  for (const Layer& layer : layers_) {
    const at::Tensor n = layer.norm1(w, x);
    const at::Tensor attended =
        Attention(SplitHeads(layer.q(w, n), head_dim), SplitHeads(layer.k(w, n), head_dim),
                  SplitHeads(layer.v(w, n), head_dim), {.bias = {}, .causal = true});
    x = x + layer.out(w, attended);
    x = x + layer.mlp(w, layer.norm2(w, x));
  }
  Output output;
  output.hidden = final_norm_(w, x);
  output.pooled = output.hidden.select(1, PooledRow(ids, config_.eos)).contiguous();
  return output;
}

}  // namespace latentd
