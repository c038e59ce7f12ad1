// What inpainting makes of a request's mask. Values and order of draws are those of diffusers' inpainting
// pipelines. Pure functions; any thread. Everything is in host memory.
#ifndef LATENTD_FAMILIES_SD_SD_MASKS_H_
#define LATENTD_FAMILIES_SD_SD_MASKS_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "families/generate_params.h"

namespace latentd {

// A mask at the picture's size, [1, 1, H, W] fp32 from 0 (stays) to 1 (repainted). `binary`: one of the two,
// from half grey up.
at::Tensor PixelMask(const GenerateParams& params, bool binary);

// The same at the size of the latents: one pixel stands for `scale` × `scale`.
at::Tensor LatentMask(const at::Tensor& pixel_mask, int64_t scale);

// Which draws a picture's source gives before its sampler, in this order; each has the latents' shape.
struct SdDraws {
  bool image = false;   // the sample of the init image
  bool noise = false;   // what the run starts from
  bool masked = false;  // the sample of what the mask leaves
};
// `concat`: the network takes the mask, and so needs no init image when it starts from pure noise.
SdDraws DrawsOf(const GenerateParams& params, bool concat);

// Whether the run starts from nothing but noise.
bool StartsFromNoise(const GenerateParams& params);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_MASKS_H_
