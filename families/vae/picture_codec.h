// Between 8-bit pictures in host memory and latents, by an AutoencoderKl: what every family with that VAE
// does, a slice at a time. One thread at a time, each with a view of its own.
#ifndef LATENTD_FAMILIES_VAE_PICTURE_CODEC_H_
#define LATENTD_FAMILIES_VAE_PICTURE_CODEC_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "families/vae/autoencoder_kl.h"
#include "patcher/weight_view.h"

namespace latentd {

// What leaves a phase.
at::Tensor ToHost(const at::Tensor& tensor);

// uint8 [H, W, 3] of any size → uint8 [height, width, 3], as Pillow resizes it.
at::Tensor ResizePicture(const at::Tensor& picture, int64_t width, int64_t height);

// A picture that is to be encoded, in host memory.
struct VaePicture {
  at::Tensor pixels;     // uint8 [H, W, 3]
  at::Tensor kept = {};  // bool [1, 1, H, W], where there is something; undefined: everywhere
};

// Pictures through the encoder, one after the other.
class PictureEncoder {
 public:
  PictureEncoder(const AutoencoderKl& vae, std::vector<VaePicture> pictures);

  // Does the next slice; true when all are done. A slice that threw, or that comes with another tile than the
  // one before it, begins its picture anew.
  bool Slice(const WeightView& w, int64_t tile);
  // By picture, in host memory: they are sampled where noise is drawn and latents are kept. REQUIRES: Slice
  // returned true.
  const std::vector<AutoencoderKl::Posterior>& posteriors() const { return posteriors_; }
  // Lets go of what is not finished.
  void LetGo() { pass_.reset(); }

 private:
  const AutoencoderKl& vae_;
  const std::vector<VaePicture> pictures_;
  std::vector<AutoencoderKl::Posterior> posteriors_;
  std::optional<AutoencoderKl::Pass> pass_;
  int64_t tile_ = 0;  // of the pass
};

// Latents through the decoder, for one picture after the other.
class PictureDecoder {
 public:
  // `latents` [N, C, h, w], as the denoiser has them.
  PictureDecoder(const AutoencoderKl& vae, at::Tensor latents);

  // Does the next slice; a picture, uint8 [H, W, 3] in host memory, when that was its last one, else an
  // undefined tensor. Slices that are done again: as PictureEncoder's. Errors: FAILED_PRECONDITION
  // NON_FINITE.
  absl::StatusOr<at::Tensor> Slice(const WeightView& w, int64_t tile);
  bool over() const { return next_ == latents_.size(0); }
  void LetGo() { pass_.reset(); }

 private:
  const AutoencoderKl& vae_;
  const at::Tensor latents_;
  int64_t next_ = 0;  // picture
  std::optional<AutoencoderKl::Pass> pass_;
  int64_t tile_ = 0;  // of the pass
};

// Run::SmallerTile for a picture of that size.
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
