#include "families/sampling/sampler_plan.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "families/sampling/sigma_list.h"

namespace latentd {
namespace {

using Space = PlanShape::Space;
using Stages = PlanShape::Stages;

Level AlphaBarLevel(const NoiseSchedule& schedule, double timestep) {
  const double bar = schedule.AlphaBar(static_cast<int64_t>(timestep));
  return {std::sqrt(bar), std::sqrt(1 - bar)};
}

Level LevelOf(Space space, const NoiseSchedule& schedule, double sigma, double timestep) {
  switch (space) {
    case Space::kSigma:
      return {1, sigma};
    case Space::kPreserving:
      return PreservingLevel(sigma);
    case Space::kAlphaBar:
    case Space::kConsistency:
      break;
  }
  return AlphaBarLevel(schedule, timestep);
}

bool IsRespaced(SigmaSchedule schedule) {
  return schedule != SigmaSchedule::kDefault && schedule != SigmaSchedule::kTrailing;
}

class PlanBuilder {
 public:
  PlanBuilder(const PlanShape& shape, std::shared_ptr<const NoiseSchedule> schedule,
              const SamplerOptions& options)
      : shape_(shape), options_(options), schedule_(*schedule), plan_(std::make_shared<SamplerPlan>()) {
    plan_->schedule = std::move(schedule);
  }

  absl::StatusOr<std::shared_ptr<const SamplerPlan>> Build() {
    RETURN_IF_ERROR(SetSteps());
    SetSigmas();
    const int64_t first = FirstStep();
    AddEvaluations(first);
    RETURN_IF_ERROR(SetWindow(first));
    return std::shared_ptr<const SamplerPlan>(std::move(plan_));
  }

 private:
  bool sigma_space() const { return shape_.space == Space::kSigma; }
  bool by_sigma() const { return sigma_space() || shape_.space == Space::kPreserving; }

  TimestepSpacing spacing() const {
    if (options_.schedule == SigmaSchedule::kTrailing) return TimestepSpacing::kTrailing;
    if (shape_.only_linspace) return TimestepSpacing::kLinspace;
    return schedule_.config().spacing.value_or(by_sigma() ? TimestepSpacing::kLinspace
                                                          : TimestepSpacing::kLeading);
  }

  SigmaSchedule sigma_schedule() const {
    if (!by_sigma()) return SigmaSchedule::kDefault;
    return options_.schedule == SigmaSchedule::kDefault ? schedule_.config().sigmas : options_.schedule;
  }

  absl::Status SetSteps() {
    const int64_t train = schedule_.config().train_steps;
    const bool consistency = shape_.space == Space::kConsistency;
    const int64_t most = consistency ? std::min(kConsistencySteps, train) : train - 1;
    if (options_.steps < 1 || options_.steps > most) {
      return FieldError("params.steps", absl::StrCat("must be from 1 to ", most, " for this sampler; it is ",
                                                     options_.steps));
    }
    if (consistency) {
      plan_->timesteps = ConsistencyTimesteps(train, options_.steps);
      return absl::OkStatus();
    }
    const int64_t points = options_.steps + (shape_.space == Space::kPreserving ? 1 : 0);
    plan_->timesteps = SpacedTimesteps(schedule_.config(), spacing(), options_.steps, points, sigma_space());
    if (plan_->timesteps.front() > static_cast<double>(train - 1)) {
      return FieldError("params.steps", absl::StrCat(options_.steps, " steps and an offset of ",
                                                     schedule_.config().steps_offset,
                                                     " are more than the model's ", train, " timesteps"));
    }
    return absl::OkStatus();
  }

  void SetSigmas() {
    std::vector<double>& sigmas = plan_->sigmas;
    std::vector<double>& timesteps = plan_->timesteps;
    const SigmaSchedule kind = sigma_schedule();
    const std::vector<float>& trained = schedule_.sigmas();
    if (!IsRespaced(kind)) {
      for (const double t : timesteps) sigmas.push_back(schedule_.SigmaAt(t));
    } else {
      if (kind == SigmaSchedule::kAys) {
        sigmas = AysSigmas(options_.ays, options_.steps);
      } else {
        // k-diffusion's solvers keep the ends of the spaced list, the others those of training.
        const double high = sigma_space() ? schedule_.SigmaAt(timesteps.front()) : trained.back();
        const double low = sigma_space() ? schedule_.SigmaAt(timesteps.back()) : trained.front();
        sigmas = RespacedSigmas(kind, high, low, options_.steps);
      }
      for (size_t i = 0; i < sigmas.size(); ++i) timesteps[i] = RespacedTimestep(kind, sigmas[i]);
    }
    const double last = !shape_.ends_above_zero ? 0 : IsRespaced(kind) ? sigmas.back() : trained.front();
    sigmas.push_back(last);
    for (double& sigma : sigmas) sigma = static_cast<float>(sigma);
    if (sigma_space()) {
      const double high = *std::max_element(sigmas.begin(), sigmas.end());
      plan_->initial_noise_scale = spacing() == TimestepSpacing::kLeading ? std::hypot(high, 1) : high;
    }
  }

  double RespacedTimestep(SigmaSchedule kind, double sigma) const {
    const double t = schedule_.TimestepOf(sigma);
    if (sigma_space()) return shape_.rounds_karras && kind == SigmaSchedule::kKarras ? std::nearbyint(t) : t;
    const bool rounded = kind == SigmaSchedule::kKarras || kind == SigmaSchedule::kAys;
    return rounded ? std::nearbyint(t) : std::floor(t);
  }

  // Where strength enters; a cut is made in the list of evaluations, but for PLMS, whose list begins with it.
  int64_t FirstStep() const {
    const int64_t steps = options_.steps;
    if (!options_.denoising_start) {
      return steps - std::min(static_cast<int64_t>(static_cast<double>(steps) * options_.strength), steps);
    }
    if (shape_.stages != Stages::kRepeatedFirst) return 0;
    const auto below = std::count_if(plan_->timesteps.begin(), plan_->timesteps.end(),
                                     [&](double t) { return t < Cutoff(*options_.denoising_start); });
    return steps - below;
  }

  double Cutoff(double share) const {
    const auto train = static_cast<double>(schedule_.config().train_steps);
    return std::nearbyint(train - share * train);
  }

  void Add(int64_t step, bool second, double sigma, double timestep) {
    Evaluation e;
    e.timestep = timestep;
    e.level = LevelOf(shape_.space, schedule_, sigma, timestep);
    e.step = step;
    e.second = second;
    plan_->evaluations.push_back(e);
  }

  void AddEvaluations(int64_t first) {
    const std::vector<double>& sigmas = plan_->sigmas;
    const std::vector<double>& timesteps = plan_->timesteps;
    const int64_t steps = options_.steps;
    const bool plms = shape_.stages == Stages::kRepeatedFirst;
    for (int64_t step = plms ? first : 0; step < steps; ++step) {
      const auto i = static_cast<size_t>(step);
      Add(step, false, sigmas[i], timesteps[i]);
      if (step + 1 == steps) break;
      if (shape_.stages == Stages::kNextLevel || (plms && step == first)) {
        Add(step, true, sigmas[i + 1], timesteps[i + 1]);
      } else if (shape_.stages == Stages::kMiddle || shape_.stages == Stages::kAncestralMiddle) {
        const bool ancestral = shape_.stages == Stages::kAncestralMiddle;
        const double to = ancestral ? SplitAncestral(sigmas[i], sigmas[i + 1]).down : sigmas[i + 1];
        const double middle = LogMiddle(sigmas[i], to);
        Add(step, true, middle, schedule_.TimestepOf(middle));
      }
    }
    plan_->final_level = Level{};
  }

  absl::Status SetWindow(int64_t first) {
    std::vector<Evaluation>& list = plan_->evaluations;
    const auto size = static_cast<int64_t>(list.size());
    const bool pairs = shape_.stages == Stages::kNextLevel || shape_.stages == Stages::kMiddle ||
                       shape_.stages == Stages::kAncestralMiddle;
    int64_t begin =
        std::find_if(list.begin(), list.end(), [&](const Evaluation& e) { return e.step >= first; }) -
        list.begin();
    if (options_.denoising_start && shape_.stages != Stages::kRepeatedFirst) {
      int64_t run = Count(0, size, [&](double t) { return t < Cutoff(*options_.denoising_start); });
      if (pairs && run % 2 == 0) ++run;  // never between the two evaluations of a step
      begin = size - run;
    }
    int64_t end = size;
    if (options_.denoising_end && *options_.denoising_end < 1) {
      end = begin + Count(begin, size, [&](double t) { return t >= Cutoff(*options_.denoising_end); });
    }
    if (begin >= end) {
      const char* field = options_.denoising_end && begin < size ? "params.denoising_end"
                          : options_.denoising_start             ? "params.denoising_start"
                                                                 : "params.strength";
      return FieldError(field, absl::StrCat("leaves none of ", options_.steps, " steps to run"));
    }
    for (int64_t i = begin; i < end; ++i) {
      Evaluation& e = list[static_cast<size_t>(i)];
      e.ends_step = i + 1 == end || list[static_cast<size_t>(i) + 1].step != e.step;
    }
    plan_->begin = begin;
    plan_->end = end;
    return absl::OkStatus();
  }

  template <typename Predicate>
  int64_t Count(int64_t begin, int64_t end, const Predicate& predicate) const {
    return std::count_if(plan_->evaluations.begin() + begin, plan_->evaluations.begin() + end,
                         [&](const Evaluation& e) { return predicate(e.timestep); });
  }

  const PlanShape& shape_;
  const SamplerOptions& options_;
  const NoiseSchedule& schedule_;
  std::shared_ptr<SamplerPlan> plan_;
};

}  // namespace

Level PreservingLevel(double sigma) {
  const double alpha = 1 / std::sqrt(sigma * sigma + 1);
  return {alpha, sigma * alpha};
}

const Level& SamplerPlan::LevelBefore(int64_t evaluation) const {
  const auto i = static_cast<size_t>(evaluation);
  return i < evaluations.size() ? evaluations[i].level : final_level;
}

AncestralSplit SplitAncestral(double sigma, double next) {
  // In this form nothing cancels: up² + down² = next², and down = next²/sigma.
  const double down = next * next / sigma;
  return {down, std::sqrt(std::max(next * next - down * down, 0.0))};
}

double LogMiddle(double a, double b) { return a > 0 && b > 0 ? std::sqrt(a * b) : 0; }

absl::StatusOr<std::shared_ptr<const SamplerPlan>> MakePlan(const PlanShape& shape,
                                                            std::shared_ptr<const NoiseSchedule> schedule,
                                                            const SamplerOptions& options) {
  return PlanBuilder(shape, std::move(schedule), options).Build();
}

}  // namespace latentd
