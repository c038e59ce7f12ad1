#include "families/sd/sd_denoiser.h"

#include <algorithm>
#include <utility>

#include "ATen/ATen.h"

namespace latentd {
namespace {

constexpr double kTrainSteps = 1000;

class SdDenoiser : public Denoiser {
 public:
  SdDenoiser(SdPredictor predictor, std::vector<SdPicture> pictures, SdMask mask, std::vector<double> guidance)
      : predictor_(std::move(predictor)),
        pictures_(std::move(pictures)),
        mask_(std::move(mask)),
        guidance_(std::move(guidance)) {}

  int64_t step_count() const override { return first().step_count(); }
  bool done() const override { return first().done(); }

  absl::StatusOr<StepReport> Step(const WeightView& w) override {
    c10::InferenceMode inference;
    const int64_t index = first().steps_done();
    const double sigma = first().sigma();
    if (index == 0) Prepare(w);
    const double guidance = guidance_[std::min(static_cast<size_t>(index), guidance_.size() - 1)];
    // All pictures before any is replaced, each by a sampler of its own: a step that fails half-way can be
    // repeated.
    struct Stepped {
      at::Tensor x;
      std::unique_ptr<Sampler> sampler;
    };
    std::vector<Stepped> stepped;
    for (const SdPicture& picture : pictures_) {
      Stepped next{picture.x, picture.sampler->Clone()};
      for (bool ends = false; !ends;) {
        ends = next.sampler->ends_step();
        const at::Tensor output = predictor_(w, next.sampler->ScaleInput(next.x), picture.more,
                                             next.sampler->timestep(), guidance);
        next.x = next.sampler->Step(output, next.x);
      }
      if (picture.original.defined()) next.x = KeepOriginal(picture, *next.sampler, next.x);
      stepped.push_back(std::move(next));
    }
    for (size_t i = 0; i < pictures_.size(); ++i) {
      pictures_[i].x = std::move(stepped[i].x);
      pictures_[i].sampler = std::move(stepped[i].sampler);
    }
    return StepReport{.index = index + 1, .count = step_count(), .sigma = sigma};
  }

  at::Tensor latents() const override {
    c10::InferenceMode inference;
    return Gather([](const SdPicture& picture) { return picture.x; });
  }

  at::Tensor prediction() const override {
    if (!first().prediction().defined()) return latents();
    c10::InferenceMode inference;
    return Gather([](const SdPicture& picture) { return picture.sampler->prediction(); });
  }

 private:
  const Sampler& first() const { return *pictures_.front().sampler; }

  template <typename F>
  at::Tensor Gather(const F& of) const {
    std::vector<at::Tensor> all;
    for (const SdPicture& picture : pictures_) all.push_back(of(picture));
    return at::cat(all).to(at::kCPU);
  }

  // A first step that failed does it once more, at no cost where it is done.
  void Prepare(const WeightView& w) {
    predictor_.Prepare(w);
    for (SdPicture& picture : pictures_) {
      for (at::Tensor* tensor : {&picture.x, &picture.more, &picture.original, &picture.noise}) {
        if (tensor->defined()) *tensor = tensor->to(w.device());
      }
    }
    if (mask_.mask.defined()) mask_.mask = mask_.mask.to(w.device());
  }

  at::Tensor KeepOriginal(const SdPicture& picture, const Sampler& sampler, const at::Tensor& x) const {
    const at::Tensor places = RepaintedPlaces(mask_, sampler.done() ? 0 : sampler.timestep());
    return (1 - places) * sampler.AddNoise(picture.original, picture.noise) + places * x;
  }

  SdPredictor predictor_;
  std::vector<SdPicture> pictures_;
  SdMask mask_;
  const std::vector<double> guidance_;
};

}  // namespace

at::Tensor RepaintedPlaces(const SdMask& mask, double next_timestep) {
  if (!mask.gradient) return mask.mask;
  return mask.mask.gt(next_timestep / kTrainSteps).to(mask.mask.scalar_type());
}

std::unique_ptr<Denoiser> MakeSdDenoiser(SdPredictor predictor, std::vector<SdPicture> pictures, SdMask mask,
                                         std::vector<double> guidance) {
  return std::make_unique<SdDenoiser>(std::move(predictor), std::move(pictures), std::move(mask),
                                      std::move(guidance));
}

}  // namespace latentd
