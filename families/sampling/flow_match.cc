#include "families/sampling/flow_match.h"

#include <algorithm>
#include <cmath>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/config/json_config.h"

namespace latentd {
namespace {

float StaticShift(float shift, float shift_minus_one, float sigma) {
  return shift * sigma / (1.0f + shift_minus_one * sigma);
}

}  // namespace

absl::StatusOr<FlowMatchConfig> FlowMatchConfig::Load(const std::string& path) {
  ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path));
  FlowMatchConfig config;
  config.shift = json.Double("shift", 1.0, 1e-3, 1e3);
  config.dynamic = json.Bool("use_dynamic_shifting", false);
  config.base_shift = json.Double("base_shift", 0.5, 1e-3, 20);
  config.max_shift = json.Double("max_shift", 1.15, 1e-3, 20);
  config.base_tokens = json.Int("base_image_seq_len", 256, 1, 1 << 24);
  config.max_tokens = json.Int("max_image_seq_len", 4096, 1, 1 << 24);
  const double terminal = json.Double("shift_terminal", 0, 0, 0.999);
  if (terminal > 0) config.terminal = terminal;
  const std::string kind = json.String("time_shift_type", "exponential");
  config.dynamic_kind = kind == "linear" ? TimeShift::kLinear : TimeShift::kExponential;

  auto refuse = [&](absl::string_view what) {
    json.Fail(MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                        absl::StrCat(json.label(), ": ", what, " is not supported"),
                        {{"file", json.label()}, {"what", std::string(what)}}));
  };
  for (const char* flag : {"use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas",
                           "stochastic_sampling", "use_flow_sigmas"}) {
    if (json.Bool(flag, false)) refuse(flag);
  }
  if (json.Int("num_train_timesteps", 1000, 1, 1 << 24) != 1000) refuse("num_train_timesteps");
  if (kind != "linear" && kind != "exponential") refuse(absl::StrCat("time_shift_type ", kind));
  const std::string name = json.String("_class_name", "FlowMatchEulerDiscreteScheduler");
  if (name != "FlowMatchEulerDiscreteScheduler") refuse(absl::StrCat("the scheduler ", name));
  if (config.dynamic && config.base_tokens == config.max_tokens) refuse("a shift between equal lengths");
  RETURN_IF_ERROR(json.status());
  return config;
}

double DynamicShift(const FlowMatchConfig& config, int64_t tokens) {
  const double slope =
      (config.max_shift - config.base_shift) / static_cast<double>(config.max_tokens - config.base_tokens);
  const double offset = config.base_shift - slope * static_cast<double>(config.base_tokens);
  return static_cast<double>(tokens) * slope + offset;
}

std::vector<float> FlowMatchSigmas(const FlowMatchConfig& config, int64_t steps, int64_t tokens,
                                   std::optional<double> shift) {
  std::vector<float> sigmas(static_cast<size_t>(steps));
  const double last = 1.0 / static_cast<double>(steps);
  const double stride = steps > 1 ? (last - 1.0) / static_cast<double>(steps - 1) : 0;
  for (int64_t i = 0; i < steps; ++i) {
    sigmas[static_cast<size_t>(i)] = static_cast<float>(static_cast<double>(i) * stride + 1.0);
  }
  if (steps > 1) sigmas.back() = static_cast<float>(last);

  if (config.dynamic && !shift) {
    const double mu = DynamicShift(config, tokens);
    const auto s = static_cast<float>(config.dynamic_kind == TimeShift::kExponential ? std::exp(mu) : mu);
    for (float& sigma : sigmas) sigma = s / (s + (1.0f / sigma - 1.0f));
  } else {
    const double s = shift.value_or(config.shift);
    for (float& sigma : sigmas) {
      sigma = StaticShift(static_cast<float>(s), static_cast<float>(s - 1.0), sigma);
    }
  }
  if (config.terminal && sigmas.back() < 1.0f) {  // one step alone cannot be stretched
    const float scale = (1.0f - sigmas.back()) / static_cast<float>(1.0 - *config.terminal);
    for (float& sigma : sigmas) sigma = 1.0f - (1.0f - sigma) / scale;
  }
  sigmas.push_back(0.0f);
  return sigmas;
}

int64_t StartIndex(int64_t steps, double strength) {
  const auto n = static_cast<double>(steps);
  return static_cast<int64_t>(std::max(n - std::min(n * strength, n), 0.0));
}

at::Tensor AddNoise(const at::Tensor& picture, const at::Tensor& noise, float sigma) {
  return (noise * sigma).add_(picture * (1.0f - sigma));
}

at::Tensor EulerStep(const at::Tensor& x, const at::Tensor& velocity, float sigma, float next) {
  return x + velocity * (next - sigma);
}

}  // namespace latentd
