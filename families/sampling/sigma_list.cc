#include "families/sampling/sigma_list.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "families/sampling/beta_quantile.h"

namespace latentd {
namespace {

// The i-th of n points from 0 to 1; one point alone is 0.
double Ramp(int64_t i, int64_t n) { return n > 1 ? static_cast<double>(i) / static_cast<double>(n - 1) : 0; }

// The last level is the lowest of the tables, of which a run of that many steps never gets to see.
constexpr std::array<double, 11> kAysSd15 = {14.615, 6.475, 3.861, 2.697, 1.886, 1.396,
                                             0.963,  0.652, 0.399, 0.152, 0.029};
constexpr std::array<double, 11> kAysSdxl = {14.615, 6.315, 3.771, 2.181, 1.342, 0.862,
                                             0.555,  0.380, 0.234, 0.113, 0.029};

}  // namespace

std::vector<double> SpacedTimesteps(const NoiseScheduleConfig& config, TimestepSpacing spacing, int64_t steps,
                                    int64_t points, bool broken) {
  const auto train = static_cast<double>(config.train_steps);
  std::vector<double> timesteps;
  for (int64_t i = 0; i < steps; ++i) {
    double t = 0;
    switch (spacing) {
      case TimestepSpacing::kLinspace:
        // As NumPy multiplies: where a point is halfway between whole numbers, the last bit decides.
        t = i == 0 && points > 1 ? train - 1
                                 : static_cast<double>(points - 1 - i) *
                                       ((train - 1) / static_cast<double>(std::max<int64_t>(points - 1, 1)));
        t = broken ? static_cast<float>(t) : std::nearbyint(t);
        break;
      case TimestepSpacing::kLeading:
        t = static_cast<double>((points - 1 - i) * (config.train_steps / points) + config.steps_offset);
        break;
      case TimestepSpacing::kTrailing:  // reaches the lowest timestep without a point of its own
        t = std::nearbyint(train +
                           static_cast<double>(i) * ((train - train / static_cast<double>(steps)) - train)) -
            1;
        break;
    }
    timesteps.push_back(t);
  }
  return timesteps;
}

std::vector<double> RespacedSigmas(SigmaSchedule schedule, double high, double low, int64_t steps,
                                   double rho) {
  constexpr double kBetaShape = 0.6;
  std::vector<double> sigmas;
  for (int64_t i = 0; i < steps; ++i) {
    const double ramp = Ramp(i, steps);
    double sigma = 0;
    if (schedule == SigmaSchedule::kKarras) {
      const double from = std::pow(high, 1 / rho), to = std::pow(low, 1 / rho);
      sigma = std::pow(from + ramp * (to - from), rho);
    } else if (schedule == SigmaSchedule::kLu) {  // whose ends are fp32 numbers, and so at whole timesteps
      const double from = static_cast<float>(std::log(high)), to = static_cast<float>(std::log(low));
      sigma = std::exp(from + ramp * (to - from));
    } else if (schedule == SigmaSchedule::kExponential) {
      sigma = std::exp(std::log(high) + ramp * (std::log(low) - std::log(high)));
    } else {
      sigma = low + BetaQuantile(1 - ramp, kBetaShape, kBetaShape) * (high - low);
    }
    sigmas.push_back(sigma);
  }
  return sigmas;
}

std::vector<double> AysSigmas(AysTable table, int64_t steps) {
  const std::array<double, 11>& known = table == AysTable::kSdxl ? kAysSdxl : kAysSd15;
  std::vector<double> sigmas;
  for (int64_t i = 0; i < steps; ++i) {
    const double at = static_cast<double>(i * (known.size() - 1)) / static_cast<double>(steps);
    const auto low = static_cast<size_t>(at);
    const double w = at - static_cast<double>(low);
    sigmas.push_back(w == 0 ? known[low]
                            : std::exp((1 - w) * std::log(known[low]) + w * std::log(known[low + 1])));
  }
  return sigmas;
}

std::vector<double> ConsistencyTimesteps(int64_t train_steps, int64_t original, int64_t steps) {
  const int64_t stride = train_steps / original;
  std::vector<double> timesteps;
  for (int64_t i = 0; i < steps; ++i) {
    const auto skipped = static_cast<int64_t>(static_cast<double>(i) *
                                              (static_cast<double>(original) / static_cast<double>(steps)));
    timesteps.push_back(static_cast<double>((original - skipped) * stride - 1));
  }
  return timesteps;
}

}  // namespace latentd
