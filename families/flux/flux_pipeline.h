// FLUX.1 text-to-image, image-to-image, and drawing after a control image: what happens between a prompt and
// a picture.
//
// Immutable; any thread. Denoisers share the network with the pipeline that made them and may outlive it.
#ifndef LATENTD_FAMILIES_FLUX_FLUX_PIPELINE_H_
#define LATENTD_FAMILIES_FLUX_FLUX_PIPELINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "families/encoders/clip_text_model.h"
#include "families/encoders/t5_encoder.h"
#include "families/flux/flux_transformer.h"
#include "families/image_pipeline.h"
#include "families/sampling/flow_match.h"
#include "families/tokenizers/clip_tokenizer.h"
#include "families/tokenizers/t5_tokenizer.h"
#include "families/vae/autoencoder_kl.h"
#include "families/vae/picture_codec.h"

namespace latentd {

// Everything that a FLUX.1 model is made of, described; filled in by FluxFamily::Open.
struct FluxParts {
  std::string variant;  // "dev", "schnell"
  ModelDefaults defaults;
  std::vector<Component> components;
  std::shared_ptr<const FluxTransformer> transformer;
  std::shared_ptr<const ClipTextModel> clip;
  std::shared_ptr<const T5Encoder> t5;
  std::shared_ptr<const AutoencoderKl> vae;
  std::shared_ptr<const ClipTokenizer> clip_tokenizer;
  std::shared_ptr<const T5Tokenizer> t5_tokenizer;
  FlowMatchConfig schedule;
  LatentPreview preview;
};

class FluxPipeline : public ImagePipeline {
 public:
  explicit FluxPipeline(FluxParts parts) : parts_(std::move(parts)) {}

  absl::string_view family() const override { return "flux"; }
  absl::string_view variant() const override { return parts_.variant; }
  const std::vector<Component>& components() const override { return parts_.components; }
  const ModelDefaults& defaults() const override { return parts_.defaults; }

  absl::Status Validate(GenerateParams& params) const override;

  std::vector<std::string> EncoderComponents(const GenerateParams& params) const override;
  absl::Status Encode(const std::string& component, const WeightView& weights, const GenerateParams& params,
                      const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings,
                      Conditioning& conditioning) const override;
  std::string EncodeKey(const std::string& component, const GenerateParams& params) const override;
  int64_t ConditioningBytes(const std::string& component, const GenerateParams& params) const override;

  absl::StatusOr<at::Tensor> EncodeImage(const WeightView& weights, const GenerateParams& params,
                                         const PhaseOptions& options) const override;

  std::string denoiser_component() const override { return "transformer"; }
  absl::StatusOr<std::unique_ptr<Denoiser>> Begin(const GenerateParams& params, Conditioning conditioning,
                                                  at::Tensor image_latents) const override;

  absl::StatusOr<at::Tensor> Decode(const WeightView& weights, const at::Tensor& latents,
                                    const PhaseOptions& options) const override;
  absl::StatusOr<std::vector<TokenCount>> CountTokens(const GenerateParams& params) const override;
  int64_t SmallerTile(const GenerateParams& params, int64_t tile) const override;
  at::Tensor Preview(const at::Tensor& latents) const override;
  int64_t WorkingBytes(const std::string& component, const GenerateParams& params,
                       const PhaseOptions& options, bool encodes_picture = false) const override;
  std::string ShapeKey(const std::string& component, const GenerateParams& params) const override;

  const FluxParts& parts() const { return parts_; }

 protected:
  RequestUses MakeUses() const override;

 private:
  // Pixels per token and direction: the VAE's factor and packing by 2×2.
  int64_t PixelsPerToken() const { return 2 * parts_.vae->config().scale(); }
  // A control image where one is needed, and only there.
  absl::Status CheckControl(const GenerateParams& params) const;
  std::vector<int64_t> LatentShape(const GenerateParams& params) const;  // of one picture, [1, C, h, w]

  FluxParts parts_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_FLUX_FLUX_PIPELINE_H_
