// Stable Diffusion: what models of SD 1.5 and SDXL are made of, and what they take of a request. What happens
// then is an SdRun's.
//
// Immutable; any thread.
#ifndef LATENTD_FAMILIES_SD_SD_PIPELINE_H_
#define LATENTD_FAMILIES_SD_SD_PIPELINE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "families/encoders/clip_text_model.h"
#include "families/encoders/text_embedding.h"
#include "families/family.h"
#include "families/sampling/sampler.h"
#include "families/sampling/scheduler_config.h"
#include "families/sd/distilled.h"
#include "families/sd/sd_predictor.h"
#include "families/sd/sd_text.h"
#include "families/sd/unet.h"
#include "families/vae/autoencoder_kl.h"
#include "families/vae/picture_codec.h"

namespace latentd {

// Everything that a model is made of, described; filled in by OpenSdModel.
struct SdParts {
  std::string variant;  // "base", "inpaint", "refiner", …
  ModelDefaults defaults;
  std::vector<Component> components;
  std::shared_ptr<const UNet2DCondition> unet;
  std::vector<SdEncoder> encoders;  // their hidden states stand side by side in this order
  std::shared_ptr<const AutoencoderKl> vae;
  std::shared_ptr<const SchedulerConfig> scheduler;
  LatentPreview preview;
  std::optional<Distilled> distilled;   // what a checkpoint's name says
  bool zeros_without_negative = false;  // no negative prompt is a conditioning of zeros, not an empty text
};

// Whose vectors an encoder takes.
EmbeddingEncoder VectorsFor(const SdEncoder& encoder);

class SdPipeline : public Pipeline {
 public:
  explicit SdPipeline(SdParts parts) : parts_(std::move(parts)) {}

  absl::string_view variant() const override { return parts_.variant; }
  const std::vector<Component>& components() const override { return parts_.components; }
  const ModelDefaults& defaults() const override { return parts_.defaults; }
  std::string denoiser_component() const override { return "unet"; }

  std::vector<PromptField> EmbeddingPrompts(const GenerateParams& params) const override;
  absl::Status CheckEmbedding(const std::string& name, const TextEmbeddingShape& shape) const override;

  absl::StatusOr<std::shared_ptr<const Run>> Prepare(GenerateParams params) const override;

  // Checks every field but what prompts say, and fills in defaults. Errors: INVALID_ARGUMENT INVALID_FIELD
  // naming the field.
  absl::Status Validate(GenerateParams& params) const;

  // For runs.

  const SdParts& parts() const { return parts_; }
  // The network reads the mask, and what it leaves of the picture.
  bool takes_mask() const { return parts_.unet->config().in_channels > parts_.unet->config().out_channels; }
  std::vector<int64_t> LatentShape(const GenerateParams& params) const;  // of one picture, [1, C, h, w]
  // `noise` is drawn from by samplers that add some. Errors: INVALID_ARGUMENT INVALID_FIELD.
  absl::StatusOr<std::unique_ptr<Sampler>> NewSampler(const GenerateParams& params,
                                                      std::shared_ptr<NoiseSource> noise) const;
  // The hidden states that are read, `skip` layers before where they usually are.
  virtual ClipTap Tap(const SdEncoder& encoder, int64_t skip) const = 0;
  // Layers that the tap leaves out without a skip.
  virtual int64_t usual_skip() const = 0;
  // Numbers about the picture, for models that take them; `row` has its pooled text.
  virtual absl::Status AddToRow(const GenerateParams& params, bool negative, SdPromptRow& row) const = 0;

 protected:
  RequestUses MakeUses() const override;
  // Fields beside those that all models of SD know.
  virtual absl::Span<const absl::string_view> OwnFields() const { return {}; }
  virtual absl::Status ValidateOwn(GenerateParams& params) const = 0;
  virtual AysTable ays_table() const = 0;

  SdParts parts_;

 private:
  absl::Status ValidatePictures(GenerateParams& params) const;
  SamplerOptions OptionsOf(const GenerateParams& params) const;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_PIPELINE_H_
