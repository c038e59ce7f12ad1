// A pipeline of the usual kind: text encoders that read prompts one after the other, one VAE, one denoiser.
// It says how its parts work on weights and parameters; ImageRun makes the phases of them. A family that is
// not of this kind derives from Pipeline and has a run of its own.
#ifndef LATENTD_FAMILIES_IMAGE_PIPELINE_H_
#define LATENTD_FAMILIES_IMAGE_PIPELINE_H_

#include <memory>
#include <string>
#include <vector>

#include "families/family.h"

namespace latentd {

class ImagePipeline : public Pipeline {
 public:
  absl::StatusOr<std::shared_ptr<const Run>> Prepare(GenerateParams params) const override;

  // Checks every field and fills in defaults. Errors: INVALID_ARGUMENT INVALID_FIELD naming the field.
  virtual absl::Status Validate(GenerateParams& params) const = 0;

  // All that follows REQUIRES: params passed Validate.

  // The text encoders this generation needs, in order; Encode is called once for each. `embeddings` are those
  // of params.embeddings.
  virtual std::vector<std::string> EncoderComponents(const GenerateParams& params) const = 0;
  virtual absl::Status Encode(const std::string& component, const WeightView& weights,
                              const GenerateParams& params,
                              const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings,
                              Conditioning& conditioning) const = 0;
  virtual std::string EncodeKey(const std::string& component, const GenerateParams& params) const = 0;
  virtual absl::StatusOr<std::vector<TokenCount>> CountTokens(const GenerateParams& params) const = 0;
  virtual int64_t ConditioningBytes(const std::string& component, const GenerateParams& params) const = 0;

  // The request's pictures as latents [1, C, h, w] (or [N, …] where the posterior is sampled per seed), those
  // of several pictures one after the other in C, as Begin takes them. REQUIRES: params.has_pictures().
  virtual absl::StatusOr<at::Tensor> EncodeImage(const WeightView& weights, const GenerateParams& params,
                                                 const PhaseOptions& options) const = 0;

  // `image_latents` are EncodeImage's; undefined without pictures.
  virtual absl::StatusOr<std::unique_ptr<Denoiser>> Begin(const GenerateParams& params,
                                                          Conditioning conditioning,
                                                          at::Tensor image_latents) const = 0;

  // One picture: latents [1, C, h, w] → uint8 [H, W, 3]. Errors: FAILED_PRECONDITION NON_FINITE.
  virtual absl::StatusOr<at::Tensor> Decode(const WeightView& weights, const at::Tensor& latents,
                                            const PhaseOptions& options) const = 0;
  // What becomes of a decoded picture, uint8 [H, W, 3] in host memory, before it is a file.
  virtual at::Tensor Finish(const at::Tensor& picture, const GenerateParams& params) const { return picture; }

  virtual int64_t SmallerTile(const GenerateParams& params, int64_t tile) const = 0;
  // Of the VAE, `encodes_picture` says what it does.
  virtual int64_t WorkingBytes(const std::string& component, const GenerateParams& params,
                               const PhaseOptions& options, bool encodes_picture = false) const = 0;
  virtual std::string ShapeKey(const std::string& component, const GenerateParams& params) const = 0;

  // A small picture of unfinished latents [1, C, h, w] → uint8 [h, w, 3], by a linear map; undefined when the
  // model has none.
  virtual at::Tensor Preview(const at::Tensor& latents) const = 0;

  virtual std::string vae_component() const { return "vae"; }
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_IMAGE_PIPELINE_H_
