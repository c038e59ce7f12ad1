#include "families/sd/sd_pipeline.h"

#include <algorithm>
#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/encoders/text_embedding.h"
#include "families/request_checks.h"
#include "families/sd/sd_run.h"

namespace latentd {
namespace {

// The sampler's word for a share of the schedule is the request's for an init image.
absl::Status InRequestTerms(const absl::Status& status) {
  const ErrorDetails details = GetErrorDetails(status);
  const auto field = details.find("field");
  if (field == details.end() || field->second != "params.strength") return status;
  return AtField(status, "params.init_image.strength");
}

absl::Status CheckTiles(const DenoiseTiles& tiles, int64_t scale) {
  constexpr int64_t kSmallestTile = 4;  // latents
  for (int64_t side : {tiles.width, tiles.height}) {
    if (side < kSmallestTile * scale || side % scale != 0) {
      return FieldError("params.denoise_tiles",
                        absl::StrCat("a side must be a multiple of ", scale, " and at least ",
                                     kSmallestTile * scale, "; it is ", side));
    }
  }
  const int64_t most = std::min(tiles.width, tiles.height) / 2;
  if (tiles.overlap >= 0 && tiles.overlap <= most && tiles.overlap % scale == 0) return absl::OkStatus();
  return FieldError("params.denoise_tiles", absl::StrCat("the overlap must be a multiple of ", scale,
                                                         " from 0 to half of a "
                                                         "tile's side; it is ",
                                                         tiles.overlap));
}

}  // namespace

EmbeddingEncoder VectorsFor(const SdEncoder& encoder) {
  return encoder.component == "text_encoder_2" ? EmbeddingEncoder::kClipG : EmbeddingEncoder::kClipL;
}

std::vector<int64_t> SdPipeline::LatentShape(const GenerateParams& params) const {
  const int64_t scale = parts_.vae->config().scale();
  return {1, parts_.vae->config().latent_channels, *params.height / scale, *params.width / scale};
}

absl::StatusOr<std::shared_ptr<const Run>> SdPipeline::Prepare(GenerateParams params) const {
  RETURN_IF_ERROR(Validate(params));
  return MakeSdRun(*this, std::move(params));
}

// -------------------------------------------------------------------------------------------- validation

namespace {

// Beside those that every family knows.
constexpr absl::string_view kFields[] = {"prompt_syntax",
                                         "clip_skip",
                                         "schedule",
                                         "eta",
                                         "guidance_rescale",
                                         "guidance_list",
                                         "denoising_start",
                                         "denoising_end",
                                         "mask_image.gradient",
                                         "mask_image.paste_back",
                                         "denoise_tiles"};

}  // namespace

RequestUses SdPipeline::MakeUses() const {
  std::vector<absl::string_view> fields(std::begin(kFields), std::end(kFields));
  fields.insert(fields.end(), OwnFields().begin(), OwnFields().end());
  RequestUses uses = UsesOf(parts_.defaults, parts_.vae->config().scale(), fields);
  for (const SamplerInfo& sampler : AllSamplers()) {
    absl::StatusOr<SamplerSettings> settings = parts_.scheduler->For(sampler.name);
    if (!settings.ok()) continue;
    SamplerOptions options;
    options.solver = std::move(settings->solver);
    if (!MakeSampler(sampler.name, std::move(settings->schedule), options).ok()) continue;
    uses["sampler"].choices.emplace_back(sampler.name);
  }
  for (const absl::string_view name : SigmaScheduleNames()) {
    uses["schedule"].choices.emplace_back(name);
  }
  uses.init_latents = true;
  uses.Refuse("true_cfg_scale", absl::StrCat("not known to ", family(),
                                             " models: classifier-free guidance is params.guidance here"));
  uses.Refuse("max_sequence_length", absl::StrCat("not known to ", family(),
                                                  " models: their text encoders read 77 tokens at a time"));
  uses.media = {{.role = MediaRole::kInit, .required = takes_mask()},
                {.role = MediaRole::kMask, .required = takes_mask()}};
  return uses;
}

absl::Status SdPipeline::Validate(GenerateParams& params) const {
  const ModelDefaults& defaults = parts_.defaults;
  RETURN_IF_ERROR(CheckUses(params, uses(), family()));
  if (params.prompt_syntax) RETURN_IF_ERROR(ParsePromptSyntax(*params.prompt_syntax).status());

  FillSize({defaults.width, defaults.height}, parts_.vae->config().scale(), params);
  RETURN_IF_ERROR(CheckSize(params, parts_.vae->config().scale()));
  if (!params.steps) params.steps = defaults.steps;
  if (!params.guidance) params.guidance = defaults.guidance;
  if (static_cast<int64_t>(params.guidance_list.size()) > *params.steps) {
    return FieldError("params.guidance_list", absl::StrCat("has ", params.guidance_list.size(),
                                                           " entries for ", *params.steps, " steps"));
  }
  RETURN_IF_ERROR(FillSeeds(params));
  if (!params.sampler) params.sampler = defaults.sampler;
  RETURN_IF_ERROR(ValidatePictures(params));
  RETURN_IF_ERROR(ValidateOwn(params));
  return NewSampler(params, nullptr).status();
}

absl::Status SdPipeline::ValidatePictures(GenerateParams& params) const {
  if (!params.strength) params.strength = parts_.defaults.strength;
  const std::vector<int64_t> shape = LatentShape(params);
  const auto count = static_cast<int64_t>(params.seeds.size());
  auto fits = [&](const at::Tensor& t, bool one) {
    return t.dim() == 4 && (t.size(0) == count || (one && t.size(0) == 1)) &&
           t.sizes().slice(1) == at::IntArrayRef(shape).slice(1) && t.scalar_type() == at::kFloat &&
           t.is_cpu();
  };
  if (params.has(MediaRole::kInit))
    RETURN_IF_ERROR(CheckPicture("params.init_image", params.picture(MediaRole::kInit)));
  if (params.init_latents.defined()) {
    if (params.has(MediaRole::kInit))
      return FieldError("params.init_latents", "cannot be given with an init image");
    if (!fits(params.init_latents, /*one=*/true)) {
      return FieldError("params.init_latents", absl::StrCat("must be fp32 of the shape [1 or ", count, ", ",
                                                            shape[1], ", ", shape[2], ", ", shape[3], "]"));
    }
  }
  if (params.has(MediaRole::kMask)) {
    RETURN_IF_ERROR(CheckPicture("params.mask_image", params.picture(MediaRole::kMask)));
    if (!params.has(MediaRole::kInit))
      return FieldError("params.mask_image", "needs an init image to keep parts of");
    if (takes_mask() && params.gradient_mask.value_or(false)) {
      return FieldError("params.mask_image.gradient",
                        "is not known to inpainting models, which read a mask of two values");
    }
  } else if (takes_mask()) {
    return FieldError("params.mask_image",
                      "is missing: this model was trained to repaint a part of an init image");
  } else if (params.gradient_mask) {
    return FieldError("params.mask_image.gradient", "needs a mask");
  }
  const SamplerSettings& own = parts_.scheduler->own();
  if (params.gradient_mask.value_or(false) && (own.solver.edm || own.solver.continuous)) {
    return FieldError("params.mask_image.gradient",
                      "compares with training steps, which this model does not have");
  }
  if (params.denoising_start && !params.init_latents.defined() && !params.has(MediaRole::kInit)) {
    return FieldError("params.denoising_start", "needs the latents of another model's run, or an init image");
  }
  if (params.tiles) RETURN_IF_ERROR(CheckTiles(*params.tiles, parts_.vae->config().scale()));
  if (params.noise.defined() && !fits(params.noise, /*one=*/false)) {
    return FieldError("params.noise", "has another shape");
  }
  return absl::OkStatus();
}

SamplerOptions SdPipeline::OptionsOf(const GenerateParams& params) const {
  SamplerOptions options;
  options.steps = *params.steps;
  options.ays = ays_table();
  if (params.has(MediaRole::kInit) || params.init_latents.defined()) options.strength = *params.strength;
  options.denoising_start = params.denoising_start;
  options.denoising_end = params.denoising_end;
  options.eta = params.eta;
  return options;
}

absl::StatusOr<std::unique_ptr<Sampler>> SdPipeline::NewSampler(const GenerateParams& params,
                                                                std::shared_ptr<NoiseSource> noise) const {
  SamplerOptions options = OptionsOf(params);
  options.noise = std::move(noise);
  if (params.schedule) {
    ASSIGN_OR_RETURN(options.schedule, ParseSigmaSchedule(*params.schedule, "params.schedule"));
  }
  ASSIGN_OR_RETURN(SamplerSettings settings, parts_.scheduler->For(*params.sampler));
  options.solver = std::move(settings.solver);
  auto sampler = MakeSampler(*params.sampler, std::move(settings.schedule), options);
  if (!sampler.ok()) return InRequestTerms(sampler.status());
  return sampler;
}

// --------------------------------------------------------------------------------------------------- text

std::vector<PromptField> SdPipeline::EmbeddingPrompts(const GenerateParams& params) const {
  std::vector<PromptField> prompts = {{"params.prompt", params.prompt}};
  for (const auto& [field, text] : {std::pair<absl::string_view, const std::optional<std::string>&>{
                                        "params.negative_prompt", params.negative_prompt},
                                    {"params.prompt_2", params.prompt_2},
                                    {"params.negative_prompt_2", params.negative_prompt_2}}) {
    if (text) prompts.push_back({field, *text});
  }
  return prompts;
}

absl::Status SdPipeline::CheckEmbedding(const std::string& name, const TextEmbeddingShape& shape) const {
  TextEmbeddingShape wanted;
  bool fits = true;
  for (const SdEncoder& encoder : parts_.encoders) {
    const bool second = VectorsFor(encoder) == EmbeddingEncoder::kClipG;
    const int64_t columns = encoder.model->config().dim;
    (second ? wanted.clip_g : wanted.clip_l) = columns;
    fits = fits && shape.columns(VectorsFor(encoder)) == columns;
  }
  // A refiner has no use for clip_l, and is given the base model's prompts; without clip_g it is another
  // family.
  if (fits && (shape.clip_g == 0 || wanted.clip_g != 0)) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "EMBEDDING_MISMATCH",
      absl::StrCat("embedding ", name, " does not fit: it has vectors of ", shape.ToString(),
                   ", and the text encoders of this ", family(), " model take ", wanted.ToString()),
      {{"embedding", name}, {"has", shape.ToString()}, {"wants", wanted.ToString()}});
}

}  // namespace latentd
