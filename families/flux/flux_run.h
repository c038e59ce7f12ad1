// FLUX.1's way from a prompt to a picture, by the parts of a FluxPipeline. Numerics are those of diffusers'
// FluxPipeline, FluxImg2ImgPipeline and FluxControlPipeline.
#ifndef LATENTD_FAMILIES_FLUX_FLUX_RUN_H_
#define LATENTD_FAMILIES_FLUX_FLUX_RUN_H_

#include <memory>

#include "families/flux/flux_pipeline.h"
#include "families/run.h"

namespace latentd {

// The prompts are tokenised here, once. REQUIRES: the pipeline, which outlives the run, has checked `params`.
std::shared_ptr<const Run> MakeFluxRun(const FluxPipeline& pipeline, GenerateParams params);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_FLUX_FLUX_RUN_H_
