// Stable Diffusion's way from a prompt to a picture, by the parts of an SdPipeline. Numerics are those of
// diffusers' text-to-image, image-to-image and inpainting pipelines.
#ifndef LATENTD_FAMILIES_SD_SD_RUN_H_
#define LATENTD_FAMILIES_SD_SD_RUN_H_

#include <memory>

#include "absl/status/statusor.h"
#include "families/run.h"
#include "families/sd/sd_pipeline.h"

namespace latentd {

// REQUIRES: the pipeline, which outlives the run, has checked `params` but for the prompts. Errors: those of
// SdPromptSet::Make.
absl::StatusOr<std::shared_ptr<const Run>> MakeSdRun(const SdPipeline& pipeline, GenerateParams params);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_RUN_H_
