#include "families/sdxl/sdxl_family.h"

#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/config/json_config.h"
#include "families/open_model.h"
#include "families/sd/sd_open.h"
#include "families/sdxl/sdxl_pipeline.h"

namespace latentd {
namespace {

// Latent → RGB by least squares over pictures, as in ComfyUI's latent_formats.
constexpr float kFactors[4][3] = {{0.3651f, 0.4232f, 0.4341f},
                                  {-0.2533f, -0.0042f, 0.1068f},
                                  {0.1076f, 0.1111f, -0.0362f},
                                  {-0.3165f, -0.2492f, -0.2188f}};
constexpr float kBias[3] = {0.1084f, -0.0175f, -0.0011f};
constexpr double kScaling = 0.13025;

}  // namespace

bool SdxlFamily::Detect(const ModelFiles& files) const { return DetectSdKind(files) == SdKind::kSdxl; }

absl::StatusOr<std::unique_ptr<Pipeline>> SdxlFamily::Open(const ModelFiles& files) const {
  ASSIGN_OR_RETURN(SdParts parts, OpenSdModel(files, SdKind::kSdxl));
  const UNetConfig& unet = parts.unet->config();
  const int64_t pooled = parts.encoders.back().model->config().projection;
  const int64_t numbers = unet.time_ids(pooled);
  if (numbers != 5 && numbers != 6) {
    return Unsupported(absl::StrCat("the UNet takes ", unet.added_dim,
                                    " added channels, of which the text encoder gives ", pooled,
                                    " and each number about the picture ", unet.time_ids_dim));
  }
  ModelDefaults& defaults = parts.defaults;
  defaults.width = defaults.height = unet.sample_size * parts.vae->config().scale();
  defaults.steps = 30;
  defaults.guidance = 5;
  defaults.strength = parts.variant == "inpaint" ? 0.9999 : 0.75;
  if (numbers == 5) {
    parts.variant = "refiner";
    defaults.strength = 0.3;
  }
  auto index = JsonConfig::Load(BaseFolder(files) + "/model_index.json");
  RETURN_IF_ERROR(index.status());
  parts.zeros_without_negative = index->Bool("force_zeros_for_empty_prompt", true);
  RETURN_IF_ERROR(index->status());
  if (parts.vae->config().scaling_factor == kScaling) {
    parts.preview.factors = at::tensor(at::ArrayRef<float>(&kFactors[0][0], 4 * 3)).view({4, 3});
    parts.preview.bias = at::tensor(at::ArrayRef<float>(kBias, 3));
  }
  RETURN_IF_ERROR(SetModelDefaults(files, /*embedded_guidance=*/8, parts));
  return std::make_unique<SdxlPipeline>(std::move(parts));
}

}  // namespace latentd
