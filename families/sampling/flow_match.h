// Flow matching: the list of noise levels (sigmas) and the Euler sampler. Knows no model.
//
// A sigma runs from 1 (noise) to 0 (picture); x_σ = σ·noise + (1 − σ)·picture, and a model predicts the
// velocity noise − picture. Esser et al. 2024, "Scaling Rectified Flow Transformers", sections 2 and 5.3.2
// (timestep shift). Numbers are those of diffusers' FlowMatchEulerDiscreteScheduler, computed in fp32.
//
// Pure functions and a value type; any thread.
#ifndef LATENTD_FAMILIES_SAMPLING_FLOW_MATCH_H_
#define LATENTD_FAMILIES_SAMPLING_FLOW_MATCH_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"

namespace latentd {

enum class TimeShift { kExponential, kLinear };

struct FlowMatchConfig {
  double shift = 1.0;  // of the static rule
  // Dynamic rule: the shift depends on the number of picture tokens, linearly between two points.
  bool dynamic = false;
  TimeShift dynamic_kind = TimeShift::kExponential;
  double base_shift = 0.5, max_shift = 1.15;
  int64_t base_tokens = 256, max_tokens = 4096;
  std::optional<double> terminal;  // stretches the list so that its last entry before 0 is this

  // Of a scheduler_config.json. Errors: those of JsonConfig; FAILED_PRECONDITION UNSUPPORTED_MODEL for
  // schedules of another kind (Karras, beta, stochastic, …).
  static absl::StatusOr<FlowMatchConfig> Load(const std::string& path);
};

// μ of the dynamic rule for a picture of `tokens` tokens.
double DynamicShift(const FlowMatchConfig& config, int64_t tokens);

// steps + 1 noise levels, the last one 0. Base list linspace(1, 1/steps, steps), then the shift. `shift`
// replaces the model's own, static or dynamic: σ' = s·σ / (1 + (s − 1)·σ). REQUIRES: steps >= 1.
std::vector<float> FlowMatchSigmas(const FlowMatchConfig& config, int64_t steps, int64_t tokens,
                                   std::optional<double> shift = std::nullopt);

// Where img2img enters a list of `steps` levels: the share `strength` of them is run. Result in [0, steps].
int64_t StartIndex(int64_t steps, double strength);

// x_σ = σ·noise + (1 − σ)·picture.
at::Tensor AddNoise(const at::Tensor& picture, const at::Tensor& noise, float sigma);

// One Euler step from `sigma` to `next` along `velocity`.
at::Tensor EulerStep(const at::Tensor& x, const at::Tensor& velocity, float sigma, float next);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_FLOW_MATCH_H_
