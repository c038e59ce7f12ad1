#include "families/sd/sd_run.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/encoders/text_embedding.h"
#include "families/image_run.h"
#include "families/sd/sd_denoiser.h"
#include "families/sd/sd_masks.h"
#include "families/sd/sd_paste.h"
#include "families/sd/sd_prompt_set.h"
#include "families/sd/sd_tiles.h"
#include "families/working_memory.h"

namespace latentd {
namespace {

// All texts of one encoder, window by window.
class SdEncoding : public TextEncoding {
 public:
  // `rows` [n, dim]: what the texts' marks stand for; undefined for none.
  SdEncoding(const SdEncoder& encoder, const std::vector<const SdEncoderPrompt*>& prompts, at::Tensor rows)
      : encoder_(encoder), rows_(std::move(rows)) {
    for (const SdEncoderPrompt* prompt : prompts) {
      for (size_t i = 0; i < prompt->texts.size(); ++i) texts_.push_back({prompt, i});
    }
  }

  absl::StatusOr<bool> Slice(const WeightView& weights) override {
    const EncodableText& text = texts_[text_].text();
    if (encoded_.size() < text.windows().size()) {  // else putting them together failed, and is tried again
      const EncodableText::Window& window = text.windows()[encoded_.size()];
      ClipTap tap = texts_[text_].prompt->tap;
      tap.pooled = window.pooled;
      ClipTextModel::Output output = (*encoder_.model)(weights, window.ids, tap, window.mask, rows_);
      encoded_[window.key()] = std::move(output);
    }
    if (encoded_.size() < text.windows().size()) return false;
    RETURN_IF_ERROR(EndText(texts_[text_]));
    encoded_.clear();
    return ++text_ == texts_.size();
  }
  Conditioning Take() override { return std::move(made_); }

 private:
  struct Text {
    const SdEncoderPrompt* prompt;
    size_t index;  // in it
    const EncodableText& text() const { return prompt->texts[index]; }
  };

  absl::Status EndText(const Text& text) {
    ASSIGN_OR_RETURN(const ClipTextModel::Output output, text.text().Assemble(encoded_));
    const bool negative = text.prompt->negative;
    made_[SdOutputName(negative, text.index, encoder_.component)] = ToHost(output.hidden);
    if (output.pooled.defined()) made_[SdOutputName(negative, text.index, kSdPooled)] = ToHost(output.pooled);
    return absl::OkStatus();
  }

  const SdEncoder& encoder_;
  const at::Tensor rows_;
  std::vector<Text> texts_;
  size_t text_ = 0;                 // the one that is under way
  EncodableText::Encoded encoded_;  // its windows that are done
  Conditioning made_;
};

std::vector<std::string> EncodersOf(const SdPipeline& pipeline) {
  std::vector<std::string> names;
  for (const SdEncoder& encoder : pipeline.parts().encoders) names.push_back(encoder.component);
  return names;
}

class SdRun : public ImageRun {
 public:
  SdRun(const SdPipeline& pipeline, GenerateParams params, SdPromptSet prompts)
      : ImageRun(std::move(params),
                 {.encoders = EncodersOf(pipeline), .denoiser = pipeline.denoiser_component()},
                 *pipeline.parts().vae),
        pipeline_(pipeline),
        parts_(pipeline.parts()),
        prompts_(std::move(prompts)),
        latent_shape_(pipeline.LatentShape(params_)) {
    tokens_ = prompts_.Counts();
  }

  std::string OutputKey(size_t phase) const override;
  int64_t OutputBytes(size_t phase) const override;
  int64_t WorkingBytes(size_t phase, const std::string& component,
                       const PhaseOptions& options) const override;
  std::string ShapeKey(size_t phase, const std::string& component) const override;

  absl::StatusOr<std::unique_ptr<TextEncoding>> BeginText(
      const std::string& encoder,
      const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings) const override;
  // The init image; with a mask and a network that takes it, what the mask leaves of it.
  std::vector<VaePicture> MediaPictures() const override;
  // [N, C, h, w], one sample of the init image per seed; with a mask and a network that takes it
  // [N, 2·C, h, w], followed by those of what the mask leaves.
  absl::StatusOr<at::Tensor> MediaLatents(
      const std::vector<AutoencoderKl::Posterior>& posteriors) const override;
  absl::StatusOr<std::unique_ptr<Denoiser>> BeginDenoising(Conditioning conditioning,
                                                           at::Tensor media_latents) const override;
  at::Tensor Finish(const at::Tensor& picture) const override;
  at::Tensor Preview(const at::Tensor& latents) const override { return parts_.preview.Render(latents); }

 private:
  SdDraws draws() const { return DrawsOf(params_, pipeline_.takes_mask()); }
  // Vectors of all embeddings for an encoder, one after the other as the marks have them; undefined for none.
  absl::StatusOr<at::Tensor> RowsOf(
      const SdEncoder& encoder, const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings) const;
  SdMask Mask() const;
  absl::StatusOr<SdPicture> PictureOf(size_t index, const at::Tensor& init_latents, const SdMask& mask) const;
  absl::StatusOr<SdPromptRow> RowOf(const std::vector<size_t>& texts, bool negative,
                                    Conditioning& conditioning) const;
  absl::Status AddPrompts(Conditioning& conditioning, SdDenoising& run) const;
  // What the picture is denoised in: one tile, unless the request has others.
  std::vector<SdTile> Tiles() const;

  const SdPipeline& pipeline_;
  const SdParts& parts_;
  const SdPromptSet prompts_;
  const std::vector<int64_t> latent_shape_;  // of one picture
};

// --------------------------------------------------------------------------------------------------- text

absl::StatusOr<at::Tensor> SdRun::RowsOf(
    const SdEncoder& encoder, const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings) const {
  if (embeddings.size() != params_.embeddings.size())
    return absl::InternalError("an embedding was not loaded");
  std::vector<at::Tensor> rows;
  for (const auto& embedding : embeddings) rows.push_back(embedding->vectors(VectorsFor(encoder)));
  return rows.empty() ? at::Tensor() : at::cat(rows);
}

absl::StatusOr<std::unique_ptr<TextEncoding>> SdRun::BeginText(
    const std::string& component, const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings) const {
  const std::vector<const SdEncoderPrompt*> prompts = prompts_.PromptsOf(component);
  const SdEncoder& encoder = *prompts.front()->encoder;
  ASSIGN_OR_RETURN(at::Tensor rows, RowsOf(encoder, embeddings));
  return std::make_unique<SdEncoding>(encoder, prompts, std::move(rows));
}

std::string SdRun::OutputKey(size_t phase) const {
  std::string key = absl::StrCat(params_.clip_skip.value_or(0), "|", params_.prompt_syntax.value_or("plain"),
                                 "|", prompts_.tokens());
  for (const SdEncoderPrompt* prompt : prompts_.PromptsOf(phases_[phase].components[0])) {
    absl::StrAppend(&key, prompt->negative ? "|-" : "|+");
    // Texts may hold anything: their lengths keep them apart.
    for (const EncodableText& text : prompt->texts)
      absl::StrAppend(&key, "|", text.text().size(), ":", text.text());
  }
  // Marks say where rows are, not whose.
  for (const PromptEmbedding& embedding : params_.embeddings) absl::StrAppend(&key, "|", embedding.id);
  return key;
}

int64_t SdRun::OutputBytes(size_t phase) const {
  int64_t floats = 0;
  for (const SdEncoderPrompt* prompt : prompts_.PromptsOf(phases_[phase].components[0])) {
    const ClipTextConfig& c = prompt->encoder->model->config();
    floats += static_cast<int64_t>(prompt->texts.size()) *
              (prompts_.tokens() * c.dim + std::max(c.dim, c.projection));
  }
  return floats * int64_t{sizeof(float)};
}

absl::StatusOr<SdPromptRow> SdRun::RowOf(const std::vector<size_t>& texts, bool negative,
                                         Conditioning& conditioning) const {
  const bool zeros = negative && !prompts_.encodes_negative();
  auto value = [&](size_t text, absl::string_view what) {
    const at::Tensor encoded = conditioning[SdOutputName(negative && !zeros, text, what)];
    return zeros && encoded.defined() ? at::zeros_like(encoded) : encoded;
  };
  SdPromptRow row;
  for (size_t i = 0; i < parts_.encoders.size(); ++i) {
    row.hidden.push_back(value(texts[i], parts_.encoders[i].component));
    if (!row.hidden.back().defined()) return absl::InternalError("a prompt was not encoded");
  }
  row.pooled = value(texts.back(), kSdPooled);  // of the last encoder, where there is any
  RETURN_IF_ERROR(pipeline_.AddToRow(params_, negative, row));
  return row;
}

absl::Status SdRun::AddPrompts(Conditioning& conditioning, SdDenoising& run) const {
  std::vector<PromptSchedule> wanted, unwanted;
  size_t steps = 1;
  for (const SdEncoderPrompt& prompt : prompts_.prompts()) {
    steps = std::max(steps, prompt.schedule.steps.size());
    (prompt.negative ? unwanted : wanted).push_back(prompt.schedule);
  }
  if (!prompts_.encodes_negative()) unwanted.assign(wanted.size(), UnchangingPrompt(""));
  // Rows as the texts of all encoders; equal ones are one.
  std::map<std::vector<std::vector<size_t>>, size_t> known;
  for (size_t step = 0; step < steps; ++step) {
    const auto texts = [&](const std::vector<PromptSchedule>& schedules, size_t part) {
      std::vector<size_t> of_row;
      for (const PromptSchedule& schedule : schedules) of_row.push_back(schedule.at(step)[part].text);
      return of_row;
    };
    std::vector<std::vector<size_t>> rows;
    if (prompts_.guided()) rows.push_back(texts(unwanted, 0));
    for (size_t part = 0; part < wanted.front().at(step).size(); ++part) rows.push_back(texts(wanted, part));
    const auto [it, added] = known.try_emplace(rows, run.prompts.size());
    run.prompts_of_step.push_back(it->second);
    if (!added) continue;
    SdPrompts prompts;
    for (const PromptSchedule::Part& part : wanted.front().at(step)) prompts.weights.push_back(part.weight);
    for (size_t i = 0; i < rows.size(); ++i) {
      const bool negative = prompts_.guided() && i == 0;
      ASSIGN_OR_RETURN(SdPromptRow row, RowOf(rows[i], negative, conditioning));
      prompts.rows.push_back(std::move(row));
    }
    run.prompts.push_back(std::move(prompts));
  }
  return absl::OkStatus();
}

// ----------------------------------------------------------------------------------------------- pictures

std::vector<VaePicture> SdRun::MediaPictures() const {
  const at::Tensor pixels = ResizePicture(params_.picture(MediaRole::kInit), *params_.width, *params_.height);
  std::vector<VaePicture> pictures;
  if (draws().image) pictures.push_back({pixels});
  if (draws().masked && pipeline_.takes_mask())
    pictures.push_back({pixels, PixelMask(params_, /*binary=*/true).lt(0.5)});
  return pictures;
}

absl::StatusOr<at::Tensor> SdRun::MediaLatents(
    const std::vector<AutoencoderKl::Posterior>& posteriors) const {
  const SdDraws draws = this->draws();
  std::vector<at::Tensor> samples;
  for (uint64_t seed : params_.seeds) {
    NoiseSource source(seed);
    at::Tensor sample = draws.image ? vae().ToModel(posteriors.front().Sample(source.Draw(latent_shape_)))
                                    : at::zeros(latent_shape_);
    if (draws.masked && pipeline_.takes_mask()) {
      if (draws.noise) source.Draw(latent_shape_);
      sample = at::cat({sample, vae().ToModel(posteriors.back().Sample(source.Draw(latent_shape_)))}, 1);
    }
    samples.push_back(sample);
  }
  return at::cat(samples);
}

SdMask SdRun::Mask() const {
  SdMask mask;
  if (!params_.has(MediaRole::kMask)) return mask;
  mask.gradient = params_.gradient_mask.value_or(false);
  mask.train_steps = parts_.scheduler->own().schedule->config().train_steps;
  mask.mask = LatentMask(PixelMask(params_, /*binary=*/!mask.gradient), vae().config().scale());
  return mask;
}

// Where a seed's picture starts: draws in the order of diffusers, then its sampler's.
absl::StatusOr<SdPicture> SdRun::PictureOf(size_t index, const at::Tensor& init_latents,
                                           const SdMask& mask) const {
  const auto n = static_cast<int64_t>(index);
  const SdDraws draws = this->draws();
  const std::vector<int64_t>& shape = latent_shape_;
  const int64_t channels = shape[1];
  auto source = std::make_shared<NoiseSource>(params_.seeds[index]);
  at::Tensor noise = params_.noise.defined() ? params_.noise.narrow(0, n, 1) : at::Tensor();
  if (draws.image) source->Draw(shape);
  if (draws.noise && !noise.defined()) noise = source->Draw(shape);
  if (draws.masked) source->Draw(shape);
  at::Tensor init;
  if (init_latents.defined()) {
    init = init_latents.size(0) == 1 ? init_latents : init_latents.narrow(0, n, 1);
    if (init.size(2) != shape[2] || init.size(3) != shape[3] || init.size(1) < channels) {
      return absl::InternalError("init latents have another shape");
    }
  }
  SdPicture picture;
  picture.source = source;
  ASSIGN_OR_RETURN(picture.sampler, pipeline_.NewSampler(params_, std::move(source)));
  const at::Tensor original = init.defined() ? init.narrow(1, 0, channels) : at::Tensor();
  if (StartsFromNoise(params_)) {
    picture.x = noise * picture.sampler->initial_noise_scale();
  } else {
    picture.x = params_.denoising_start ? original.clone() : picture.sampler->AddNoise(original, noise);
  }
  if (!mask.mask.defined()) return picture;
  if (pipeline_.takes_mask()) {
    picture.more = at::cat({mask.mask, init.narrow(1, channels, channels)}, 1);
  } else {
    picture.original = original;
    picture.noise = noise;
  }
  return picture;
}

absl::StatusOr<std::unique_ptr<Denoiser>> SdRun::BeginDenoising(Conditioning conditioning,
                                                                at::Tensor media_latents) const {
  c10::InferenceMode inference;
  if (params_.init_latents.defined()) media_latents = params_.init_latents;
  SdMask mask = Mask();
  std::vector<SdPicture> pictures;
  for (size_t i = 0; i < params_.seeds.size(); ++i) {
    ASSIGN_OR_RETURN(pictures.emplace_back(), PictureOf(i, media_latents, mask));
  }
  SdDenoising run{.predictor = SdPredictor(parts_.unet, params_.guidance_rescale.value_or(0)),
                  .prompts = {},
                  .prompts_of_step = {},
                  .pictures = std::move(pictures),
                  .mask = std::move(mask),
                  .tiles = Tiles(),
                  .guidance = params_.guidance_list};
  if (run.guidance.empty()) run.guidance = {*params_.guidance};
  RETURN_IF_ERROR(AddPrompts(conditioning, run));
  return MakeSdDenoiser(std::move(run));
}

std::vector<SdTile> SdRun::Tiles() const {
  const std::vector<int64_t>& shape = latent_shape_;
  if (!params_.tiles) return LayTiles(shape[2], shape[3], shape[2], shape[3], 0);
  const int64_t scale = vae().config().scale();
  return LayTiles(shape[2], shape[3], params_.tiles->height / scale, params_.tiles->width / scale,
                  params_.tiles->overlap / scale);
}

at::Tensor SdRun::Finish(const at::Tensor& picture) const {
  return params_.paste_back.value_or(false) ? PasteBack(picture, params_) : picture;
}

// ------------------------------------------------------------------------------------------------- memory

int64_t SdRun::WorkingBytes(size_t phase, const std::string& component, const PhaseOptions& options) const {
  const std::vector<int64_t>& shape = latent_shape_;
  const auto pictures = static_cast<int64_t>(params_.seeds.size());
  const int64_t latent_bytes = shape[1] * shape[2] * shape[3] * pictures * int64_t{sizeof(float)};
  const WeightUse use = UseOf(pipeline_, component, options);
  switch (phases_[phase].kind) {
    case PhaseKind::kEncodeText: {
      // Windows are encoded one by one, and kept until they are mixed: each is moved by its weights, and
      // versions of the whole prompt are put together and summed.
      const ClipTextConfig& config = prompts_.PromptsOf(component).front()->encoder->model->config();
      const auto windows = static_cast<int64_t>(prompts_.WindowsOf(component));
      constexpr int64_t kOfWindows = 3, kOfTheWhole = 4;
      const int64_t rows = kOfWindows * windows * config.positions + kOfTheWhole * prompts_.tokens();
      return prompts_.PromptsOf(component).front()->encoder->model->WorkingBytes(use) + OutputBytes(phase) +
             rows * config.dim * int64_t{sizeof(float)};
    }
    case PhaseKind::kEncodeMedia: {
      // With a mask, what it leaves of the picture is a second one beside it.
      const int64_t masked = pipeline_.takes_mask() && params_.has(MediaRole::kMask)
                                 ? 4 * *params_.width * *params_.height * int64_t{sizeof(float)}
                                 : 0;
      return 6 * latent_bytes + masked +
             vae().EncodeBytes(*params_.width, *params_.height, options.tile, use);
    }
    case PhaseKind::kDenoise: {
      // Latents before and after a step, what a mask adds to them, and what samplers remember.
      constexpr int64_t kTensorsOfLatents = 12;
      const std::vector<SdTile> tiles = Tiles();
      // Neighbours overlap by half at most: four times the latents once more.
      return (tiles.size() > 1 ? 5 : 1) * kTensorsOfLatents * latent_bytes +
             parts_.unet->WorkingBytes(prompts_.guided() ? 2 : 1, prompts_.tokens(), tiles.front().height,
                                       tiles.front().width, use);
    }
    case PhaseKind::kDecode:
      return vae().DecodeBytes(*params_.width, *params_.height, options.tile, use);
  }
  return 0;
}

std::string SdRun::ShapeKey(size_t phase, const std::string& component) const {
  const PhaseKind kind = phases_[phase].kind;
  if (kind == PhaseKind::kEncodeText) {
    return absl::StrCat("t", prompts_.tokens(), "w", prompts_.WindowsOf(component),
                        params_.prompt_syntax.value_or(""), prompts_.encodes_negative() ? "g" : "");
  }
  std::string key = absl::StrCat(*params_.width, "x", *params_.height, "n", params_.seeds.size());
  if (params_.has_pictures()) key += "i";
  if (params_.has(MediaRole::kMask)) key += "m";
  if (kind == PhaseKind::kEncodeMedia) return key + "/encode";
  if (kind == PhaseKind::kDecode) return key;
  absl::StrAppend(&key, "t", prompts_.tokens(), prompts_.guided() ? "g" : "", *params_.sampler);
  if (params_.tiles) {
    absl::StrAppend(&key, "/", params_.tiles->width, "x", params_.tiles->height, "-", params_.tiles->overlap);
  }
  return key;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Run>> MakeSdRun(const SdPipeline& pipeline, GenerateParams params) {
  ASSIGN_OR_RETURN(SdPromptSet prompts, SdPromptSet::Make(pipeline, params));
  return std::make_shared<const SdRun>(pipeline, std::move(params), std::move(prompts));
}

}  // namespace latentd
