#include "families/sd15/sd15_family.h"

#include <utility>

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "families/open_model.h"
#include "families/sd/sd_open.h"
#include "families/sd15/sd15_pipeline.h"

namespace latentd {
namespace {

// Latent → RGB by least squares over pictures, as in ComfyUI's latent_formats.
constexpr float kFactors[4][3] = {{0.3512f, 0.2297f, 0.3227f},
                                  {0.3250f, 0.4974f, 0.2350f},
                                  {-0.2829f, 0.1762f, 0.2721f},
                                  {-0.2120f, -0.2616f, -0.7177f}};
constexpr double kScaling = 0.18215;

}  // namespace

bool Sd15Family::Detect(const ModelFiles& files) const { return DetectSdKind(files) == SdKind::kSd15; }

absl::StatusOr<std::unique_ptr<Pipeline>> Sd15Family::Open(const ModelFiles& files) const {
  ASSIGN_OR_RETURN(SdParts parts, OpenSdModel(files, SdKind::kSd15));
  if (parts.unet->config().added_dim > 0) return Unsupported("the base folder is of SDXL, the file is not");
  ModelDefaults& defaults = parts.defaults;
  defaults.width = defaults.height = parts.unet->config().sample_size * parts.vae->config().scale();
  defaults.steps = 30;
  defaults.guidance = 7.5;
  defaults.strength = parts.variant == "inpaint" ? 1.0 : 0.75;
  if (parts.vae->config().scaling_factor == kScaling) {
    parts.preview.factors = at::tensor(at::ArrayRef<float>(&kFactors[0][0], 4 * 3)).view({4, 3});
    parts.preview.bias = at::zeros({3});
  }
  RETURN_IF_ERROR(SetModelDefaults(files, /*embedded_guidance=*/8.5, parts));
  return std::make_unique<Sd15Pipeline>(std::move(parts));
}

}  // namespace latentd
