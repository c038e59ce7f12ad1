// What a model's settings say about how its samplers step, beside the noise that it was trained with
// (noise_schedule.h). Names in comments are those of scheduler_config.json. A plain value.
#ifndef LATENTD_FAMILIES_SAMPLING_SOLVER_SETTINGS_H_
#define LATENTD_FAMILIES_SAMPLING_SOLVER_SETTINGS_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace latentd {

// Models whose σ is not that of training steps, and whose network is wrapped for a picture of the deviation
// `data` (Karras et al. 2022, table 1, "EDM").
struct EdmSettings {
  double sigma_min = 0.002, sigma_max = 80, data = 0.5, rho = 7;
  bool exponential = false;  // evenly in log σ, instead of by ρ
};

// Saharia et al. 2022, "Photorealistic Text-to-Image Diffusion Models", §2.3.
struct ThresholdSettings {
  double ratio = 0.995;  // the quantile that becomes 1
  double most = 1;       // what it is held to
};

struct SolverSettings {
  // Of DPM-Solver, DEIS and UniPC.
  int64_t order = 2;              // solver_order
  bool on_noise = false;          // algorithm_type without ++, predict_x0 false: a polynomial in the noise
  bool noisy = false;             // algorithm_type sde-…
  bool heun = false;              // solver_type heun instead of midpoint
  bool bh1 = false;               // solver_type bh1 instead of bh2
  bool lower_order_final = true;  // the last steps of a short run
  bool euler_at_final = false;
  std::vector<int64_t> uncorrected;  // disable_corrector: steps after which UniPC does not correct

  bool large_variance = false;   // DDPM's variance_type fixed_large
  int64_t original_steps = 50;   // original_inference_steps of LCM and TCD
  double timestep_scaling = 10;  // of LCM
  bool ends_above_zero = false;  // final_sigmas_type sigma_min: not all of the noise is taken away
  bool log_linear = false;       // interpolation_type
  bool continuous = false;       // timestep_type: the network is told ¼ log σ
  std::optional<double> sigma_min, sigma_max;  // ends of Karras, exponential and beta levels
  double lambda_min = -std::numeric_limits<double>::infinity();  // lambda_min_clipped: no level is above e^−λ

  // What is done with each predicted picture; a threshold goes before a range.
  std::optional<double> clip;  // clip_sample, clip_sample_range
  std::optional<ThresholdSettings> threshold;

  std::optional<EdmSettings> edm;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_SOLVER_SETTINGS_H_
