#include "families/sampling/noise_schedule.h"

#include <algorithm>
#include <cmath>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "families/config/json_config.h"

namespace latentd {
namespace {

constexpr double kLowestAlphaBar = 0x1p-24;  // stands for 0 where σ must be finite

at::Tensor SquaredCosineBetas(int64_t steps) {
  auto alpha_bar = [](double t) { return std::pow(std::cos((t + 0.008) / 1.008 * M_PI / 2), 2); };
  std::vector<float> betas;
  const auto n = static_cast<double>(steps);
  for (int64_t i = 0; i < steps; ++i) {
    const auto t = static_cast<double>(i);
    betas.push_back(static_cast<float>(std::min(1 - alpha_bar((t + 1) / n) / alpha_bar(t / n), 0.999)));
  }
  return at::tensor(betas);
}

at::Tensor Betas(const NoiseScheduleConfig& config) {
  switch (config.betas) {
    case BetaSchedule::kLinear:
      return at::linspace(config.beta_start, config.beta_end, config.train_steps, at::kFloat);
    case BetaSchedule::kSquaredCosine:
      return SquaredCosineBetas(config.train_steps);
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

template <typename T>
T Choose(JsonConfig& json, const char* key, absl::string_view fallback,
         const std::vector<std::pair<const char*, T>>& choices) {
  const std::string value = json.String(key, fallback);
  for (const auto& [name, choice] : choices) {
    if (value == name) return choice;
  }
  const std::string what = absl::StrCat(key, " ", value);
  json.Fail(MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                      absl::StrCat(json.label(), ": ", what, " is not supported"),
                      {{"file", json.label()}, {"what", what}}));
  return choices.front().second;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const NoiseSchedule>> NoiseSchedule::Load(const std::string& path) {
  ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path));
  NoiseScheduleConfig config;
  auto refuse = [&](absl::string_view what) {
    json.Fail(MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                        absl::StrCat(json.label(), ": ", what, " is not supported"),
                        {{"file", json.label()}, {"what", std::string(what)}}));
  };
  const std::string name = json.String("_class_name", "EulerDiscreteScheduler");
  if (absl::StartsWith(name, "FlowMatch")) refuse(absl::StrCat("the scheduler ", name));
  for (const char* flag : {"clip_sample", "thresholding", "use_flow_sigmas", "use_lu_lambdas"}) {
    if (json.Bool(flag, false)) refuse(flag);
  }
  if (json.Has("trained_betas")) refuse("trained_betas");
  for (const auto& [key, only] : {std::pair<const char*, const char*>{"timestep_type", "discrete"},
                                  {"interpolation_type", "linear"},
                                  {"final_sigmas_type", "zero"},
                                  {"variance_type", "fixed_small"}}) {
    const std::string value = json.String(key, only);
    if (value != only) refuse(absl::StrCat(key, " ", value));
  }

  config.train_steps = json.Int("num_train_timesteps", 1000, 2, 100000);
  config.betas = Choose<BetaSchedule>(json, "beta_schedule", "scaled_linear",
                                      {{"scaled_linear", BetaSchedule::kScaledLinear},
                                       {"linear", BetaSchedule::kLinear},
                                       {"squaredcos_cap_v2", BetaSchedule::kSquaredCosine}});
  config.beta_start = json.Double("beta_start", config.beta_start, 1e-8, 0.999);
  config.beta_end = json.Double("beta_end", config.beta_end, 1e-8, 0.999);
  if (config.beta_end < config.beta_start) refuse("beta_end below beta_start");
  config.prediction = Choose<Prediction>(json, "prediction_type", "epsilon",
                                         {{"epsilon", Prediction::kEpsilon},
                                          {"v_prediction", Prediction::kVelocity},
                                          {"sample", Prediction::kSample}});
  if (json.Has("timestep_spacing")) {
    config.spacing = Choose<TimestepSpacing>(json, "timestep_spacing", "leading",
                                             {{"leading", TimestepSpacing::kLeading},
                                              {"trailing", TimestepSpacing::kTrailing},
                                              {"linspace", TimestepSpacing::kLinspace}});
  }
  config.steps_offset = json.Int("steps_offset", 0, 0, 100);
  if (json.Has("set_alpha_to_one")) config.set_alpha_to_one = json.Bool("set_alpha_to_one", false);
  config.zero_terminal_snr = json.Bool("rescale_betas_zero_snr", false);
  for (const auto& [flag, sigmas] :
       {std::pair<const char*, SigmaSchedule>{"use_karras_sigmas", SigmaSchedule::kKarras},
        {"use_exponential_sigmas", SigmaSchedule::kExponential},
        {"use_beta_sigmas", SigmaSchedule::kBeta}}) {
    if (!json.Bool(flag, false)) continue;
    if (config.sigmas != SigmaSchedule::kDefault) refuse("more than one kind of sigmas");
    config.sigmas = sigmas;
  }
  RETURN_IF_ERROR(json.status());
  return Create(config);
}

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
