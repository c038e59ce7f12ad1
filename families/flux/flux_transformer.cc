#include "families/flux/flux_transformer.h"

#include <algorithm>
#include <array>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "families/nn/rope.h"

namespace latentd {
namespace {

constexpr int64_t kSinusoidDim = 256;
constexpr float kTrainSteps = 1000;
constexpr double kNormEps = 1e-6;

// The vectors of a modulation, each [dim]; those in `scales` have 1 added: LN(x)·(1 + scale) + shift.
std::vector<at::Tensor> Modulate(const WeightView& w, const FluxModulation& modulation, const at::Tensor& vec,
                                 std::initializer_list<int64_t> scales) {
  at::Tensor rows = modulation.linear(w, vec).view({-1, modulation.dim});
  for (int64_t row : scales) rows.select(0, row).add_(1);
  return rows.unbind(0);
}

// LayerNorm without weights of its own, scaled and shifted by a modulation, in one pass.
at::Tensor ModulatedNorm(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift) {
  return at::layer_norm(x, {x.size(-1)}, scale, shift, kNormEps);
}

FluxModulation DescribeModulation(ComponentLayout& layout, const std::string& name, int64_t dim,
                                  int64_t parts) {
  return {Linear::Describe(layout, name, dim, parts * dim), dim};
}

// Queries or keys of x, normalised per head and turned by their tokens' angles, into `out`.
void ProjectAndTurn(const WeightView& w, const Linear& linear, const RmsNorm& norm, const at::Tensor& x,
                    const at::Tensor& angles, const at::Tensor& out) {
  NormRopeTo(out, linear(w, x), w(norm.weight), norm.eps, angles);
}

// [1, tokens, heads, head_dim] for what ProjectAndTurn writes.
at::Tensor EmptyHeads(const at::Tensor& x, int64_t tokens, int64_t head_dim) {
  return at::empty({1, tokens, x.size(2) / head_dim, head_dim}, x.options());
}

}  // namespace

FluxTokens FluxTokens::Join(const at::Tensor& text, const at::Tensor& image) {
  FluxTokens tokens;
  const int64_t n = text.size(1);
  tokens.joint = at::cat({text, image}, 1);
  tokens.text = tokens.joint.narrow(1, 0, n);
  tokens.image = tokens.joint.narrow(1, n, image.size(1));
  return tokens;
}

// ------------------------------------------------------------------------------------------------- blocks

FluxDoubleBlock FluxDoubleBlock::Describe(ComponentLayout& layout, const std::string& name,
                                          const FluxConfig& config) {
  const int64_t dim = config.dim();
  FluxDoubleBlock block;
  block.head_dim = config.head_dim;
  layout.BeginBlock(name);
  block.image.modulation = DescribeModulation(layout, name + ".norm1.linear", dim, 6);
  block.text.modulation = DescribeModulation(layout, name + ".norm1_context.linear", dim, 6);
  auto describe = [&](FluxStream& stream, const std::array<const char*, 6>& names) {
    const std::string attention = name + ".attn.";
    stream.q = Linear::Describe(layout, attention + names[0], dim, dim);
    stream.k = Linear::Describe(layout, attention + names[1], dim, dim);
    stream.v = Linear::Describe(layout, attention + names[2], dim, dim);
    stream.norm_q = RmsNorm::Describe(layout, attention + names[3], config.head_dim, kNormEps);
    stream.norm_k = RmsNorm::Describe(layout, attention + names[4], config.head_dim, kNormEps);
    stream.out = Linear::Describe(layout, attention + names[5], dim, dim);
  };
  describe(block.image, {"to_q", "to_k", "to_v", "norm_q", "norm_k", "to_out.0"});
  describe(block.text,
           {"add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k", "to_add_out"});
  block.image.mlp.in = Linear::Describe(layout, name + ".ff.net.0.proj", dim, config.mlp_dim());
  block.image.mlp.out = Linear::Describe(layout, name + ".ff.net.2", config.mlp_dim(), dim);
  block.text.mlp.in = Linear::Describe(layout, name + ".ff_context.net.0.proj", dim, config.mlp_dim());
  block.text.mlp.out = Linear::Describe(layout, name + ".ff_context.net.2", config.mlp_dim(), dim);
  return block;
}

void FluxDoubleBlock::operator()(const WeightView& w, FluxTokens& tokens, const at::Tensor& vec,
                                 const at::Tensor& rope) const {
  enum { kShift, kScale, kGate, kMlpShift, kMlpScale, kMlpGate };
  const std::vector<at::Tensor> image_mod = Modulate(w, image.modulation, vec, {kScale, kMlpScale});
  const std::vector<at::Tensor> text_mod = Modulate(w, text.modulation, vec, {kScale, kMlpScale});

  const int64_t n = tokens.text.size(1), m = tokens.image.size(1);
  at::Tensor attended;
  {  // queries, keys and values end here, before the MLPs need their room
    const at::Tensor image_in = ModulatedNorm(tokens.image, image_mod[kScale], image_mod[kShift]);
    const at::Tensor text_in = ModulatedNorm(tokens.text, text_mod[kScale], text_mod[kShift]);
    const at::Tensor text_angles = rope.narrow(0, 0, n), image_angles = rope.narrow(0, n, m);
    const at::Tensor q = EmptyHeads(text_in, n + m, head_dim), k = at::empty_like(q);
    ProjectAndTurn(w, text.q, text.norm_q, text_in, text_angles, q.narrow(1, 0, n));
    ProjectAndTurn(w, image.q, image.norm_q, image_in, image_angles, q.narrow(1, n, m));
    ProjectAndTurn(w, text.k, text.norm_k, text_in, text_angles, k.narrow(1, 0, n));
    ProjectAndTurn(w, image.k, image.norm_k, image_in, image_angles, k.narrow(1, n, m));
    const at::Tensor v = at::cat({text.v(w, text_in), image.v(w, image_in)}, 1);
    attended = Attention(q, k, SplitHeads(v, head_dim));
  }

  auto finish = [&](const FluxStream& stream, at::Tensor& x, const at::Tensor& a,
                    const std::vector<at::Tensor>& mod) {
    x.addcmul_(stream.out(w, a), mod[kGate]);
    x.addcmul_(stream.mlp(w, ModulatedNorm(x, mod[kMlpScale], mod[kMlpShift])), mod[kMlpGate]);
  };
  finish(text, tokens.text, attended.narrow(1, 0, n), text_mod);
  finish(image, tokens.image, attended.narrow(1, n, m), image_mod);
}

FluxSingleBlock FluxSingleBlock::Describe(ComponentLayout& layout, const std::string& name,
                                          const FluxConfig& config) {
  const int64_t dim = config.dim();
  FluxSingleBlock block;
  block.head_dim = config.head_dim;
  layout.BeginBlock(name);
  block.modulation = DescribeModulation(layout, name + ".norm.linear", dim, 3);
  block.q = Linear::Describe(layout, name + ".attn.to_q", dim, dim);
  block.k = Linear::Describe(layout, name + ".attn.to_k", dim, dim);
  block.v = Linear::Describe(layout, name + ".attn.to_v", dim, dim);
  block.norm_q = RmsNorm::Describe(layout, name + ".attn.norm_q", config.head_dim, kNormEps);
  block.norm_k = RmsNorm::Describe(layout, name + ".attn.norm_k", config.head_dim, kNormEps);
  block.mlp = Linear::Describe(layout, name + ".proj_mlp", dim, config.mlp_dim());
  block.out = Linear::Describe(layout, name + ".proj_out", dim + config.mlp_dim(), dim);
  return block;
}

void FluxSingleBlock::operator()(const WeightView& w, FluxTokens& tokens, const at::Tensor& vec,
                                 const at::Tensor& rope, bool image_only) const {
  enum { kShift, kScale, kGate };
  const std::vector<at::Tensor> mod = Modulate(w, modulation, vec, {kScale});
  const at::Tensor all_in = ModulatedNorm(tokens.joint, mod[kScale], mod[kShift]);
  // What is asked of (queries, MLP, result): all tokens, or those of the picture.
  at::Tensor& x = image_only ? tokens.image : tokens.joint;
  const int64_t all = all_in.size(1), first = all - x.size(1);
  const at::Tensor in = all_in.narrow(1, first, x.size(1));

  // [attention | gelu(mlp)], each written where it is needed; what led there ends with its scope.
  const int64_t dim = in.size(2), mlp_dim = 4 * dim;
  const at::Tensor both = at::empty({1, x.size(1), dim + mlp_dim}, x.options());
  {
    const at::Tensor queries = EmptyHeads(in, x.size(1), head_dim), keys = EmptyHeads(in, all, head_dim);
    ProjectAndTurn(w, q, norm_q, in, rope.narrow(0, first, x.size(1)), queries);
    ProjectAndTurn(w, k, norm_k, all_in, rope, keys);
    both.narrow(2, 0, dim).copy_(Attention(queries, keys, SplitHeads(v(w, all_in), head_dim)));
  }
  GeluTanhTo(both.narrow(2, dim, mlp_dim), mlp(w, in));
  x.addcmul_(out(w, both), mod[kGate]);
}

// -------------------------------------------------------------------------------------------- transformer

FluxTransformer::FluxTransformer(const FluxConfig& config) : config_(config) {
  auto layout = std::make_shared<ComponentLayout>();
  const int64_t dim = config.dim();
  layout->BeginBlock("embedders", ComponentLayout::Residency::kStays);
  x_embedder_ = Linear::Describe(*layout, "x_embedder", config.in_channels, dim);
  context_embedder_ = Linear::Describe(*layout, "context_embedder", config.text_dim, dim);
  time_embedder_ = EmbedderMlp::Describe(*layout, "time_text_embed.timestep_embedder", kSinusoidDim, dim);
  if (config.guidance_embeds) {
    guidance_embedder_ =
        EmbedderMlp::Describe(*layout, "time_text_embed.guidance_embedder", kSinusoidDim, dim);
  }
  text_embedder_ = EmbedderMlp::Describe(*layout, "time_text_embed.text_embedder", config.pooled_dim, dim);
  for (int64_t i = 0; i < config.double_blocks; ++i) {
    double_blocks_.push_back(
        FluxDoubleBlock::Describe(*layout, absl::StrCat("transformer_blocks.", i), config));
  }
  for (int64_t i = 0; i < config.single_blocks; ++i) {
    single_blocks_.push_back(
        FluxSingleBlock::Describe(*layout, absl::StrCat("single_transformer_blocks.", i), config));
  }
  layout->BeginBlock("output", ComponentLayout::Residency::kStays);
  norm_out_ = DescribeModulation(*layout, "norm_out.linear", dim, 2);
  proj_out_ = Linear::Describe(*layout, "proj_out", dim, config.out_channels);
  layout_ = std::move(layout);
}

FluxText FluxTransformer::PrepareText(const WeightView& w, const at::Tensor& t5, int64_t rows,
                                      int64_t columns) const {
  // Positions are (0, row, column); text stands at the origin.
  const int64_t text_tokens = t5.size(1);
  const at::TensorOptions options = at::TensorOptions(at::kFloat).device(w.device());
  at::Tensor positions = at::zeros({text_tokens + rows * columns, 3}, options);
  at::Tensor grid = positions.narrow(0, text_tokens, rows * columns).view({rows, columns, 3});
  grid.select(2, 1).copy_(at::arange(rows, options).unsqueeze(1).expand({rows, columns}));
  grid.select(2, 2).copy_(at::arange(columns, options).unsqueeze(0).expand({rows, columns}));
  return {context_embedder_(w, t5.to(w.device(), w.compute_type())), RopeTable(positions, config_.axes)};
}

namespace {

// Made in fp32 whatever the network computes in, as in diffusers: a time of 1000 has no place in bf16.
at::Tensor Sinusoid(const WeightView& w, float value) {
  return SinusoidalEmbedding(value, kSinusoidDim, w.device()).to(w.compute_type());
}

}  // namespace

FluxConditioning FluxTransformer::PrepareConditioning(const WeightView& w, const at::Tensor& pooled,
                                                      double guidance) const {
  FluxConditioning conditioning;
  if (guidance_embedder_) {
    const float value = static_cast<float>(guidance) * kTrainSteps;
    conditioning.guidance = (*guidance_embedder_)(w, Sinusoid(w, value));
  }
  conditioning.pooled = text_embedder_(w, pooled.to(w.device(), w.compute_type()));
  return conditioning;
}

at::Tensor FluxTransformer::Modulation(const WeightView& w, float sigma,
                                       const FluxConditioning& conditioning) const {
  // The pipeline hands over t/1000 and the network multiplies by 1000, each rounded to fp32.
  const float t = sigma * kTrainSteps / kTrainSteps * kTrainSteps;
  at::Tensor vec = time_embedder_(w, Sinusoid(w, t));
  if (conditioning.guidance.defined()) vec.add_(conditioning.guidance);
  return at::silu_(vec.add_(conditioning.pooled));
}

at::Tensor FluxTransformer::operator()(const WeightView& w, const at::Tensor& x, const at::Tensor& vec,
                                       const FluxText& text) const {
  FluxTokens tokens = FluxTokens::Join(text.tokens, x_embedder_(w, x.to(w.compute_type())));
  for (const FluxDoubleBlock& block : double_blocks_) block(w, tokens, vec, text.rope);
  for (const FluxSingleBlock& block : single_blocks_) {
    block(w, tokens, vec, text.rope, /*image_only=*/&block == &single_blocks_.back());
  }
  enum { kScale, kShift };
  const std::vector<at::Tensor> mod = Modulate(w, norm_out_, vec, {kScale});
  return proj_out_(w, ModulatedNorm(tokens.image, mod[kScale], mod[kShift]));
}

int64_t FluxTransformer::WorkingBytes(int64_t text_tokens, int64_t image_tokens, int64_t prompts,
                                      const WeightUse& use) const {
  constexpr int64_t kSlackBytes =
      1 << 20;  // modulations, and what is of a prompt's or a picture's first step
  const int64_t dim = config_.dim(), mlp = config_.mlp_dim();
  const int64_t n = text_tokens, m = image_tokens, all = n + m;
  const int64_t inner = use.beside_rank * all;  // between the two matrices of a patch
  LiveFloats live;
  // Tokens and angles of the prompts, the picture's tokens in, both together, and the velocities.
  live.Hold(prompts * (n * dim + all * config_.head_dim + m * config_.out_channels));
  live.Hold(2 * m * config_.in_channels);
  live.Reach((m + all) * dim + inner);
  live.Hold(all * dim);
  const int64_t scratch = AttentionScratch(all, all, config_.head_dim);
  if (!double_blocks_.empty()) {
    // Norms, queries, keys, and values in two parts and joined; or values and what was attended.
    live.Reach(all * 5 * dim + inner);
    live.Reach(all * 5 * dim + scratch);
    // What was attended; a norm, the hidden layer and its result.
    for (const int64_t tokens : {n, m}) live.Reach(all * dim + tokens * (2 * dim + mlp) + inner);
  }
  for (size_t i = 0; i < single_blocks_.size(); ++i) {
    // A norm of all; of those that are asked for: [attended | hidden], queries; keys, values and what is
    // attended.
    const int64_t asked = i + 1 == single_blocks_.size() ? m : all;
    const int64_t kept = all * dim + asked * (dim + mlp);
    live.Reach(kept + asked * dim + 2 * all * dim + inner);
    live.Reach(kept + 2 * asked * dim + 2 * all * dim + scratch);
    live.Reach(kept + asked * mlp + inner);
  }
  return live.PeakBytes(ConvertedFloats(*layout_, use), kSlackBytes);
}

// ------------------------------------------------------------------------------------------------ packing

at::Tensor PackLatents(const at::Tensor& latents) {
  const int64_t n = latents.size(0), c = latents.size(1), h = latents.size(2), w = latents.size(3);
  return latents.reshape({n, c, h / 2, 2, w / 2, 2})
      .permute({0, 2, 4, 1, 3, 5})
      .reshape({n, h / 2 * (w / 2), c * 4});
}

at::Tensor UnpackLatents(const at::Tensor& tokens, int64_t height, int64_t width) {
  const int64_t n = tokens.size(0), c = tokens.size(2) / 4;
  return tokens.reshape({n, height / 2, width / 2, c, 2, 2})
      .permute({0, 3, 1, 4, 2, 5})
      .reshape({n, c, height, width});
}

}  // namespace latentd
