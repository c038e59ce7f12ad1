// FLUX.1 text-to-image, image-to-image, and drawing after a control image: what a model is made of, and what
// it takes of a request. What happens then is a FluxRun's.
//
// Immutable; any thread.
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
#include "families/family.h"
#include "families/flux/flux_transformer.h"
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

class FluxPipeline : public Pipeline {
 public:
  explicit FluxPipeline(FluxParts parts) : parts_(std::move(parts)) {}

  absl::string_view family() const override { return "flux"; }
  absl::string_view variant() const override { return parts_.variant; }
  const std::vector<Component>& components() const override { return parts_.components; }
  const ModelDefaults& defaults() const override { return parts_.defaults; }

  absl::StatusOr<std::shared_ptr<const Run>> Prepare(GenerateParams params) const override;

  // Checks every field and fills in defaults. Errors: INVALID_ARGUMENT INVALID_FIELD naming the field.
  absl::Status Validate(GenerateParams& params) const;

  std::string denoiser_component() const override { return "transformer"; }
  // Of one picture, [1, C, h, w].
  std::vector<int64_t> LatentShape(const GenerateParams& params) const;

  const FluxParts& parts() const { return parts_; }

 protected:
  RequestUses MakeUses() const override;

 private:
  // Pixels per token and direction: the VAE's factor and packing by 2×2.
  int64_t PixelsPerToken() const { return 2 * parts_.vae->config().scale(); }
  // A control image where one is needed, and only there.
  absl::Status CheckControl(const GenerateParams& params) const;

  FluxParts parts_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_FLUX_FLUX_PIPELINE_H_
