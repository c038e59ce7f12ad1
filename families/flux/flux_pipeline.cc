#include "families/flux/flux_pipeline.h"

#include <algorithm>
#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/flux/flux_run.h"
#include "families/request_checks.h"

namespace latentd {
namespace {

constexpr char kSampler[] = "euler";
constexpr absl::string_view kFields[] = {"prompt_2", "negative_prompt_2", "true_cfg_scale", "shift",
                                         "max_sequence_length"};

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

absl::StatusOr<std::shared_ptr<const Run>> FluxPipeline::Prepare(GenerateParams params) const {
  RETURN_IF_ERROR(Validate(params));
  return MakeFluxRun(*this, std::move(params));
}

}  // namespace latentd
