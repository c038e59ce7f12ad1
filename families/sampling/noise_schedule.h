// The noise that a variance-preserving diffusion model (SD 1.x, SDXL) was trained with. Knows no model.
//
// Training step t of T mixes x_t = √ᾱ_t·picture + √(1 − ᾱ_t)·noise, with ᾱ_t = Π (1 − β_i) (Ho et al. 2020,
// "Denoising Diffusion Probabilistic Models"). σ_t = √((1 − ᾱ_t)/ᾱ_t) is the same level when the picture
// keeps its scale (Karras et al. 2022). All tables are fp32, as diffusers has them.
//
// Immutable after Create; any thread. What a model's files say is read by scheduler_config.h.
#ifndef LATENTD_FAMILIES_SAMPLING_NOISE_SCHEDULE_H_
#define LATENTD_FAMILIES_SAMPLING_NOISE_SCHEDULE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace latentd {

enum class BetaSchedule { kScaledLinear, kLinear, kSquaredCosine, kExponential, kLaplace, kSigmoid };
enum class TimestepSpacing { kLeading, kTrailing, kLinspace };
// What the network's output means.
enum class Prediction { kEpsilon, kVelocity, kSample };

// How the levels of a run lie between the highest and the lowest.
enum class SigmaSchedule {
  kDefault,      // as the model's config says
  kKarras,       // Karras et al. 2022, eq. 5, ρ = 7
  kExponential,  // evenly in log σ
  kBeta,         // quantiles of Beta(0.6, 0.6); Lee et al. 2024, "Beta Sampling is All You Need"
  kTrailing,     // integer timesteps counted from the end; also "sgm_uniform" and "simple"
  kAys,          // Align Your Steps, Sabour et al. 2024
  kLu,           // evenly in log σ at whole timesteps; Lu et al. 2022, "DPM-Solver"
};

// Which published table of Align Your Steps.
enum class AysTable { kSd15, kSdxl };

struct NoiseScheduleConfig {
  int64_t train_steps = 1000;
  BetaSchedule betas = BetaSchedule::kScaledLinear;
  double beta_start = 0.00085, beta_end = 0.012;
  std::vector<float> trained_betas;  // instead of all that, where there are any: as many as train_steps
  Prediction prediction = Prediction::kEpsilon;
  // Absent: what diffusers' class of the sampler has by itself, linspace or leading.
  std::optional<TimestepSpacing> spacing;
  int64_t steps_offset = 0;  // added to leading timesteps
  // The level after DDIM's and PNDM's last step: 1, or ᾱ_0. Absent: 1 for DDIM, ᾱ_0 for PNDM.
  std::optional<bool> set_alpha_to_one;
  // Rescales betas so that the last training step is pure noise (Lin et al. 2023, §3.1).
  bool zero_terminal_snr = false;
  SigmaSchedule sigmas = SigmaSchedule::kDefault;
};

class NoiseSchedule {
 public:
  static std::shared_ptr<const NoiseSchedule> Create(const NoiseScheduleConfig& config);

  const NoiseScheduleConfig& config() const { return config_; }
  // ᾱ_t; with a zero terminal SNR the last one is 0.
  double AlphaBar(int64_t t) const { return alpha_bars_[static_cast<size_t>(t)]; }
  // σ_t by t; with a zero terminal SNR the last one is that of ᾱ = 2⁻²⁴.
  const std::vector<float>& sigmas() const { return sigmas_; }
  // σ at a broken timestep, between its neighbours; ends are continued.
  double SigmaAt(double timestep) const;
  // The broken timestep of a level, by interpolation in log σ; in [0, T − 1].
  double TimestepOf(double sigma) const;

 private:
  NoiseSchedule() = default;

  NoiseScheduleConfig config_;
  std::vector<float> alpha_bars_;
  std::vector<float> sigmas_;
  std::vector<float> log_sigmas_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_NOISE_SCHEDULE_H_
