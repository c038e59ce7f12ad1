#include "families/flux/flux_pipeline.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/request_checks.h"
#include "families/sampling/noise.h"
#include "families/vae/picture_codec.h"
#include "families/working_memory.h"

namespace latentd {
namespace {

constexpr char kSampler[] = "euler";
constexpr absl::string_view kFields[] = {"prompt_2", "negative_prompt_2", "true_cfg_scale", "shift",
                                         "max_sequence_length"};

constexpr char kPooled[] = "pooled", kT5[] = "t5", kNegativePooled[] = "neg.pooled", kNegativeT5[] = "neg.t5";

// As in diffusers: without a negative prompt, be it an empty one, nothing is guided.
bool UsesNegative(const GenerateParams& params) {
  return *params.true_cfg_scale > 1 && params.negative_prompt.has_value();
}

// What an encoder reads: CLIP the prompt, T5 the second one where there is one; an empty second one is none.
const std::string& TextFor(const std::string& component, const std::string& first,
                           const std::optional<std::string>& second) {
  return component == "text_encoder_2" && second && !second->empty() ? *second : first;
}

// --------------------------------------------------------------------------------------------- denoising

// One guided or unguided pass needs these; a run with a negative prompt has two of them.
struct Prompt {
  at::Tensor t5, pooled;  // as they came, until the first step
  FluxText text;
  FluxConditioning conditioning;
};

class FluxDenoiser : public Denoiser {
 public:
  FluxDenoiser(std::shared_ptr<const FluxTransformer> transformer, std::vector<float> sigmas, int64_t start,
               std::vector<at::Tensor> pictures, std::vector<at::Tensor> controls,
               std::vector<Prompt> prompts, const GenerateParams& params, int64_t latent_height,
               int64_t latent_width)
      : transformer_(std::move(transformer)),
        sigmas_(std::move(sigmas)),
        start_(start),
        index_(start),
        pictures_(std::move(pictures)),
        controls_(std::move(controls)),
        prompts_(std::move(prompts)),
        guidance_(*params.guidance),
        true_cfg_scale_(*params.true_cfg_scale),
        height_(latent_height),
        width_(latent_width) {}

  int64_t step_count() const override { return last() - start_; }
  int64_t picture_count() const override { return static_cast<int64_t>(pictures_.size()); }
  bool done() const override { return index_ == last(); }

  at::Tensor latents() const override {
    c10::InferenceMode inference;
    return UnpackLatents(at::cat(pictures_), height_, width_).to(at::kCPU);
  }

  // The step's direction followed to sigma 0: x − sigma · v, with v out of the two ends of the step.
  at::Tensor prediction() const override {
    if (before_.empty()) return latents();
    c10::InferenceMode inference;
    const float before = sigma(index_ - 1), now = sigma(index_);
    const at::Tensor from = at::cat(before_), to = at::cat(pictures_);
    return UnpackLatents(at::lerp(from, to, before / (before - now)), height_, width_).to(at::kCPU);
  }

 protected:
  absl::StatusOr<at::Tensor> StepPicture(const WeightView& w, int64_t picture) override {
    c10::InferenceMode inference;
    if (picture == 0) BeginStep(w);
    const auto i = static_cast<size_t>(picture);
    const at::Tensor& x = pictures_[i];
    const at::Tensor input = Input(w, i);
    // Latents and what is done with them stay in fp32, whatever the network computes in.
    at::Tensor velocity = (*transformer_)(w, input, modulations_[0], prompts_[0].text).to(at::kFloat);
    if (prompts_.size() > 1) {
      const at::Tensor negative = (*transformer_)(w, input, modulations_[1], prompts_[1].text).to(at::kFloat);
      velocity = velocity.sub_(negative).mul_(true_cfg_scale_).add_(negative);
    }
    stepped_.resize(i);
    stepped_.push_back(EulerStep(x, velocity, sigma(index_), sigma(index_ + 1)));
    return stepped_.back();
  }

  StepReport EndStep() override {
    before_ = std::move(pictures_);
    pictures_ = std::move(stepped_);
    stepped_.clear();
    modulations_.clear();
    const double from = sigma(index_++);
    return StepReport{.index = index_ - start_, .count = step_count(), .sigma = from};
  }

 private:
  float sigma(int64_t index) const { return sigmas_[static_cast<size_t>(index)]; }

  // What all pictures of a step share.
  void BeginStep(const WeightView& w) {
    if (index_ == start_) Prepare(w);
    modulations_.clear();
    for (const Prompt& prompt : prompts_) {
      modulations_.push_back(transformer_->Modulation(w, sigma(index_), prompt.conditioning));
    }
  }

  int64_t last() const { return static_cast<int64_t>(sigmas_.size()) - 1; }

  // A picture's tokens, with those of its control image beside them. A control LoRA that applies to a part of
  // the steps alone leaves the model's own input in the others.
  at::Tensor Input(const WeightView& w, size_t i) const {
    if (controls_.empty() || transformer_->Inputs(w) == pictures_[i].size(2)) return pictures_[i];
    return at::cat({pictures_[i], controls_[i]}, 2);
  }

  // Brings what Begin was given to where the weights are. What they make of the prompts is the same in all
  // steps. A first step that failed does it once more, at no cost where it is done.
  void Prepare(const WeightView& w) {
    for (at::Tensor& x : pictures_) x = x.to(w.device());
    for (at::Tensor& x : controls_) x = x.to(w.device());
    for (Prompt& prompt : prompts_) {
      prompt.text = transformer_->PrepareText(w, prompt.t5, height_ / 2, width_ / 2);
      prompt.conditioning = transformer_->PrepareConditioning(w, prompt.pooled, guidance_);
    }
  }

  const std::shared_ptr<const FluxTransformer> transformer_;
  const std::vector<float> sigmas_;
  const int64_t start_;
  int64_t index_;                     // of the step to come, in sigmas_
  std::vector<at::Tensor> pictures_;  // packed latents, [1, tokens, 64] each; in host memory until a step
  std::vector<at::Tensor> controls_;  // packed latents of the control image for each; empty without one
  std::vector<at::Tensor> before_;    // the same before the last step
  std::vector<at::Tensor>
      stepped_;  // the same after the step that is under way, of those that had their turn
  std::vector<at::Tensor> modulations_;  // of the step that is under way, by prompt
  std::vector<Prompt> prompts_;          // wanted, then unwanted
  const double guidance_, true_cfg_scale_;
  const int64_t height_, width_;  // of the latents
};

}  // namespace

RequestUses FluxPipeline::MakeUses() const {
  RequestUses uses = UsesOf(parts_.defaults, PixelsPerToken(), kFields);
  uses["sampler"].choices = {kSampler};
  const FluxConfig& config = parts_.transformer->config();
  uses.media = {{.role = MediaRole::kInit},
                {.role = MediaRole::kControl, .required = config.in_channels > config.out_channels}};
  return uses;
}

absl::Status FluxPipeline::Validate(GenerateParams& params) const {
  const ModelDefaults& defaults = parts_.defaults;
  RETURN_IF_ERROR(CheckUses(params, uses(), "FLUX.1"));
  FillSize({defaults.width, defaults.height}, PixelsPerToken(), params);
  RETURN_IF_ERROR(CheckSize(params, PixelsPerToken()));
  if (!params.steps) params.steps = defaults.steps;
  if (!params.guidance) params.guidance = defaults.guidance;
  if (!params.true_cfg_scale) params.true_cfg_scale = defaults.true_cfg_scale;
  if (!params.sampler) params.sampler = defaults.sampler;
  if (*params.sampler != kSampler) {
    return FieldError("params.sampler",
                      absl::StrCat("\"", *params.sampler, "\" is not known; there is \"euler\""));
  }
  if (!params.max_sequence_length) params.max_sequence_length = defaults.max_sequence_length;
  RETURN_IF_ERROR(FillSeeds(params));

  if (!params.strength) params.strength = defaults.strength;
  if (params.has(MediaRole::kInit)) {
    RETURN_IF_ERROR(CheckPicture("params.init_image", params.picture(MediaRole::kInit)));
    if (StartIndex(*params.steps, *params.strength) >= *params.steps) {
      return FieldError("params.init_image.strength",
                        absl::StrCat(*params.strength, " of ", *params.steps, " steps leaves none to run"));
    }
  }
  RETURN_IF_ERROR(CheckControl(params));
  if (params.noise.defined()) {
    std::vector<int64_t> shape = LatentShape(params);
    shape[0] = static_cast<int64_t>(params.seeds.size());
    if (params.noise.sizes() != at::IntArrayRef(shape))
      return FieldError("params.noise", "has another shape");
  }
  return absl::OkStatus();
}

absl::Status FluxPipeline::CheckControl(const GenerateParams& params) const {
  const FluxConfig& config = parts_.transformer->config();
  const bool given = params.has(MediaRole::kControl);
  if (given) RETURN_IF_ERROR(CheckPicture("params.control_image", params.picture(MediaRole::kControl)));
  if (params.grown_inputs == GenerateParams::kUnknownInputs) return absl::OkStatus();
  const int64_t inputs = std::max(params.grown_inputs, config.in_channels);
  if (inputs != config.out_channels && inputs != 2 * config.out_channels) {
    return FieldError("loras", absl::StrCat("grow the model's input to ", inputs,
                                            " channels; a control LoRA makes it ", 2 * config.out_channels));
  }
  const bool wanted = inputs > config.out_channels;
  if (wanted && !given) {
    return FieldError("params.control_image", "is missing: this model, or one of the LoRAs, draws after one");
  }
  if (given && !wanted) {
    return FieldError("params.control_image", "is not taken by this model without a control LoRA");
  }
  return absl::OkStatus();
}

std::vector<int64_t> FluxPipeline::LatentShape(const GenerateParams& params) const {
  const int64_t scale = parts_.vae->config().scale();
  return {1, parts_.vae->config().latent_channels, *params.height / scale, *params.width / scale};
}

std::vector<std::string> FluxPipeline::EncoderComponents(const GenerateParams& params) const {
  return {"text_encoder", "text_encoder_2"};
}

absl::Status FluxPipeline::Encode(const std::string& component, const WeightView& weights,
                                  const GenerateParams& params,
                                  const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings,
                                  Conditioning& conditioning) const {
  c10::InferenceMode inference;
  auto encode = [&](const std::string& text, const char* pooled_key, const char* t5_key) {
    if (component == "text_encoder") {
      const int64_t length =
          std::min(parts_.clip_tokenizer->model_max_length(), parts_.clip->config().positions);
      conditioning[pooled_key] =
          ToHost((*parts_.clip)(weights, parts_.clip_tokenizer->Encode(text, length)).pooled);
    } else {
      conditioning[t5_key] =
          ToHost((*parts_.t5)(weights, parts_.t5_tokenizer->Encode(text, *params.max_sequence_length)));
    }
  };
  if (component != "text_encoder" && component != "text_encoder_2") {
    return absl::InvalidArgumentError(absl::StrCat(component, " encodes no text"));
  }
  encode(TextFor(component, params.prompt, params.prompt_2), kPooled, kT5);
  if (UsesNegative(params)) {
    encode(TextFor(component, *params.negative_prompt, params.negative_prompt_2), kNegativePooled,
           kNegativeT5);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TokenCount>> FluxPipeline::CountTokens(const GenerateParams& params) const {
  const int64_t clip =
      std::min(parts_.clip_tokenizer->model_max_length(), parts_.clip->config().positions) - 2;
  const int64_t t5 = *params.max_sequence_length - 1;
  std::vector<TokenCount> counts;
  const auto count = [&](absl::string_view field, const std::string& text,
                         const std::optional<std::string>& second) {
    const auto clip_total = static_cast<int64_t>(parts_.clip_tokenizer->Tokenize(text).size());
    counts.push_back({std::string(field), "text_encoder", std::min(clip_total, clip), clip_total});
    const std::string& own = TextFor("text_encoder_2", text, second);
    const int64_t t5_total = parts_.t5_tokenizer->Count(own);
    counts.push_back({&own == &text ? std::string(field) : absl::StrCat(field, "_2"), "text_encoder_2",
                      std::min(t5_total, t5), t5_total});
  };
  count("params.prompt", params.prompt, params.prompt_2);
  if (UsesNegative(params))
    count("params.negative_prompt", *params.negative_prompt, params.negative_prompt_2);
  return counts;
}

std::string FluxPipeline::EncodeKey(const std::string& component, const GenerateParams& params) const {
  // Lengths stand before texts, so that no two pairs of texts read alike.
  const std::string& wanted = TextFor(component, params.prompt, params.prompt_2);
  std::string key = absl::StrCat(wanted.size(), ":", wanted);
  if (UsesNegative(params)) {
    const std::string& unwanted = TextFor(component, *params.negative_prompt, params.negative_prompt_2);
    absl::StrAppend(&key, "|", unwanted.size(), ":", unwanted);
  }
  if (component == "text_encoder_2") absl::StrAppend(&key, "|", *params.max_sequence_length);
  return key;
}

int64_t FluxPipeline::ConditioningBytes(const std::string& component, const GenerateParams& params) const {
  const int64_t prompts = UsesNegative(params) ? 2 : 1;
  const int64_t floats = component == "text_encoder" ? parts_.clip->config().dim
                                                     : *params.max_sequence_length * parts_.t5->config().dim;
  return prompts * floats * int64_t{sizeof(float)};
}

absl::StatusOr<at::Tensor> FluxPipeline::EncodeImage(const WeightView& weights, const GenerateParams& params,
                                                     const PhaseOptions& options) const {
  c10::InferenceMode inference;
  std::vector<at::Tensor> latents;
  for (const at::Tensor& image : {params.picture(MediaRole::kControl), params.picture(MediaRole::kInit)}) {
    if (!image.defined()) continue;
    const at::Tensor picture = ResizePicture(image, *params.width, *params.height);
    const AutoencoderKl::Posterior posterior =
        EncodePicture(*parts_.vae, weights, PictureToInput(weights, picture), options.tile);
    const int draw = static_cast<int>(latents.size());
    std::vector<at::Tensor> samples;
    for (uint64_t seed : params.seeds) {
      samples.push_back(posterior.Sample(DrawNoise(seed, posterior.mean.sizes().vec(), draw + 1).back()));
    }
    latents.push_back(parts_.vae->ToModel(at::cat(samples)));
  }
  return at::cat(latents, 1);
}

absl::StatusOr<std::unique_ptr<Denoiser>> FluxPipeline::Begin(const GenerateParams& params,
                                                              Conditioning conditioning,
                                                              at::Tensor image_latents) const {
  c10::InferenceMode inference;
  const std::vector<int64_t> shape = LatentShape(params);
  const int64_t tokens = shape[2] / 2 * (shape[3] / 2);
  std::vector<float> sigmas = FlowMatchSigmas(parts_.schedule, *params.steps, tokens, params.shift);
  const bool from_image = params.has(MediaRole::kInit), controlled = params.has(MediaRole::kControl);
  // A seed's draws: samples of the pictures, in the order of EncodeImage, then noise.
  const int draws = (controlled ? 1 : 0) + (from_image ? 1 : 0) + 1;
  if (params.has_pictures() &&
      image_latents.sizes().slice(1) != at::IntArrayRef({(draws - 1) * shape[1], shape[2], shape[3]})) {
    return absl::InternalError("the latents of the request's pictures have another shape");
  }
  const int64_t start = from_image ? StartIndex(*params.steps, *params.strength) : 0;

  std::vector<at::Tensor> pictures, controls;
  for (size_t i = 0; i < params.seeds.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    at::Tensor x = params.noise.defined() ? params.noise.narrow(0, n, 1)
                                          : DrawNoise(params.seeds[i], shape, draws).back();
    at::Tensor given = image_latents;
    if (params.has_pictures() && given.size(0) > 1) given = given.narrow(0, n, 1);
    if (controlled) controls.push_back(PackLatents(given.narrow(1, 0, shape[1])));
    if (from_image) {
      const at::Tensor picture = given.narrow(1, given.size(1) - shape[1], shape[1]);
      x = AddNoise(picture, x, sigmas[static_cast<size_t>(start)]);
    }
    pictures.push_back(PackLatents(x));
  }

  auto take = [&](const char* t5, const char* pooled) -> absl::StatusOr<Prompt> {
    Prompt prompt{conditioning[t5], conditioning[pooled], {}, {}};
    if (!prompt.t5.defined() || !prompt.pooled.defined())
      return absl::InternalError("a prompt was not encoded");
    return prompt;
  };
  std::vector<Prompt> prompts(1);
  ASSIGN_OR_RETURN(prompts[0], take(kT5, kPooled));
  if (UsesNegative(params)) {
    ASSIGN_OR_RETURN(Prompt negative, take(kNegativeT5, kNegativePooled));
    prompts.push_back(std::move(negative));
  }
  return std::make_unique<FluxDenoiser>(parts_.transformer, std::move(sigmas), start, std::move(pictures),
                                        std::move(controls), std::move(prompts), params, shape[2], shape[3]);
}

int64_t FluxPipeline::SmallerTile(const GenerateParams& params, int64_t tile) const {
  return SmallerVaeTile(*parts_.vae, *params.width, *params.height, tile);
}

absl::StatusOr<at::Tensor> FluxPipeline::Decode(const WeightView& weights, const at::Tensor& latents,
                                                const PhaseOptions& options) const {
  c10::InferenceMode inference;
  return DecodePicture(*parts_.vae, weights, latents, options.tile);
}

at::Tensor FluxPipeline::Preview(const at::Tensor& latents) const {
  c10::InferenceMode inference;
  return parts_.preview.Render(latents);
}

int64_t FluxPipeline::WorkingBytes(const std::string& component, const GenerateParams& params,
                                   const PhaseOptions& options, bool encodes_picture) const {
  const std::vector<int64_t> shape = LatentShape(params);
  const auto pictures = static_cast<int64_t>(params.seeds.size());
  const int64_t latent_bytes = shape[1] * shape[2] * shape[3] * pictures * int64_t{sizeof(float)};
  const WeightUse use = UseOf(*this, component, options);
  const int64_t prompts = UsesNegative(params) ? 2 : 1;
  if (component == "vae") {
    return encodes_picture
               ? 3 * latent_bytes + parts_.vae->EncodeBytes(*params.width, *params.height, options.tile, use)
               : parts_.vae->DecodeBytes(*params.width, *params.height, options.tile, use);
  }
  if (component == "transformer") {
    // Of all pictures: latents before and after a step and the step before, a control image's, and a
    // preview's way.
    const int64_t kept = (params.has(MediaRole::kControl) ? 7 : 6) * latent_bytes;
    return kept + parts_.transformer->WorkingBytes(*params.max_sequence_length, shape[2] / 2 * (shape[3] / 2),
                                                   prompts, use);
  }
  if (component == "text_encoder") return parts_.clip->WorkingBytes(use);
  const int64_t length = *params.max_sequence_length;
  return prompts * length * parts_.t5->config().dim * int64_t{sizeof(float)} +
         parts_.t5->WorkingBytes(length, use);
}

std::string FluxPipeline::ShapeKey(const std::string& component, const GenerateParams& params) const {
  const int prompts = UsesNegative(params) ? 2 : 1;
  if (component == "text_encoder") return absl::StrCat("p", prompts);
  if (component == "text_encoder_2") return absl::StrCat("t", *params.max_sequence_length, "p", prompts);
  std::string key = absl::StrCat(*params.width, "x", *params.height, "n", params.seeds.size());
  if (params.has(MediaRole::kInit)) key += "i";
  if (params.has(MediaRole::kControl)) key += "c";
  if (component == "transformer") absl::StrAppend(&key, "t", *params.max_sequence_length, "p", prompts);
  return key;
}

}  // namespace latentd
