// FLUX.1's denoiser: Euler steps over packed latents, with a guidance that the network is told, and with
// classifier-free guidance beside it where there is a negative prompt.
#ifndef LATENTD_FAMILIES_FLUX_FLUX_DENOISER_H_
#define LATENTD_FAMILIES_FLUX_FLUX_DENOISER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "families/denoiser.h"
#include "families/flux/flux_transformer.h"

namespace latentd {

struct FluxPrompt {
  at::Tensor t5;      // [1, tokens, text_dim]
  at::Tensor pooled;  // [1, pooled_dim]
};

// All that a run begins with, in host memory.
struct FluxDenoising {
  std::shared_ptr<const FluxTransformer> transformer;
  std::vector<float> sigmas;         // of all steps, and 0
  int64_t start = 0;                 // the first step that is run
  std::vector<at::Tensor> pictures;  // packed latents, [1, tokens, 64] each
  std::vector<at::Tensor> controls;  // packed latents of the control image for each; empty without one
  std::vector<FluxPrompt> prompts;   // wanted, then unwanted where it is guided by one
  double guidance = 0, true_cfg_scale = 1;
  int64_t latent_height = 0, latent_width = 0;
};
// Shares the network, and may outlive the pipeline that it is of.
std::unique_ptr<Denoiser> MakeFluxDenoiser(FluxDenoising run);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_FLUX_FLUX_DENOISER_H_
