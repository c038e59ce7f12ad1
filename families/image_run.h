// A run of the usual kind: text encoders that read prompts one after the other, one denoiser, one
// AutoencoderKl. The family says how its parts work; the phases and their slices are made of that here. A
// family that is not of this kind derives from Run.
#ifndef LATENTD_FAMILIES_IMAGE_RUN_H_
#define LATENTD_FAMILIES_IMAGE_RUN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "families/run.h"
#include "families/vae/autoencoder_kl.h"
#include "families/vae/picture_codec.h"

namespace latentd {

// What one encoder makes of a run's prompts, a slice at a time. One thread at a time.
class TextEncoding {
 public:
  virtual ~TextEncoding() = default;

  // Does the next slice; true: it was the last one. A slice that failed can be done again.
  virtual absl::StatusOr<bool> Slice(const WeightView& weights) = 0;
  // In host memory. REQUIRES: Slice returned true. Once.
  virtual Conditioning Take() = 0;
};

class ImageRun : public Run {
 public:
  int64_t SmallerTile(int64_t tile) const override {
    return SmallerVaeTile(vae_, *params_.width, *params_.height, tile);
  }
  absl::StatusOr<std::unique_ptr<PhaseWork>> Begin(size_t phase, RunState& state) const override;

  // What phases are made of. Lives no longer than the run.

  // By the encoder of that name. `embeddings` are those of params().embeddings.
  virtual absl::StatusOr<std::unique_ptr<TextEncoding>> BeginText(
      const std::string& encoder,
      const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings) const = 0;

  // The pictures that the request brings, as the VAE is given them, and their latents [1, C, h, w] (or [N, …]
  // where posteriors are sampled by seed), as BeginDenoising takes them: those of several pictures one after
  // the other in C. REQUIRES: params().has_pictures().
  virtual std::vector<VaePicture> MediaPictures() const = 0;
  virtual absl::StatusOr<at::Tensor> MediaLatents(
      const std::vector<AutoencoderKl::Posterior>& posteriors) const = 0;

  // `media_latents` is undefined without pictures.
  virtual absl::StatusOr<std::unique_ptr<Denoiser>> BeginDenoising(Conditioning conditioning,
                                                                   at::Tensor media_latents) const = 0;

  // What becomes of a decoded picture, uint8 [H, W, 3] in host memory, before it is a file.
  virtual at::Tensor Finish(const at::Tensor& picture) const { return picture; }

  // A small picture of unfinished latents [1, C, h, w] → uint8 [h, w, 3]; undefined where the model has none.
  virtual at::Tensor Preview(const at::Tensor& latents) const = 0;

  const AutoencoderKl& vae() const { return vae_; }

 protected:
  struct Components {
    std::vector<std::string> encoders;  // that the request needs, in order
    std::string denoiser;
    std::string vae = "vae";
  };
  // REQUIRES: the pipeline has checked `params` and filled in its defaults. `vae` outlives the run.
  ImageRun(GenerateParams params, const Components& components, const AutoencoderKl& vae);

 private:
  const AutoencoderKl& vae_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_IMAGE_RUN_H_
