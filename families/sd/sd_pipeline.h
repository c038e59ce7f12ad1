// Stable Diffusion, from a prompt to a picture: what SD 1.5 and SDXL have in common. Numerics are those of
// diffusers' text-to-image, image-to-image and inpainting pipelines.
//
// Whatever type a file stores, everything is computed in fp32; so the VAE of SDXL, which overflows in fp16,
// gives finite pictures from a file in fp16.
//
// Immutable; any thread. Denoisers share the network with the pipeline that made them and may outlive it.
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
#include "families/image_pipeline.h"
#include "families/prompt/prompt_schedule.h"
#include "families/sampling/sampler.h"
#include "families/sampling/scheduler_config.h"
#include "families/sd/distilled.h"
#include "families/sd/sd_predictor.h"
#include "families/sd/sd_text.h"
#include "families/sd/sd_tiles.h"
#include "families/sd/unet.h"
#include "families/vae/autoencoder_kl.h"
#include "families/vae/picture_codec.h"

namespace latentd {

struct SdRun;

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

class SdPipeline : public ImagePipeline {
 public:
  explicit SdPipeline(SdParts parts) : parts_(std::move(parts)) {}

  absl::string_view variant() const override { return parts_.variant; }
  const std::vector<Component>& components() const override { return parts_.components; }
  const ModelDefaults& defaults() const override { return parts_.defaults; }

  absl::Status Validate(GenerateParams& params) const override;

  std::vector<PromptField> EmbeddingPrompts(const GenerateParams& params) const override;
  absl::Status CheckEmbedding(const std::string& name, const TextEmbeddingShape& shape) const override;

  std::vector<std::string> EncoderComponents(const GenerateParams& params) const override;
  absl::Status Encode(const std::string& component, const WeightView& weights, const GenerateParams& params,
                      const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings,
                      Conditioning& conditioning) const override;
  std::string EncodeKey(const std::string& component, const GenerateParams& params) const override;
  int64_t ConditioningBytes(const std::string& component, const GenerateParams& params) const override;

  // [N, C, h, w] samples of the init image, one per seed; with a mask and a network that takes it [N, 2·C, h,
  // w], followed by those of what the mask leaves.
  absl::StatusOr<at::Tensor> EncodeImage(const WeightView& weights, const GenerateParams& params,
                                         const PhaseOptions& options) const override;

  std::string denoiser_component() const override { return "unet"; }
  absl::StatusOr<std::unique_ptr<Denoiser>> Begin(const GenerateParams& params, Conditioning conditioning,
                                                  at::Tensor init_latents) const override;

  absl::StatusOr<at::Tensor> Decode(const WeightView& weights, const at::Tensor& latents,
                                    const PhaseOptions& options) const override;
  at::Tensor Finish(const at::Tensor& picture, const GenerateParams& params) const override;
  absl::StatusOr<std::vector<TokenCount>> CountTokens(const GenerateParams& params) const override;
  int64_t SmallerTile(const GenerateParams& params, int64_t tile) const override;
  at::Tensor Preview(const at::Tensor& latents) const override;
  int64_t WorkingBytes(const std::string& component, const GenerateParams& params,
                       const PhaseOptions& options, bool encodes_picture = false) const override;
  std::string ShapeKey(const std::string& component, const GenerateParams& params) const override;

  const SdParts& parts() const { return parts_; }

 protected:
  RequestUses MakeUses() const override;
  // Fields beside those that all models of SD know.
  virtual absl::Span<const absl::string_view> OwnFields() const { return {}; }
  virtual absl::Status ValidateOwn(GenerateParams& params) const = 0;
  // The hidden states that are read, `skip` layers before where they usually are.
  virtual ClipTap Tap(const SdEncoder& encoder, int64_t skip) const = 0;
  // Layers that the tap leaves out without a skip.
  virtual int64_t usual_skip() const = 0;
  virtual AysTable ays_table() const = 0;
  // Numbers about the picture, for models that take them; `row` has its pooled text.
  virtual absl::Status AddToRow(const GenerateParams& params, bool negative, SdPromptRow& row) const = 0;

  // One prompt, or an unwanted one beside it.
  bool Guided(const GenerateParams& params) const;

  SdParts parts_;

 private:
  bool takes_mask() const { return parts_.unet->config().in_channels > parts_.unet->config().out_channels; }
  std::vector<int64_t> LatentShape(const GenerateParams& params) const;  // of one picture, [1, C, h, w]
  bool EncodesNegative(const GenerateParams& params) const;
  // What an encoder is given as the wanted or the unwanted prompt, with marks in place of embeddings' names.
  SdText TextOf(const SdEncoder& encoder, const GenerateParams& params, bool negative) const;
  // Vectors of all embeddings for an encoder, one after the other as the marks have them; undefined for none.
  absl::StatusOr<at::Tensor> EmbeddingRowsOf(
      const SdEncoder& encoder, const GenerateParams& params,
      const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings) const;
  // All that TextOf comes to over the steps of a run. Errors: those of ScheduleA1111Prompt.
  absl::StatusOr<PromptSchedule> ScheduleOf(const SdText& text, const GenerateParams& params,
                                            bool negative) const;
  // The schedule's texts. REQUIRES: params passed Validate.
  std::vector<SdText> TextsOf(const SdEncoder& encoder, const GenerateParams& params, bool negative) const;
  // Tokens of the longest of all prompts, to which the others are brought. REQUIRES: params passed Validate.
  int64_t Tokens(const GenerateParams& params) const;
  absl::Status ValidatePrompts(GenerateParams& params) const;
  absl::Status ValidatePictures(GenerateParams& params) const;
  SamplerOptions OptionsOf(const GenerateParams& params) const;
  absl::StatusOr<std::unique_ptr<Sampler>> NewSampler(const GenerateParams& params,
                                                      std::shared_ptr<NoiseSource> noise) const;
  // What the picture is denoised in: one tile, unless the request has others.
  std::vector<SdTile> TilesOf(const GenerateParams& params) const;
  absl::StatusOr<SdPromptRow> RowOf(const GenerateParams& params, const std::vector<size_t>& texts,
                                    bool negative, Conditioning& conditioning) const;
  absl::Status AddPrompts(const GenerateParams& params, Conditioning& conditioning, SdRun& run) const;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_PIPELINE_H_
