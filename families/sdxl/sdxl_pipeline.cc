#include "families/sdxl/sdxl_pipeline.h"

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/request_checks.h"

namespace latentd {
namespace {

constexpr absl::string_view kFields[] = {
    "prompt_2", "negative_prompt_2", "original_size",           "target_size",
    "crop",     "aesthetic_score",   "negative_aesthetic_score"};

constexpr double kScore = 6, kNegativeScore = 2.5;
constexpr int64_t kNumbersWithScore = 5;

}  // namespace

absl::Span<const absl::string_view> SdxlPipeline::OwnFields() const { return kFields; }

RequestUses SdxlPipeline::MakeUses() const {
  RequestUses uses = SdPipeline::MakeUses();
  if (!takes_score()) {
    for (const char* field : {"aesthetic_score", "negative_aesthetic_score"}) {
      uses.Refuse(field, "known to the refiner alone");
    }
    return uses;
  }
  uses["aesthetic_score"].usual = kScore;
  uses["negative_aesthetic_score"].usual = kNegativeScore;
  uses.Refuse("target_size", "not known to the refiner");
  if (parts_.encoders.size() < 2) {
    for (const char* field : {"prompt_2", "negative_prompt_2"}) {
      uses.Refuse(field, "without a text encoder to read it: the refiner has one, for params.prompt");
    }
  }
  return uses;
}

bool SdxlPipeline::takes_score() const {
  return parts_.unet->config().time_ids(parts_.encoders.back().model->config().projection) ==
         kNumbersWithScore;
}

absl::Status SdxlPipeline::ValidateOwn(GenerateParams& params) const {
  if (!takes_score()) return absl::OkStatus();
  if (!params.has(MediaRole::kInit) && !params.init_latents.defined()) {
    return FieldError(
        "params.init_image",
        "is missing: the refiner goes on from a picture, or from params.init_latents of the base model");
  }
  return absl::OkStatus();
}

absl::Status SdxlPipeline::AddToRow(const GenerateParams& params, bool negative, SdPromptRow& row) const {
  if (!row.pooled.defined()) return absl::InternalError("a pooled prompt was not encoded");
  const PixelSize own{*params.width, *params.height};
  const PixelSize original = params.original_size.value_or(own), target = params.target_size.value_or(own);
  // diffusers' refiner takes the unwanted one as not cut.
  const PixelPoint crop = negative && takes_score() ? PixelPoint() : params.crop.value_or(PixelPoint());
  std::vector<double> ids = {static_cast<double>(original.height), static_cast<double>(original.width),
                             static_cast<double>(crop.top), static_cast<double>(crop.left)};
  if (takes_score()) {
    ids.push_back(negative ? params.negative_aesthetic_score.value_or(kNegativeScore)
                           : params.aesthetic_score.value_or(kScore));
  } else {
    ids.insert(ids.end(), {static_cast<double>(target.height), static_cast<double>(target.width)});
  }
  row.time_ids = at::tensor(ids, at::kFloat).unsqueeze(0);
  return absl::OkStatus();
}

}  // namespace latentd
