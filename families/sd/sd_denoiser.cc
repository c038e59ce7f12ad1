#include "families/sd/sd_denoiser.h"

#include <algorithm>
#include <utility>

#include "ATen/ATen.h"

namespace latentd {
namespace {

class SdDenoiser : public Denoiser {
 public:
  explicit SdDenoiser(SdDenoising run) : run_(std::move(run)) {
    for (const SdPicture& picture : run_.pictures) {
      State state{picture.x, picture.source, {}};
      for (size_t tile = 0; tile < run_.tiles.size(); ++tile) {
        state.samplers.push_back(picture.sampler->Clone(picture.source));
      }
      states_.push_back(std::move(state));
    }
  }

  int64_t step_count() const override { return first().step_count(); }
  int64_t picture_count() const override { return static_cast<int64_t>(states_.size()); }
  bool done() const override { return first().done(); }

  at::Tensor latents() const override {
    c10::InferenceMode inference;
    std::vector<at::Tensor> all;
    for (const State& state : states_) all.push_back(state.x);
    return at::cat(all).to(at::kCPU);
  }

  at::Tensor prediction() const override {
    if (!first().prediction().defined()) return latents();
    c10::InferenceMode inference;
    std::vector<at::Tensor> all;
    for (const State& state : states_) {
      std::vector<at::Tensor> tiles;
      for (const auto& sampler : state.samplers) tiles.push_back(sampler->prediction());
      all.push_back(MergeTiles(run_.tiles, tiles, state.x.size(2), state.x.size(3)));
    }
    return at::cat(all).to(at::kCPU);
  }

 protected:
  // With copies of samplers and sources, so that a turn can be repeated.
  absl::StatusOr<at::Tensor> StepPicture(const WeightView& w, int64_t picture) override {
    c10::InferenceMode inference;
    if (picture == 0) BeginStep(w);
    const auto i = static_cast<size_t>(picture);
    stepped_.resize(i);
    stepped_.push_back(Stepped(w, run_.pictures[i], states_[i], OfStep(run_.guidance)));
    return stepped_.back().x;
  }

  StepReport EndStep() override {
    const double sigma = first().sigma();
    states_ = std::move(stepped_);
    stepped_.clear();
    return StepReport{.index = first().steps_done(), .count = step_count(), .sigma = sigma};
  }

 private:
  // Of one picture between steps.
  struct State {
    at::Tensor x;
    std::shared_ptr<NoiseSource> source;
    std::vector<std::unique_ptr<Sampler>> samplers;  // by tile
  };

  const Sampler& first() const { return *states_.front().samplers.front(); }

  // What the step that is under way has of a list by steps; the last one stands for those that follow.
  template <typename T>
  const T& OfStep(const std::vector<T>& list) const {
    return list[std::min(static_cast<size_t>(first().steps_done()), list.size() - 1)];
  }

  // What all pictures of a step share.
  void BeginStep(const WeightView& w) {
    const bool first_step = first().steps_done() == 0;
    if (first_step) Prepare(w);
    const size_t wanted = OfStep(run_.prompts_of_step);
    if (!first_step && wanted == prompts_) return;
    run_.predictor.Prepare(w, run_.prompts[wanted]);
    prompts_ = wanted;
  }

  // A first step that failed does it once more, at no cost where it is done.
  void Prepare(const WeightView& w) {
    for (State& state : states_) state.x = state.x.to(w.device());
    for (SdPicture& picture : run_.pictures) {
      for (at::Tensor* tensor : {&picture.more, &picture.original, &picture.noise}) {
        if (tensor->defined()) *tensor = tensor->to(w.device());
      }
    }
    for (SdTile& tile : run_.tiles) {
      if (tile.weight.defined()) tile.weight = tile.weight.to(w.device());
    }
    if (run_.mask.mask.defined()) run_.mask.mask = run_.mask.mask.to(w.device());
  }

  State Stepped(const WeightView& w, const SdPicture& picture, const State& before, double guidance) {
    State after{{}, before.source->Clone(), {}};
    std::vector<at::Tensor> results;
    for (size_t i = 0; i < run_.tiles.size(); ++i) {
      const SdTile& tile = run_.tiles[i];
      std::unique_ptr<Sampler> sampler = before.samplers[i]->Clone(after.source);
      at::Tensor x = tile.Of(before.x);
      const at::Tensor more = picture.more.defined() ? tile.Of(picture.more) : at::Tensor();
      for (bool ends = false; !ends;) {
        ends = sampler->ends_step();
        const at::Tensor output =
            run_.predictor(w, sampler->ScaleInput(x), more, sampler->timestep(), guidance);
        x = sampler->Step(output, x);
        // After a step it is done for all tiles at once.
        if (!ends && picture.original.defined()) {
          x = KeepOriginal(tile.Of(picture.original), tile.Of(picture.noise), tile.Of(run_.mask.mask),
                           *sampler, x);
        }
      }
      results.push_back(x);
      after.samplers.push_back(std::move(sampler));
    }
    after.x = MergeTiles(run_.tiles, results, before.x.size(2), before.x.size(3));
    if (picture.original.defined()) {
      after.x =
          KeepOriginal(picture.original, picture.noise, run_.mask.mask, *after.samplers.front(), after.x);
    }
    return after;
  }

  at::Tensor KeepOriginal(const at::Tensor& original, const at::Tensor& noise, const at::Tensor& mask,
                          const Sampler& sampler, const at::Tensor& x) const {
    const SdMask part{mask, run_.mask.gradient, run_.mask.train_steps};
    const at::Tensor places = RepaintedPlaces(part, sampler.done() ? 0 : sampler.timestep());
    return (1 - places) * sampler.AddNoise(original, noise) + places * x;
  }

  SdDenoising run_;
  size_t prompts_ = 0;  // which of them the predictor has
  std::vector<State> states_;
  std::vector<State> stepped_;  // after the step that is under way, of those that had their turn
};

}  // namespace

at::Tensor RepaintedPlaces(const SdMask& mask, double next_timestep) {
  if (!mask.gradient) return mask.mask;
  return mask.mask.gt(next_timestep / static_cast<double>(mask.train_steps)).to(mask.mask.scalar_type());
}

std::unique_ptr<Denoiser> MakeSdDenoiser(SdDenoising run) {
  return std::make_unique<SdDenoiser>(std::move(run));
}

}  // namespace latentd
