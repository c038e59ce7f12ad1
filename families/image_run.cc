#include "families/image_run.h"

#include <algorithm>
#include <utility>

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "families/finite_watch.h"

namespace latentd {
namespace {

// The work of a phase that reads one component from its first slice to its last.
class ComponentWork : public PhaseWork {
 public:
  ComponentWork(std::string component, RunState& state) : state_(state), component_(std::move(component)) {}

  std::vector<std::string> reads() const override { return {component_}; }
  absl::StatusOr<SliceReport> Slice(const WeightViews& views, const PhaseOptions& options) override {
    const c10::InferenceMode inference;
    return Slice(views[component_], options);
  }

 protected:
  virtual absl::StatusOr<SliceReport> Slice(const WeightView& weights, const PhaseOptions& options) = 0;

  RunState& state_;

 private:
  const std::string component_;
};

class EncodeTextWork : public ComponentWork {
 public:
  EncodeTextWork(std::unique_ptr<TextEncoding> encoding, std::string component, RunState& state)
      : ComponentWork(std::move(component), state), encoding_(std::move(encoding)) {}

 protected:
  absl::StatusOr<SliceReport> Slice(const WeightView& weights, const PhaseOptions&) override {
    ASSIGN_OR_RETURN(const bool over, encoding_->Slice(weights));
    if (!over) return SliceReport{};
    Conditioning made = encoding_->Take();
    for (const auto& [name, tensor] : made) {
      if (!IsFinite(tensor)) return NonFinite("encode");
    }
    for (auto& [name, tensor] : made) state_.conditioning[name] = std::move(tensor);
    return SliceReport{.phase_over = true};
  }

 private:
  const std::unique_ptr<TextEncoding> encoding_;
};

class EncodeMediaWork : public ComponentWork {
 public:
  EncodeMediaWork(const ImageRun& run, std::string component, RunState& state)
      : ComponentWork(std::move(component), state), run_(run), encoder_(run.vae(), run.MediaPictures()) {}

  void LetGo() override { encoder_.LetGo(); }

 protected:
  absl::StatusOr<SliceReport> Slice(const WeightView& weights, const PhaseOptions& options) override {
    if (!encoder_.Slice(weights, options.tile)) return SliceReport{};
    ASSIGN_OR_RETURN(state_.media_latents, run_.MediaLatents(encoder_.posteriors()));
    if (!IsFinite(state_.media_latents)) return NonFinite("encode_image");
    return SliceReport{.phase_over = true};
  }

 private:
  const ImageRun& run_;
  PictureEncoder encoder_;
};

// A slice is a turn of the denoiser: one picture's step.
class DenoiseWork : public ComponentWork {
 public:
  DenoiseWork(const ImageRun& run, std::unique_ptr<Denoiser> denoiser, std::string component, RunState& state)
      : ComponentWork(std::move(component), state), run_(run), denoiser_(std::move(denoiser)) {}

  int64_t step_count() const override { return denoiser_->step_count(); }
  at::Tensor latents() const override { return denoiser_->latents(); }

  std::vector<at::Tensor> Previews() const override {
    const at::Tensor latents = denoiser_->prediction();
    std::vector<at::Tensor> pictures;
    for (int64_t i = 0; i < latents.size(0); ++i) pictures.push_back(run_.Preview(latents.narrow(0, i, 1)));
    return pictures;
  }

 protected:
  absl::StatusOr<SliceReport> Slice(const WeightView& weights, const PhaseOptions&) override {
    SliceReport report;
    if (!denoiser_->done()) {
      ASSIGN_OR_RETURN(report.step, denoiser_->Turn(weights));
    }
    if (!denoiser_->done()) return report;
    RETURN_IF_ERROR(denoiser_->CheckFinite());
    state_.latents = denoiser_->latents();
    report.phase_over = true;
    return report;
  }

 private:
  const ImageRun& run_;
  const std::unique_ptr<Denoiser> denoiser_;
};

class DecodeWork : public ComponentWork {
 public:
  DecodeWork(const ImageRun& run, std::string component, RunState& state)
      : ComponentWork(std::move(component), state), run_(run), decoder_(run.vae(), state.latents) {}

  void LetGo() override { decoder_.LetGo(); }

 protected:
  absl::StatusOr<SliceReport> Slice(const WeightView& weights, const PhaseOptions& options) override {
    ASSIGN_OR_RETURN(const at::Tensor picture, decoder_.Slice(weights, options.tile));
    if (picture.defined()) state_.pictures.push_back(run_.Finish(picture));
    return SliceReport{.phase_over = decoder_.over()};
  }

 private:
  const ImageRun& run_;
  PictureDecoder decoder_;
};

// Steps that are run of those that were asked for; the sampler decides, this is near enough for a time.
int64_t StepsOf(const GenerateParams& params) {
  if (!params.has(MediaRole::kInit)) return *params.steps;
  const double steps = static_cast<double>(*params.steps) * *params.strength;
  return std::max<int64_t>(1, static_cast<int64_t>(steps));
}

}  // namespace

ImageRun::ImageRun(GenerateParams params, const Components& components, const AutoencoderKl& vae)
    : Run(std::move(params)), vae_(vae) {
  for (const std::string& encoder : components.encoders) {
    phases_.push_back({.kind = PhaseKind::kEncodeText, .components = {encoder}});
  }
  if (params_.has_pictures()) {
    phases_.push_back({.kind = PhaseKind::kEncodeMedia, .components = {components.vae}, .may_tile = true});
  }
  const auto pictures = static_cast<int64_t>(params_.seeds.size());
  phases_.push_back({.kind = PhaseKind::kDenoise,
                     .components = {components.denoiser},
                     .units = StepsOf(params_) * pictures});
  phases_.push_back(
      {.kind = PhaseKind::kDecode, .components = {components.vae}, .units = pictures, .may_tile = true});
}

absl::StatusOr<std::unique_ptr<PhaseWork>> ImageRun::Begin(size_t phase, RunState& state) const {
  const std::string& component = phases_[phase].components[0];
  switch (phases_[phase].kind) {
    case PhaseKind::kEncodeText: {
      ASSIGN_OR_RETURN(std::unique_ptr<TextEncoding> encoding, BeginText(component, state.embeddings));
      return std::make_unique<EncodeTextWork>(std::move(encoding), component, state);
    }
    case PhaseKind::kEncodeMedia:
      return std::make_unique<EncodeMediaWork>(*this, component, state);
    case PhaseKind::kDenoise: {
      ASSIGN_OR_RETURN(std::unique_ptr<Denoiser> denoiser,
                       BeginDenoising(state.conditioning, state.media_latents));
      state.conditioning.clear();
      return std::make_unique<DenoiseWork>(*this, std::move(denoiser), component, state);
    }
    case PhaseKind::kDecode:
      return std::make_unique<DecodeWork>(*this, component, state);
  }
  return absl::InternalError("a phase of no kind");
}

}  // namespace latentd
