#include "families/flux/flux_run.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/flux/flux_denoiser.h"
#include "families/image_run.h"
#include "families/sampling/flow_match.h"
#include "families/sampling/noise.h"
#include "families/working_memory.h"

namespace latentd {
namespace {

// Encoders: CLIP's pooled row, T5's hidden states.
constexpr char kClip[] = "text_encoder", kT5[] = "text_encoder_2";

// A text for one encoder.
struct FluxPromptText {
  bool clip = false, negative = false;
  std::string output;  // its name in a Conditioning
  std::string text;
  std::vector<int64_t> ids;
};

class FluxEncoding : public TextEncoding {
 public:
  FluxEncoding(const FluxParts& parts, bool clip, const std::vector<const FluxPromptText*>& texts)
      : parts_(parts), clip_(clip), texts_(texts) {}

  // A slice is a text.
  absl::StatusOr<bool> Slice(const WeightView& weights) override {
    const FluxPromptText& text = *texts_[made_.size()];
    made_[text.output] =
        ToHost(clip_ ? (*parts_.clip)(weights, text.ids).pooled : (*parts_.t5)(weights, text.ids));
    return made_.size() == texts_.size();
  }
  Conditioning Take() override { return std::move(made_); }

 private:
  const FluxParts& parts_;
  const bool clip_;
  const std::vector<const FluxPromptText*> texts_;
  Conditioning made_;
};

class FluxRun : public ImageRun {
 public:
  FluxRun(const FluxPipeline& pipeline, GenerateParams params)
      : ImageRun(std::move(params), {.encoders = {kClip, kT5}, .denoiser = pipeline.denoiser_component()},
                 *pipeline.parts().vae),
        pipeline_(pipeline),
        parts_(pipeline.parts()),
        latent_shape_(pipeline.LatentShape(params_)) {
    AddPrompt("params.prompt", params_.prompt, params_.prompt_2);
    if (guided()) AddPrompt("params.negative_prompt", *params_.negative_prompt, params_.negative_prompt_2);
  }

  std::string OutputKey(size_t phase) const override;
  int64_t OutputBytes(size_t phase) const override;
  int64_t WorkingBytes(size_t phase, const std::string& component,
                       const PhaseOptions& options) const override;
  std::string ShapeKey(size_t phase, const std::string& component) const override;

  absl::StatusOr<std::unique_ptr<TextEncoding>> BeginText(
      const std::string& encoder,
      const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings) const override;
  std::vector<VaePicture> MediaPictures() const override;
  absl::StatusOr<at::Tensor> MediaLatents(
      const std::vector<AutoencoderKl::Posterior>& posteriors) const override;
  absl::StatusOr<std::unique_ptr<Denoiser>> BeginDenoising(Conditioning conditioning,
                                                           at::Tensor media_latents) const override;
  at::Tensor Preview(const at::Tensor& latents) const override { return parts_.preview.Render(latents); }

 private:
  // As in diffusers: without a negative prompt, be it an empty one, nothing is guided.
  bool guided() const { return *params_.true_cfg_scale > 1 && params_.negative_prompt.has_value(); }
  int64_t prompts() const { return guided() ? 2 : 1; }
  void AddPrompt(const std::string& field, const std::string& first,
                 const std::optional<std::string>& second);
  std::vector<const FluxPromptText*> TextsFor(absl::string_view encoder) const;
  // Seeds' draws: samples of the pictures, in the order of MediaPictures, then noise.
  int media_count() const {
    return (params_.has(MediaRole::kControl) ? 1 : 0) + (params_.has(MediaRole::kInit) ? 1 : 0);
  }

  const FluxPipeline& pipeline_;
  const FluxParts& parts_;
  const std::vector<int64_t> latent_shape_;  // of one picture
  std::vector<FluxPromptText> texts_;
};

std::string OutputName(bool clip, bool negative) {
  return absl::StrCat(negative ? "neg." : "", clip ? "pooled" : "t5");
}

// CLIP reads the prompt, T5 the second one where there is one; an empty second one is none.
void FluxRun::AddPrompt(const std::string& field, const std::string& first,
                        const std::optional<std::string>& second) {
  const bool negative = !texts_.empty();
  const int64_t clip_length =
      std::min(parts_.clip_tokenizer->model_max_length(), parts_.clip->config().positions);
  const auto clip_total = static_cast<int64_t>(parts_.clip_tokenizer->Tokenize(first).size());
  constexpr int64_t kBeginAndEnd = 2;
  tokens_.push_back({field, kClip, std::min(clip_total, clip_length - kBeginAndEnd), clip_total});
  texts_.push_back(
      {true, negative, OutputName(true, negative), first, parts_.clip_tokenizer->Encode(first, clip_length)});

  const bool has_second = second && !second->empty();
  const std::string& own = has_second ? *second : first;
  const int64_t t5_length = *params_.max_sequence_length, t5_total = parts_.t5_tokenizer->Count(own);
  constexpr int64_t kEnd = 1;
  tokens_.push_back(
      {has_second ? absl::StrCat(field, "_2") : field, kT5, std::min(t5_total, t5_length - kEnd), t5_total});
  texts_.push_back(
      {false, negative, OutputName(false, negative), own, parts_.t5_tokenizer->Encode(own, t5_length)});
}

std::vector<const FluxPromptText*> FluxRun::TextsFor(absl::string_view encoder) const {
  std::vector<const FluxPromptText*> texts;
  for (const FluxPromptText& text : texts_) {
    if (text.clip == (encoder == kClip)) texts.push_back(&text);
  }
  return texts;
}

absl::StatusOr<std::unique_ptr<TextEncoding>> FluxRun::BeginText(
    const std::string& encoder, const std::vector<std::shared_ptr<const TextEmbedding>>&) const {
  return std::make_unique<FluxEncoding>(parts_, encoder == kClip, TextsFor(encoder));
}

std::string FluxRun::OutputKey(size_t phase) const {
  const std::string& encoder = phases_[phase].components[0];
  // Lengths stand before texts, so that no two pairs of texts read alike.
  std::string key;
  for (const FluxPromptText* text : TextsFor(encoder)) {
    absl::StrAppend(&key, key.empty() ? "" : "|", text->text.size(), ":", text->text);
  }
  if (encoder == kT5) absl::StrAppend(&key, "|", *params_.max_sequence_length);
  return key;
}

int64_t FluxRun::OutputBytes(size_t phase) const {
  const int64_t floats = phases_[phase].components[0] == kClip
                             ? parts_.clip->config().dim
                             : *params_.max_sequence_length * parts_.t5->config().dim;
  return prompts() * floats * int64_t{sizeof(float)};
}

std::vector<VaePicture> FluxRun::MediaPictures() const {
  std::vector<VaePicture> pictures;
  for (const at::Tensor& image : {params_.picture(MediaRole::kControl), params_.picture(MediaRole::kInit)}) {
    if (image.defined()) pictures.push_back({ResizePicture(image, *params_.width, *params_.height)});
  }
  return pictures;
}

absl::StatusOr<at::Tensor> FluxRun::MediaLatents(
    const std::vector<AutoencoderKl::Posterior>& posteriors) const {
  std::vector<at::Tensor> latents;
  for (const AutoencoderKl::Posterior& posterior : posteriors) {
    const int draw = static_cast<int>(latents.size());
    std::vector<at::Tensor> samples;
    for (uint64_t seed : params_.seeds) {
      samples.push_back(posterior.Sample(DrawNoise(seed, posterior.mean.sizes().vec(), draw + 1).back()));
    }
    latents.push_back(vae().ToModel(at::cat(samples)));
  }
  return at::cat(latents, 1);
}

absl::StatusOr<std::unique_ptr<Denoiser>> FluxRun::BeginDenoising(Conditioning conditioning,
                                                                  at::Tensor media_latents) const {
  c10::InferenceMode inference;
  const std::vector<int64_t>& shape = latent_shape_;
  const int64_t tokens = shape[2] / 2 * (shape[3] / 2);
  std::vector<float> sigmas = FlowMatchSigmas(parts_.schedule, *params_.steps, tokens, params_.shift);
  const bool from_image = params_.has(MediaRole::kInit), controlled = params_.has(MediaRole::kControl);
  const int draws = media_count() + 1;
  if (params_.has_pictures() &&
      media_latents.sizes().slice(1) != at::IntArrayRef({(draws - 1) * shape[1], shape[2], shape[3]})) {
    return absl::InternalError("the latents of the request's pictures have another shape");
  }
  const int64_t start = from_image ? StartIndex(*params_.steps, *params_.strength) : 0;

  std::vector<at::Tensor> pictures, controls;
  for (size_t i = 0; i < params_.seeds.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    at::Tensor x = params_.noise.defined() ? params_.noise.narrow(0, n, 1)
                                           : DrawNoise(params_.seeds[i], shape, draws).back();
    at::Tensor given = media_latents;
    if (params_.has_pictures() && given.size(0) > 1) given = given.narrow(0, n, 1);
    if (controlled) controls.push_back(PackLatents(given.narrow(1, 0, shape[1])));
    if (from_image) {
      const at::Tensor picture = given.narrow(1, given.size(1) - shape[1], shape[1]);
      x = AddNoise(picture, x, sigmas[static_cast<size_t>(start)]);
    }
    pictures.push_back(PackLatents(x));
  }

  std::vector<FluxPrompt> prompts;
  for (const bool negative : {false, true}) {
    if (negative && !guided()) continue;
    FluxPrompt prompt{conditioning[OutputName(false, negative)], conditioning[OutputName(true, negative)]};
    if (!prompt.t5.defined() || !prompt.pooled.defined())
      return absl::InternalError("a prompt was not encoded");
    prompts.push_back(std::move(prompt));
  }
  return MakeFluxDenoiser({.transformer = parts_.transformer,
                           .sigmas = std::move(sigmas),
                           .start = start,
                           .pictures = std::move(pictures),
                           .controls = std::move(controls),
                           .prompts = std::move(prompts),
                           .guidance = *params_.guidance,
                           .true_cfg_scale = *params_.true_cfg_scale,
                           .latent_height = shape[2],
                           .latent_width = shape[3]});
}

int64_t FluxRun::WorkingBytes(size_t phase, const std::string& component, const PhaseOptions& options) const {
  const std::vector<int64_t>& shape = latent_shape_;
  const auto pictures = static_cast<int64_t>(params_.seeds.size());
  const int64_t latent_bytes = shape[1] * shape[2] * shape[3] * pictures * int64_t{sizeof(float)};
  const WeightUse use = UseOf(pipeline_, component, options);
  const int64_t length = *params_.max_sequence_length;
  switch (phases_[phase].kind) {
    case PhaseKind::kEncodeText:
      if (component == kClip) return parts_.clip->WorkingBytes(use);
      return prompts() * length * parts_.t5->config().dim * int64_t{sizeof(float)} +
             parts_.t5->WorkingBytes(length, use);
    case PhaseKind::kEncodeMedia:
      return 3 * latent_bytes + vae().EncodeBytes(*params_.width, *params_.height, options.tile, use);
    case PhaseKind::kDenoise: {
      // Of all pictures: latents before and after a step and the step before, a control image's, and a
      // preview's way.
      const int64_t kept = (params_.has(MediaRole::kControl) ? 7 : 6) * latent_bytes;
      return kept + parts_.transformer->WorkingBytes(length, shape[2] / 2 * (shape[3] / 2), prompts(), use);
    }
    case PhaseKind::kDecode:
      return vae().DecodeBytes(*params_.width, *params_.height, options.tile, use);
  }
  return 0;
}

std::string FluxRun::ShapeKey(size_t phase, const std::string& component) const {
  if (component == kClip) return absl::StrCat("p", prompts());
  if (component == kT5) return absl::StrCat("t", *params_.max_sequence_length, "p", prompts());
  std::string key = absl::StrCat(*params_.width, "x", *params_.height, "n", params_.seeds.size());
  if (params_.has(MediaRole::kInit)) key += "i";
  if (params_.has(MediaRole::kControl)) key += "c";
  const PhaseKind kind = phases_[phase].kind;
  if (kind == PhaseKind::kDenoise) absl::StrAppend(&key, "t", *params_.max_sequence_length, "p", prompts());
  return kind == PhaseKind::kEncodeMedia ? key + "/encode" : key;
}

}  // namespace

std::shared_ptr<const Run> MakeFluxRun(const FluxPipeline& pipeline, GenerateParams params) {
  return std::make_shared<const FluxRun>(pipeline, std::move(params));
}

}  // namespace latentd
