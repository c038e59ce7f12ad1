#include "families/encoders/clip_text_model.h"

#include <algorithm>
#include <cmath>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/config/json_config.h"
#include "families/prompt/embedding_triggers.h"

namespace latentd {
namespace {

constexpr int64_t kOldConfigEos = 2;

int64_t PooledRow(const std::vector<int64_t>& ids, int64_t eos) {
  if (eos == kOldConfigEos) {
    // The end is the largest word there is. Rows of embeddings are no words, where transformers would take
    // the first of them for the end.
    const auto less = [](int64_t a, int64_t b) { return b < kFirstRowId && (a < b || a >= kFirstRowId); };
    return std::max_element(ids.begin(), ids.end(), less) - ids.begin();
  }
  const auto found = std::find(ids.begin(), ids.end(), eos);
  return found == ids.end() ? 0 : found - ids.begin();
}

// [1, 1, tokens, tokens]: what is later or masked is not attended to.
at::Tensor CausalBias(const std::vector<int64_t>& mask, const at::Tensor& like) {
  const auto length = static_cast<int64_t>(mask.size());
  const at::Tensor seen = at::ones({length, length}, at::kBool).tril().logical_and_(at::tensor(mask).ne(0));
  return at::zeros({1, 1, length, length}).masked_fill_(seen.logical_not(), -INFINITY).to(like.options());
}

// Which ids are rows of embeddings, and which rows they are. Words in their place, for the look-up.
struct RowsAmongIds {
  std::vector<int64_t> words, positions, rows;
};

RowsAmongIds Split(const std::vector<int64_t>& ids) {
  RowsAmongIds split{.words = ids, .positions = {}, .rows = {}};
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < kFirstRowId) continue;
    split.words[i] = 0;
    split.positions.push_back(static_cast<int64_t>(i));
    split.rows.push_back(ids[i] - kFirstRowId);
  }
  return split;
}

}  // namespace

absl::StatusOr<ClipTextConfig> ClipTextConfig::Load(const std::string& path, bool with_projection) {
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
  if (with_projection) config.projection = json.Int("projection_dim", 512, 1, 1 << 16);
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

ClipTextConfig ClipTextConfig::ClipL() {
  ClipTextConfig config;
  config.dim = 768;
  config.hidden = 3072;
  config.layers = 12;
  config.heads = 12;
  return config;
}

ClipTextConfig ClipTextConfig::ClipG() {
  ClipTextConfig config;
  config.dim = config.projection = 1280;
  config.hidden = 5120;
  config.layers = 32;
  config.heads = 20;
  config.activation = Activation::kGeluErf;
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
  if (config.projection > 0) {
    projection_ = Linear::Describe(*layout, "text_projection", config.dim, config.projection,
                                   /*with_bias=*/false);
  }
  layout_ = std::move(layout);
}

ClipTextModel::Output ClipTextModel::operator()(const WeightView& w, const std::vector<int64_t>& ids,
                                                const ClipTap& tap, const std::vector<int64_t>& mask,
                                                const at::Tensor& rows) const {
  const auto length = static_cast<int64_t>(ids.size());
  const int64_t head_dim = config_.dim / config_.heads;
  Output output;
  const RowsAmongIds split = Split(ids);
  at::Tensor words = tokens_(w, at::tensor(split.words, at::kLong));
  if (!split.rows.empty()) {
    const at::Tensor picked = rows.index_select(0, at::tensor(split.rows, at::kLong)).to(words.options());
    words.index_copy_(0, at::tensor(split.positions, at::kLong).to(words.device()), picked);
  }
  at::Tensor x = words.unsqueeze(0) + positions_(w, at::arange(length, at::kLong));
  AttentionOptions attention{.bias = {}, .causal = true};
  if (!mask.empty()) attention = {.bias = CausalBias(mask, x), .causal = false};
  auto take = [&] { output.hidden = tap.final_norm ? final_norm_(w, x) : x; };
  const size_t tapped = layers_.size() - static_cast<size_t>(tap.skip);
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (i == tapped) take();
    if (output.hidden.defined() && !tap.pooled) return output;
    const Layer& layer = layers_[i];
    const at::Tensor n = layer.norm1(w, x);
    const at::Tensor attended =
        Attention(SplitHeads(layer.q(w, n), head_dim), SplitHeads(layer.k(w, n), head_dim),
                  SplitHeads(layer.v(w, n), head_dim), attention);
    x = x + layer.out(w, attended);
    x = x + layer.mlp(w, layer.norm2(w, x));
  }
  if (tap.skip == 0) take();
  if (!tap.pooled) return output;
  const at::Tensor normed = tap.skip == 0 && tap.final_norm ? output.hidden : final_norm_(w, x);
  output.pooled = normed.select(1, PooledRow(ids, config_.eos)).contiguous();
  if (projection_.weight) output.pooled = projection_(w, output.pooled);
  return output;
}

int64_t ClipTextModel::WorkingBytes(const WeightUse& use) const {
  constexpr int64_t kSlackBytes = 256 << 10;
  const int64_t length = config_.positions;
  const int64_t dim = length * config_.dim, hidden = length * config_.hidden,
                beside = length * use.beside_rank;
  LiveFloats live;
  live.Hold(3 * length * length);  // which token sees which
  live.Hold(3 * dim);              // x, a norm, what was tapped
  live.Reach(4 * dim + AttentionScratch(length, length, config_.dim / config_.heads));
  live.Hold(dim);  // what was attended
  live.Reach(2 * dim + beside);
  live.Reach(dim + 3 * hidden + beside);
  live.Reach(3 * dim + hidden + beside);
  return live.PeakBytes(ConvertedFloats(*layout_, use, /*first_block=*/1), kSlackBytes);
}

}  // namespace latentd
