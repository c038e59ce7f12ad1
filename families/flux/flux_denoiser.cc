#include "families/flux/flux_denoiser.h"

#include <utility>

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "families/sampling/flow_match.h"

namespace latentd {
namespace {

// What one guided or unguided pass needs of a prompt.
struct Prompt {
  at::Tensor t5, pooled;  // as they came, until the first step
  FluxText text;
  FluxConditioning conditioning;
};

class FluxDenoiser : public Denoiser {
 public:
  explicit FluxDenoiser(FluxDenoising run)
      : transformer_(std::move(run.transformer)),
        sigmas_(std::move(run.sigmas)),
        start_(run.start),
        index_(run.start),
        pictures_(std::move(run.pictures)),
        controls_(std::move(run.controls)),
        guidance_(run.guidance),
        true_cfg_scale_(run.true_cfg_scale),
        height_(run.latent_height),
        width_(run.latent_width) {
    for (FluxPrompt& prompt : run.prompts)
      prompts_.push_back({std::move(prompt.t5), std::move(prompt.pooled), {}, {}});
  }

  int64_t step_count() const override { return last() - start_; }
  int64_t picture_count() const override { return static_cast<int64_t>(pictures_.size()); }
  bool done() const override { return index_ == last(); }

  at::Tensor latents() const override {
    c10::InferenceMode inference;
    return UnpackLatents(at::cat(pictures_), height_, width_).to(at::kCPU);
  }

  // The step's direction followed to sigma 0: x − sigma · v, with v out of the two ends of the step.
  at::Tensor prediction() const override {
    if (before_.empty()) return latents();
    c10::InferenceMode inference;
    const float before = sigma(index_ - 1), now = sigma(index_);
    const at::Tensor from = at::cat(before_), to = at::cat(pictures_);
    return UnpackLatents(at::lerp(from, to, before / (before - now)), height_, width_).to(at::kCPU);
  }

 protected:
  absl::StatusOr<at::Tensor> StepPicture(const WeightView& w, int64_t picture) override {
    c10::InferenceMode inference;
    if (picture == 0) BeginStep(w);
    const auto i = static_cast<size_t>(picture);
    const at::Tensor& x = pictures_[i];
    const at::Tensor input = Input(w, i);
    // Latents and what is done with them stay in fp32, whatever the network computes in.
    at::Tensor velocity = (*transformer_)(w, input, modulations_[0], prompts_[0].text).to(at::kFloat);
    if (prompts_.size() > 1) {
      const at::Tensor negative = (*transformer_)(w, input, modulations_[1], prompts_[1].text).to(at::kFloat);
      velocity = velocity.sub_(negative).mul_(true_cfg_scale_).add_(negative);
    }
    stepped_.resize(i);
    stepped_.push_back(EulerStep(x, velocity, sigma(index_), sigma(index_ + 1)));
    return stepped_.back();
  }

  StepReport EndStep() override {
    before_ = std::move(pictures_);
    pictures_ = std::move(stepped_);
    stepped_.clear();
    modulations_.clear();
    const double from = sigma(index_++);
    return StepReport{.index = index_ - start_, .count = step_count(), .sigma = from};
  }

 private:
  float sigma(int64_t index) const { return sigmas_[static_cast<size_t>(index)]; }

  // What all pictures of a step share.
  void BeginStep(const WeightView& w) {
    if (index_ == start_) Prepare(w);
    modulations_.clear();
    for (const Prompt& prompt : prompts_) {
      modulations_.push_back(transformer_->Modulation(w, sigma(index_), prompt.conditioning));
    }
  }

  int64_t last() const { return static_cast<int64_t>(sigmas_.size()) - 1; }

  // A picture's tokens, with those of its control image beside them. A control LoRA that applies to a part of
  // the steps alone leaves the model's own input in the others.
  at::Tensor Input(const WeightView& w, size_t i) const {
    if (controls_.empty() || transformer_->Inputs(w) == pictures_[i].size(2)) return pictures_[i];
    return at::cat({pictures_[i], controls_[i]}, 2);
  }

  // Brings what Begin was given to where the weights are. What they make of the prompts is the same in all
  // steps. A first step that failed does it once more, at no cost where it is done.
  void Prepare(const WeightView& w) {
    for (at::Tensor& x : pictures_) x = x.to(w.device());
    for (at::Tensor& x : controls_) x = x.to(w.device());
    for (Prompt& prompt : prompts_) {
      prompt.text = transformer_->PrepareText(w, prompt.t5, height_ / 2, width_ / 2);
      prompt.conditioning = transformer_->PrepareConditioning(w, prompt.pooled, guidance_);
    }
  }

  const std::shared_ptr<const FluxTransformer> transformer_;
  const std::vector<float> sigmas_;
  const int64_t start_;
  int64_t index_;                     // of the step to come, in sigmas_
  std::vector<at::Tensor> pictures_;  // packed latents, [1, tokens, 64] each; in host memory until a step
  std::vector<at::Tensor> controls_;  // packed latents of the control image for each; empty without one
  std::vector<at::Tensor> before_;    // the same before the last step
  std::vector<at::Tensor>
      stepped_;  // the same after the step that is under way, of those that had their turn
  std::vector<at::Tensor> modulations_;  // of the step that is under way, by prompt
  std::vector<Prompt> prompts_;          // wanted, then unwanted
  const double guidance_, true_cfg_scale_;
  const int64_t height_, width_;  // of the latents
};

}  // namespace

std::unique_ptr<Denoiser> MakeFluxDenoiser(FluxDenoising run) {
  return std::make_unique<FluxDenoiser>(std::move(run));
}

}  // namespace latentd
