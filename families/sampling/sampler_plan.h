// What a run does, worked out before it starts: every evaluation with its timestep and level. Immutable,
// shared by a sampler and its clones.
#ifndef LATENTD_FAMILIES_SAMPLING_SAMPLER_PLAN_H_
#define LATENTD_FAMILIES_SAMPLING_SAMPLER_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "families/sampling/noise_schedule.h"
#include "families/sampling/sampler.h"
#include "families/sampling/solver_settings.h"

namespace latentd {

// x = alpha·picture + sigma·noise.
struct Level {
  double alpha = 1, sigma = 0;
};

// The level of σ in a space where α² + σ² = 1.
Level PreservingLevel(double sigma);

struct Evaluation {
  double timestep = 0;
  Level level;
  Level noised;         // of a picture that noise is added to here: the next one's, in the middle of a step
  int64_t step = 0;     // of the whole list
  bool second = false;  // of its step
  bool ends_step = false;
};

struct SamplerPlan {
  std::shared_ptr<const NoiseSchedule> schedule;
  SolverSettings solver;
  std::vector<double> timesteps;        // by step
  std::vector<double> sigmas;           // by step (σ/α), and the one after the last
  std::vector<Evaluation> evaluations;  // of the whole list
  Level final_level;                    // after all evaluations
  int64_t begin = 0, end = 0;           // the evaluations that are run
  double initial_noise_scale = 1;
  double highest = 0;    // σ/α that is told to those who ask: with a zero terminal SNR it has an end, too
  double deviation = 1;  // of pictures, as inputs are scaled

  int64_t steps() const { return static_cast<int64_t>(timesteps.size()); }
  const Level& LevelBefore(int64_t evaluation) const;
  const Level& NoisedBefore(int64_t evaluation) const;
  // The level of a σ of the list, for solvers in log σ.
  Level LevelAt(double sigma) const;
};

// What a solver's list looks like.
struct PlanShape {
  enum class Space {
    kSigma,        // x = picture + σ·noise: k-diffusion's. Broken timesteps
    kPreserving,   // α² + σ² = 1, levels by σ: DPM++'s. Whole timesteps, the last point is the run's end
    kAlphaBar,     // α² = ᾱ_t at whole timesteps: DDIM's
    kConsistency,  // as kAlphaBar, at the timesteps of LCM
  };
  enum class Stages {
    kOne,
    kNextLevel,        // second evaluation at the next level (Heun); none in the last step
    kMiddle,           // … at the middle of this and the next level in log σ; none in the last step
    kAncestralMiddle,  // … at the middle of this level and the one that noise is added to
    kRepeatedFirst,    // the list has its second level twice, and a run's first two evaluations are one step
                       // (PLMS)
  };
  Space space = Space::kSigma;
  Stages stages = Stages::kOne;
  bool rounds_karras = false;     // KDPM2's timesteps with Karras levels
  bool karras_by_itself = false;  // LMS and DPM++ SDE: Karras levels look at no sigma_min and sigma_max
  bool floors_cosine = false;     // DPM++ multistep: levels made anew fall to whole timesteps with such betas
  bool ends_above_zero = false;   // DEIS: the last level is not 0
  bool ends_in_list = false;      // DEIS and UniPC, that level: the list's own where it is made anew
  bool only_linspace = false;     // DPM++ 2S looks at no spacing
};

// REQUIRES: options were checked against the sampler's capabilities. Errors: INVALID_ARGUMENT INVALID_FIELD
// on params.steps, params.strength, params.denoising_start and params.denoising_end.
absl::StatusOr<std::shared_ptr<const SamplerPlan>> MakePlan(const PlanShape& shape,
                                                            std::shared_ptr<const NoiseSchedule> schedule,
                                                            const SolverSettings& solver,
                                                            const SamplerOptions& options);

// The part of σ' that an ancestral step adds as noise, and the rest. Karras et al. 2022, §4, as in
// k-diffusion.
struct AncestralSplit {
  double down = 0, up = 0;
};
AncestralSplit SplitAncestral(double sigma, double next);

// exp of the mean of logs; 0 when one of them is 0.
double LogMiddle(double a, double b);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_SAMPLER_PLAN_H_
