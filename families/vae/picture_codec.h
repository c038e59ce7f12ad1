// Between 8-bit pictures in host memory and latents, by an AutoencoderKl: what every family with that VAE
// does. Any thread, each with a view of its own.
#ifndef LATENTD_FAMILIES_VAE_PICTURE_CODEC_H_
#define LATENTD_FAMILIES_VAE_PICTURE_CODEC_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "families/vae/autoencoder_kl.h"
#include "patcher/weight_view.h"

namespace latentd {

// What leaves a phase.
at::Tensor ToHost(const at::Tensor& tensor);

// uint8 [H, W, 3] of any size → uint8 [height, width, 3], as Pillow resizes it.
at::Tensor ResizePicture(const at::Tensor& picture, int64_t width, int64_t height);

// uint8 [H, W, 3] in host memory → [1, 3, H, W] in [-1, 1], where the view's weights are. Copied as bytes.
at::Tensor PictureToInput(const WeightView& w, const at::Tensor& picture);

// The posterior of such a picture, in host memory: it is sampled where noise is drawn and latents are kept.
AutoencoderKl::Posterior EncodePicture(const AutoencoderKl& vae, const WeightView& w, const at::Tensor& input,
                                       int64_t tile);

// Finished latents [1, C, h, w], as the denoiser has them → uint8 [H, W, 3] in host memory. Errors:
// FAILED_PRECONDITION NON_FINITE.
absl::StatusOr<at::Tensor> DecodePicture(const AutoencoderKl& vae, const WeightView& w,
                                         const at::Tensor& latents, int64_t tile);

// Pipeline::SmallerTile for a picture of that size.
int64_t SmallerVaeTile(const AutoencoderKl& vae, int64_t width, int64_t height, int64_t tile);

// rgb = latents·factors + bias, in [-1, 1]: a rough picture of unfinished latents.
struct LatentPreview {
  at::Tensor factors;  // [channels, 3] fp32; undefined where the model has none
  at::Tensor bias;     // [3]

  // [1, C, h, w] → uint8 [h, w, 3]; undefined without factors.
  at::Tensor Render(const at::Tensor& latents) const;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_VAE_PICTURE_CODEC_H_
