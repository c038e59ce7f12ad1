#include "families/sampling/noise_schedule.h"

#include <algorithm>
#include <cmath>

#include "ATen/ATen.h"

namespace latentd {
namespace {

constexpr double kLowestAlphaBar = 0x1p-24;  // stands for 0 where σ must be finite

// ᾱ at a share of the training range.
double SquaredCosine(double t) { return std::pow(std::cos((t + 0.008) / 1.008 * M_PI / 2), 2); }
double Exponential(double t) { return std::exp(t * -12.0); }
double Laplace(double t) {
  const double lambda = -0.5 * std::copysign(1.0, 0.5 - t) * std::log(1 - 2 * std::fabs(0.5 - t) + 1e-6);
  return std::sqrt(std::exp(lambda) / (1 + std::exp(lambda)));
}

at::Tensor BetasOfBars(int64_t steps, double (*alpha_bar)(double)) {
  std::vector<float> betas;
  const auto n = static_cast<double>(steps);
  for (int64_t i = 0; i < steps; ++i) {
    const auto t = static_cast<double>(i);
    betas.push_back(static_cast<float>(std::min(1 - alpha_bar((t + 1) / n) / alpha_bar(t / n), 0.999)));
  }
  return at::tensor(betas);
}

at::Tensor Betas(const NoiseScheduleConfig& config) {
  if (!config.trained_betas.empty()) return at::tensor(config.trained_betas);
  switch (config.betas) {
    case BetaSchedule::kLinear:
      return at::linspace(config.beta_start, config.beta_end, config.train_steps, at::kFloat);
    case BetaSchedule::kSquaredCosine:
      return BetasOfBars(config.train_steps, SquaredCosine);
    case BetaSchedule::kExponential:
      return BetasOfBars(config.train_steps, Exponential);
    case BetaSchedule::kLaplace:
      return BetasOfBars(config.train_steps, Laplace);
    case BetaSchedule::kSigmoid:
      return at::linspace(-6, 6, config.train_steps, at::kFloat).sigmoid() *
                 (config.beta_end - config.beta_start) +
             config.beta_start;
    case BetaSchedule::kScaledLinear:
      break;
  }
  return at::linspace(std::sqrt(config.beta_start), std::sqrt(config.beta_end), config.train_steps,
                      at::kFloat)
      .square();
}

// Shifts √ᾱ so that it ends at 0, and scales it so that it starts where it did.
at::Tensor ZeroTerminalSnr(const at::Tensor& betas) {
  const at::Tensor root = (1.0 - betas).cumprod(0).sqrt();
  const at::Tensor first = root[0], last = root[-1];
  const at::Tensor bars = ((root - last) * (first / (first - last))).square();
  return 1.0 - at::cat({bars.slice(0, 0, 1), bars.slice(0, 1) / bars.slice(0, 0, -1)});
}

std::vector<float> ToVector(const at::Tensor& values) {
  const at::Tensor v = values.contiguous();
  return {v.const_data_ptr<float>(), v.const_data_ptr<float>() + v.numel()};
}

}  // namespace

std::shared_ptr<const NoiseSchedule> NoiseSchedule::Create(const NoiseScheduleConfig& config) {
  auto schedule = std::shared_ptr<NoiseSchedule>(new NoiseSchedule);
  schedule->config_ = config;
  at::Tensor betas = Betas(config);
  if (config.zero_terminal_snr) betas = ZeroTerminalSnr(betas);
  const at::Tensor bars = (1.0 - betas).cumprod(0);
  schedule->alpha_bars_ = ToVector(bars);
  at::Tensor finite = bars.clone();
  if (config.zero_terminal_snr) finite[-1] = kLowestAlphaBar;
  schedule->sigmas_ = ToVector(((1.0 - finite) / finite).sqrt());
  for (const float sigma : schedule->sigmas_) schedule->log_sigmas_.push_back(std::log(sigma));
  return schedule;
}

double NoiseSchedule::SigmaAt(double timestep) const {
  const double t = std::clamp(timestep, 0.0, static_cast<double>(config_.train_steps - 1));
  const auto low = std::min(static_cast<size_t>(t), sigmas_.size() - 2);
  const double w = t - static_cast<double>(low);
  const double a = sigmas_[low], b = sigmas_[low + 1];
  return a + (b - a) * w;
}

double NoiseSchedule::TimestepOf(double sigma) const {
  const double wanted = std::log(std::max(sigma, 1e-10));
  const auto above = std::upper_bound(log_sigmas_.begin(), log_sigmas_.end(), wanted,
                                      [](double value, float entry) { return value < entry; });
  const int64_t low = std::clamp<int64_t>(above - log_sigmas_.begin() - 1, 0, config_.train_steps - 2);
  const double a = log_sigmas_[static_cast<size_t>(low)], b = log_sigmas_[static_cast<size_t>(low + 1)];
  return static_cast<double>(low) + std::clamp((wanted - a) / (b - a), 0.0, 1.0);
}

}  // namespace latentd
