// Classifier-free guidance: what is done with a prediction for the prompt and one for the negative prompt.
// Pure functions; any thread. Tensors of one shape [N, …], on any device.
#ifndef LATENTD_FAMILIES_SAMPLING_GUIDANCE_H_
#define LATENTD_FAMILIES_SAMPLING_GUIDANCE_H_

#include "ATen/core/Tensor.h"

namespace latentd {

// negative + scale·(positive − negative). Ho and Salimans 2022, "Classifier-Free Diffusion Guidance".
at::Tensor Guide(const at::Tensor& positive, const at::Tensor& negative, double scale);

// Brings the deviation of each picture's `guided` prediction back to that of `positive`, and mixes the result
// in by `share` from 0 (nothing changes) to 1. Lin et al. 2023, "Common Diffusion Noise Schedules and Sample
// Steps Are Flawed", §3.4.
at::Tensor GuidanceRescale(const at::Tensor& guided, const at::Tensor& positive, double share);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_GUIDANCE_H_
