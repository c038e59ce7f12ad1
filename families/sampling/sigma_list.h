// Lists of timesteps and noise levels for a number of steps. Numbers are those of diffusers' schedulers.
//
// Pure functions; any thread. σ is noise over picture (noise_schedule.h), t a training timestep; lists go
// from noise to picture.
#ifndef LATENTD_FAMILIES_SAMPLING_SIGMA_LIST_H_
#define LATENTD_FAMILIES_SAMPLING_SIGMA_LIST_H_

#include <cstdint>
#include <vector>

#include "families/sampling/noise_schedule.h"

namespace latentd {

// `steps` timesteps over the whole training range, Lin et al. 2023, table 2. Whole numbers unless `broken`,
// which leaves those of linspace as they fall. `points` is what the range is divided for: steps, or steps + 1
// for solvers that keep the last point for the end of the run. REQUIRES: 1 <= steps <= points <= T.
std::vector<double> SpacedTimesteps(const NoiseScheduleConfig& config, TimestepSpacing spacing, int64_t steps,
                                    int64_t points, bool broken);

// `steps` levels from `high` to `low`. `rho` is that of Karras levels. REQUIRES: `schedule` is kKarras,
// kExponential, kLu or kBeta; high > low > 0.
std::vector<double> RespacedSigmas(SigmaSchedule schedule, double high, double low, int64_t steps,
                                   double rho = 7);

// The first `steps` levels of the published table of ten steps; other numbers by interpolation in log σ.
std::vector<double> AysSigmas(AysTable table, int64_t steps);

// Timesteps of consistency distillation: `steps` of the `original` ones that a model was distilled at. Luo et
// al. 2023, "Latent Consistency Models", §4.3. REQUIRES: 1 <= steps <= original <= train_steps.
std::vector<double> ConsistencyTimesteps(int64_t train_steps, int64_t original, int64_t steps);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_SIGMA_LIST_H_
