#include "families/sd/sd_masks.h"

#include "ATen/ATen.h"
#include "families/vae/picture_codec.h"

namespace latentd {

at::Tensor PixelMask(const GenerateParams& params, bool binary) {
  const at::Tensor rgb =
      ResizePicture(params.picture(MediaRole::kMask), *params.width, *params.height).to(at::kInt);
  // Rec. 601 luma in Pillow's fixed point.
  const at::Tensor luma =
      (rgb.select(2, 0) * 19595 + rgb.select(2, 1) * 38470 + rgb.select(2, 2) * 7471 + 0x8000)
          .bitwise_right_shift(16);
  at::Tensor mask = luma.to(at::kFloat).div_(255).unsqueeze(0).unsqueeze(0);
  return binary ? mask.ge(0.5).to(at::kFloat) : mask;
}

at::Tensor LatentMask(const at::Tensor& pixel_mask, int64_t scale) {
  return pixel_mask.slice(2, 0, std::nullopt, scale).slice(3, 0, std::nullopt, scale).contiguous();
}

bool StartsFromNoise(const GenerateParams& params) {
  if (params.denoising_start) return false;
  if (params.has(MediaRole::kMask)) return *params.strength == 1;
  return !params.has(MediaRole::kInit) && !params.init_latents.defined();
}

SdDraws DrawsOf(const GenerateParams& params, bool concat) {
  SdDraws draws;
  draws.masked = params.has(MediaRole::kMask);
  draws.image = params.has(MediaRole::kInit) && !(draws.masked && concat && StartsFromNoise(params));
  // Inpainting draws it for the unpainted part, too.
  draws.noise = !params.denoising_start || draws.masked;
  return draws;
}

}  // namespace latentd
