#include "families/image_pipeline.h"

#include <utility>

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "families/finite_watch.h"

namespace latentd {
namespace {

class EncodeTextWork : public PhaseWork {
 public:
  EncodeTextWork(const ImagePipeline& pipeline, const GenerateParams& params, std::string component,
                 RunState& state)
      : pipeline_(pipeline), params_(params), component_(std::move(component)), state_(state) {}

  std::vector<std::string> reads() const override { return {component_}; }

  absl::StatusOr<SliceReport> Slice(const WeightViews& views, const PhaseOptions&) override {
    Conditioning part;
    RETURN_IF_ERROR(pipeline_.Encode(component_, views[component_], params_, state_.embeddings, part));
    for (const auto& [name, tensor] : part) {
      if (!IsFinite(tensor)) return NonFinite("encode");
    }
    for (auto& [name, tensor] : part) state_.conditioning[name] = std::move(tensor);
    return SliceReport{.phase_over = true};
  }

 private:
  const ImagePipeline& pipeline_;
  const GenerateParams& params_;
  const std::string component_;
  RunState& state_;
};

class EncodeImageWork : public PhaseWork {
 public:
  EncodeImageWork(const ImagePipeline& pipeline, const GenerateParams& params, RunState& state)
      : pipeline_(pipeline), params_(params), state_(state) {}

  std::vector<std::string> reads() const override { return {pipeline_.vae_component()}; }

  absl::StatusOr<SliceReport> Slice(const WeightViews& views, const PhaseOptions& options) override {
    ASSIGN_OR_RETURN(state_.media_latents,
                     pipeline_.EncodeImage(views[pipeline_.vae_component()], params_, options));
    if (!IsFinite(state_.media_latents)) return NonFinite("encode_image");
    return SliceReport{.phase_over = true};
  }

 private:
  const ImagePipeline& pipeline_;
  const GenerateParams& params_;
  RunState& state_;
};

// A slice is a turn of the denoiser: one picture's step.
class DenoiseWork : public PhaseWork {
 public:
  DenoiseWork(const ImagePipeline& pipeline, std::unique_ptr<Denoiser> denoiser, RunState& state)
      : pipeline_(pipeline), denoiser_(std::move(denoiser)), state_(state) {}

  std::vector<std::string> reads() const override { return {pipeline_.denoiser_component()}; }
  int64_t step_count() const override { return denoiser_->step_count(); }
  at::Tensor latents() const override { return denoiser_->latents(); }

  absl::StatusOr<SliceReport> Slice(const WeightViews& views, const PhaseOptions&) override {
    SliceReport report;
    if (!denoiser_->done()) {
      ASSIGN_OR_RETURN(report.step, denoiser_->Turn(views[pipeline_.denoiser_component()]));
    }
    if (!denoiser_->done()) return report;
    RETURN_IF_ERROR(denoiser_->CheckFinite());
    state_.latents = denoiser_->latents();
    report.phase_over = true;
    return report;
  }

  std::vector<at::Tensor> Previews() const override {
    const at::Tensor latents = denoiser_->prediction();
    std::vector<at::Tensor> pictures;
    for (int64_t i = 0; i < latents.size(0); ++i) {
      pictures.push_back(pipeline_.Preview(latents.narrow(0, i, 1)));
    }
    return pictures;
  }

 private:
  const ImagePipeline& pipeline_;
  const std::unique_ptr<Denoiser> denoiser_;
  RunState& state_;
};

// A slice is a picture.
class DecodeWork : public PhaseWork {
 public:
  DecodeWork(const ImagePipeline& pipeline, const GenerateParams& params, RunState& state)
      : pipeline_(pipeline), params_(params), state_(state) {}

  std::vector<std::string> reads() const override { return {pipeline_.vae_component()}; }

  absl::StatusOr<SliceReport> Slice(const WeightViews& views, const PhaseOptions& options) override {
    const auto index = static_cast<int64_t>(state_.pictures.size());
    ASSIGN_OR_RETURN(at::Tensor picture, pipeline_.Decode(views[pipeline_.vae_component()],
                                                          state_.latents.narrow(0, index, 1), options));
    state_.pictures.push_back(pipeline_.Finish(picture, params_));
    return SliceReport{.phase_over = index + 1 == state_.latents.size(0)};
  }

 private:
  const ImagePipeline& pipeline_;
  const GenerateParams& params_;
  RunState& state_;
};

class ImageRun : public Run {
 public:
  ImageRun(const ImagePipeline& pipeline, GenerateParams params, std::vector<TokenCount> tokens)
      : Run(std::move(params)), pipeline_(pipeline) {
    tokens_ = std::move(tokens);
    for (std::string& component : pipeline.EncoderComponents(params_)) {
      phases_.push_back({.kind = PhaseKind::kEncodeText, .components = {std::move(component)}});
    }
    if (params_.has_pictures()) {
      phases_.push_back(
          {.kind = PhaseKind::kEncodeMedia, .components = {pipeline.vae_component()}, .may_tile = true});
    }
    const auto pictures = static_cast<int64_t>(params_.seeds.size());
    phases_.push_back({.kind = PhaseKind::kDenoise,
                       .components = {pipeline.denoiser_component()},
                       .slices = Steps() * pictures});
    phases_.push_back({.kind = PhaseKind::kDecode,
                       .components = {pipeline.vae_component()},
                       .slices = pictures,
                       .may_tile = true});
  }

  std::string OutputKey(size_t phase) const override {
    return pipeline_.EncodeKey(phases_[phase].components[0], params_);
  }
  int64_t OutputBytes(size_t phase) const override {
    return pipeline_.ConditioningBytes(phases_[phase].components[0], params_);
  }
  int64_t WorkingBytes(size_t phase, const std::string& component,
                       const PhaseOptions& options) const override {
    return pipeline_.WorkingBytes(component, params_, options,
                                  phases_[phase].kind == PhaseKind::kEncodeMedia);
  }
  std::string ShapeKey(size_t phase, const std::string& component) const override {
    const std::string key = pipeline_.ShapeKey(component, params_);
    return phases_[phase].kind == PhaseKind::kEncodeMedia ? key + "/encode" : key;
  }
  int64_t SmallerTile(int64_t tile) const override { return pipeline_.SmallerTile(params_, tile); }

  absl::StatusOr<std::unique_ptr<PhaseWork>> Begin(size_t phase, RunState& state) const override {
    switch (phases_[phase].kind) {
      case PhaseKind::kEncodeText:
        return std::make_unique<EncodeTextWork>(pipeline_, params_, phases_[phase].components[0], state);
      case PhaseKind::kEncodeMedia:
        return std::make_unique<EncodeImageWork>(pipeline_, params_, state);
      case PhaseKind::kDenoise: {
        ASSIGN_OR_RETURN(std::unique_ptr<Denoiser> denoiser,
                         pipeline_.Begin(params_, state.conditioning, state.media_latents));
        state.conditioning.clear();
        return std::make_unique<DenoiseWork>(pipeline_, std::move(denoiser), state);
      }
      case PhaseKind::kDecode:
        return std::make_unique<DecodeWork>(pipeline_, params_, state);
    }
    return absl::InternalError("a phase of no kind");
  }

 private:
  // Steps that are run of those that were asked for; the sampler decides, this is near enough for a time.
  int64_t Steps() const {
    if (!params_.has(MediaRole::kInit)) return *params_.steps;
    const double steps = static_cast<double>(*params_.steps) * *params_.strength;
    return std::max<int64_t>(1, static_cast<int64_t>(steps));
  }

  const ImagePipeline& pipeline_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const Run>> ImagePipeline::Prepare(GenerateParams params) const {
  RETURN_IF_ERROR(Validate(params));
  ASSIGN_OR_RETURN(std::vector<TokenCount> tokens, CountTokens(params));
  return std::make_shared<const ImageRun>(*this, std::move(params), std::move(tokens));
}

}  // namespace latentd
