#include "families/sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ATen/ATen.h"
#include "families/sampling/sampler_plan.h"

namespace latentd {
namespace {

const Evaluation& At(const SamplerPlan& plan, int64_t evaluation) {
  return plan.evaluations[static_cast<size_t>(evaluation)];
}

// What brings a level to the scale that networks were trained at: α² + σ² = 1, which holds already where α is
// not 1. `deviation`: that of pictures, where it is not 1.
double InputScale(const Level& level, double deviation) {
  return level.alpha == 1 && level.sigma > 0
             ? 1 / std::sqrt(level.sigma * level.sigma + deviation * deviation)
             : 1;
}

at::Tensor Thresholded(const at::Tensor& picture, const ThresholdSettings& threshold) {
  at::Tensor most = picture.abs().flatten(1).quantile(threshold.ratio, 1, /*keepdim=*/true);
  most = most.clamp(1).clamp_max(threshold.most).view({-1, 1, 1, 1});
  return picture.clamp(-most, most).div_(most);
}

}  // namespace

Sampler::Sampler(std::shared_ptr<const SamplerPlan> plan, std::shared_ptr<NoiseSource> noise)
    : plan_(std::move(plan)), noise_(std::move(noise)), evaluation_(plan_->begin) {
  for (int64_t i = plan_->begin; i < plan_->end; ++i) step_count_ += At(*plan_, i).ends_step ? 1 : 0;
}

int64_t Sampler::evaluation_count() const { return plan_->end - plan_->begin; }
int64_t Sampler::evaluations_done() const { return evaluation_ - plan_->begin; }
bool Sampler::done() const { return evaluation_ == plan_->end; }
double Sampler::timestep() const { return At(*plan_, evaluation_).timestep; }
bool Sampler::ends_step() const { return At(*plan_, evaluation_).ends_step; }
int64_t Sampler::index() const { return At(*plan_, evaluation_).step; }
bool Sampler::second() const { return At(*plan_, evaluation_).second; }
double Sampler::initial_noise_scale() const { return plan_->initial_noise_scale; }

double Sampler::sigma() const {
  const Level& level = plan_->LevelBefore(evaluation_);
  return std::min<double>(level.sigma / level.alpha, plan_->highest);
}

at::Tensor Sampler::AddNoise(const at::Tensor& picture, const at::Tensor& noise) const {
  const Level& level = plan_->NoisedBefore(evaluation_);
  if (level.sigma == 0) return picture;
  return (picture * level.alpha).add_(noise, level.sigma);
}

at::Tensor Sampler::ScaleInput(const at::Tensor& x) const {
  const double scale = InputScale(At(*plan_, evaluation_).level, plan_->deviation);
  return scale == 1 ? x : x * scale;
}

at::Tensor Sampler::Step(const at::Tensor& output, const at::Tensor& x) {
  const bool ended = ends_step();
  at::Tensor next = Advance(output.to(at::kFloat), x);
  ++evaluation_;
  if (ended) ++steps_done_;
  return next;
}

at::Tensor Sampler::Picture(const at::Tensor& output, const at::Tensor& x) const {
  const SolverSettings& solver = plan_->solver;
  const at::Tensor picture = Predicted(output, x);
  if (solver.threshold) return Thresholded(picture, *solver.threshold);
  return solver.clip ? picture.clamp(-*solver.clip, *solver.clip) : picture;
}

at::Tensor Sampler::Predicted(const at::Tensor& output, const at::Tensor& x) const {
  const Level& level = At(*plan_, evaluation_).level;
  const Prediction prediction = plan_->schedule->config().prediction;
  if (plan_->solver.edm) {
    const double data = plan_->deviation, variance = level.sigma * level.sigma + data * data;
    const double out = level.sigma * data / std::sqrt(variance);
    return (x * (data * data / variance)).add_(output, prediction == Prediction::kVelocity ? -out : out);
  }
  switch (prediction) {
    case Prediction::kEpsilon:
      return (x - output * level.sigma).div_(level.alpha);
    case Prediction::kVelocity: {
      const double scale = InputScale(level, 1);
      return (x * (level.alpha * scale * scale)).sub_(output, level.sigma * scale);
    }
    case Prediction::kSample:
      break;
  }
  return output;
}

at::Tensor Sampler::Noise(const at::Tensor& output, const at::Tensor& x) const {
  const Level& level = At(*plan_, evaluation_).level;
  switch (plan_->schedule->config().prediction) {
    case Prediction::kEpsilon:
      return output;
    case Prediction::kVelocity: {
      const double scale = InputScale(level, 1);
      return (output * (level.alpha * scale)).add_(x, level.sigma * scale * scale);
    }
    case Prediction::kSample:
      break;
  }
  return NoiseBeside(output, x);
}

at::Tensor Sampler::NoiseBeside(const at::Tensor& picture, const at::Tensor& x) const {
  const Level& level = At(*plan_, evaluation_).level;
  return (x - picture * level.alpha).div_(level.sigma);
}

at::Tensor Sampler::Draw(const at::Tensor& like) const {
  return noise_->Draw(like.sizes()).to(like.device());
}

void Sampler::TakeNoise(std::shared_ptr<NoiseSource> noise) {
  noise_ = noise != nullptr ? std::move(noise) : noise_->Clone();
}

}  // namespace latentd
