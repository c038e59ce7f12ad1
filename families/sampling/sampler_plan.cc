#include "families/sampling/sampler_plan.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
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
              const SolverSettings& solver, const SamplerOptions& options)
      : shape_(shape),
        options_(options),
        schedule_(*schedule),
        solver_(solver),
        plan_(std::make_shared<SamplerPlan>()) {
    plan_->schedule = std::move(schedule);
    plan_->solver = solver;
    plan_->highest = schedule_.sigmas().back();
  }

  absl::StatusOr<std::shared_ptr<const SamplerPlan>> Build() {
    if (solver_.edm) {
      RETURN_IF_ERROR(CheckSteps(schedule_.config().train_steps - 1));
      SetEdm(*solver_.edm);
    } else {
      RETURN_IF_ERROR(SetSteps());
      SetSigmas();
    }
    AddEvaluations();
    RETURN_IF_ERROR(SetWindow(FirstStep()));
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

  absl::Status CheckSteps(int64_t most) const {
    if (options_.steps >= 1 && options_.steps <= most) return absl::OkStatus();
    return FieldError("params.steps",
                      absl::StrCat("must be from 1 to ", most, " for this sampler; it is ", options_.steps));
  }

  absl::Status SetSteps() {
    NoiseScheduleConfig config = schedule_.config();
    const int64_t train = config.train_steps;
    const bool consistency = shape_.space == Space::kConsistency;
    RETURN_IF_ERROR(CheckSteps(consistency ? std::min(solver_.original_steps, train) : train - 1));
    if (consistency) {
      plan_->timesteps = ConsistencyTimesteps(train, solver_.original_steps, options_.steps);
      return absl::OkStatus();
    }
    const int64_t points = options_.steps + (shape_.space == Space::kPreserving ? 1 : 0);
    config.train_steps -= StepsAbove(solver_.lambda_min);
    plan_->timesteps = SpacedTimesteps(config, spacing(), options_.steps, points, sigma_space());
    if (plan_->timesteps.front() > static_cast<double>(train - 1)) {
      return FieldError("params.steps", absl::StrCat(options_.steps, " steps and an offset of ",
                                                     schedule_.config().steps_offset,
                                                     " are more than the model's ", train, " timesteps"));
    }
    return absl::OkStatus();
  }

  // Training steps of more noise than e^−λ.
  int64_t StepsAbove(double lambda) const {
    const std::vector<float>& sigmas = schedule_.sigmas();
    return std::count_if(sigmas.begin(), sigmas.end(),
                         [&](float sigma) { return -std::log(sigma) < lambda; });
  }

  // Karras et al. 2022, eq. 5, and table 1's c_noise.
  void SetEdm(const EdmSettings& edm) {
    const bool exponential = options_.schedule == SigmaSchedule::kDefault
                                 ? edm.exponential
                                 : options_.schedule == SigmaSchedule::kExponential;
    plan_->sigmas = RespacedSigmas(exponential ? SigmaSchedule::kExponential : SigmaSchedule::kKarras,
                                   edm.sigma_max, edm.sigma_min, options_.steps, edm.rho);
    EndSigmas(plan_->sigmas.back());
    for (size_t i = 0; i + 1 < plan_->sigmas.size(); ++i) {
      plan_->timesteps.push_back(std::log(plan_->sigmas[i]) / 4);
    }
    plan_->deviation = edm.data;
    plan_->highest = edm.sigma_max;
    plan_->initial_noise_scale = std::hypot(edm.sigma_max, 1);
  }

  void EndSigmas(double above_zero) {
    plan_->sigmas.push_back(shape_.ends_above_zero || solver_.ends_above_zero ? above_zero : 0);
    for (double& sigma : plan_->sigmas) sigma = static_cast<float>(sigma);
  }

  void SetSigmas() {
    std::vector<double>& sigmas = plan_->sigmas;
    std::vector<double>& timesteps = plan_->timesteps;
    const SigmaSchedule kind = sigma_schedule();
    const std::vector<float>& trained = schedule_.sigmas();
    const bool log_linear = solver_.log_linear && sigma_space();
    if (kind == SigmaSchedule::kAys) {
      sigmas = AysSigmas(options_.ays, options_.steps);
    } else if (IsRespaced(kind)) {
      // k-diffusion's solvers keep the ends of the spaced list, the others those of training.
      const bool spaced = sigma_space() && !log_linear;
      double high = spaced ? schedule_.SigmaAt(timesteps.front()) : trained.back();
      double low = spaced ? schedule_.SigmaAt(timesteps.back()) : trained.front();
      if (!(shape_.karras_by_itself && kind == SigmaSchedule::kKarras) && kind != SigmaSchedule::kLu) {
        high = solver_.sigma_max.value_or(high);
        low = solver_.sigma_min.value_or(low);
      }
      sigmas = RespacedSigmas(kind, high, low, options_.steps);
    } else if (log_linear) {  // one more level than steps, so the last of them is where the run ends
      sigmas =
          RespacedSigmas(SigmaSchedule::kExponential, trained.back(), trained.front(), options_.steps + 1);
    } else {
      for (const double t : timesteps) sigmas.push_back(schedule_.SigmaAt(t));
    }
    if (IsRespaced(kind)) {
      for (size_t i = 0; i < sigmas.size(); ++i) timesteps[i] = RespacedTimestep(kind, sigmas[i]);
    }
    EndSigmas(shape_.ends_in_list && IsRespaced(kind) ? sigmas.back() : trained.front());
    sigmas.resize(timesteps.size() + 1);
    if (solver_.continuous && sigma_space()) {
      for (size_t i = 0; i < timesteps.size(); ++i) timesteps[i] = std::log(sigmas[i]) / 4;
    }
    if (sigma_space()) {
      const double high = *std::max_element(sigmas.begin(), sigmas.end());
      plan_->initial_noise_scale = spacing() == TimestepSpacing::kLeading ? std::hypot(high, 1) : high;
    }
  }

  double RespacedTimestep(SigmaSchedule kind, double sigma) const {
    const double t = schedule_.TimestepOf(sigma);
    if (sigma_space()) return shape_.rounds_karras && kind == SigmaSchedule::kKarras ? std::nearbyint(t) : t;
    bool rounded = kind == SigmaSchedule::kKarras || kind == SigmaSchedule::kLu;
    if (shape_.floors_cosine && schedule_.config().betas == BetaSchedule::kSquaredCosine) rounded = false;
    return rounded || kind == SigmaSchedule::kAys ? std::nearbyint(t) : std::floor(t);
  }

  // Where strength enters; a cut is made in the list of evaluations.
  int64_t FirstStep() const {
    const int64_t steps = options_.steps;
    if (options_.denoising_start) return 0;
    return steps - std::min(static_cast<int64_t>(static_cast<double>(steps) * options_.strength), steps);
  }

  double Cutoff(double share) const {
    const auto train = static_cast<double>(schedule_.config().train_steps);
    return std::nearbyint(train - share * train);
  }

  void Add(int64_t step, bool second, double sigma, double timestep) {
    Evaluation e;
    e.timestep = timestep;
    e.level = solver_.edm ? Level{1, sigma} : LevelOf(shape_.space, schedule_, sigma, timestep);
    e.noised = e.level;
    e.step = step;
    e.second = second;
    plan_->evaluations.push_back(e);
  }

  void AddEvaluations() {
    const std::vector<double>& sigmas = plan_->sigmas;
    const std::vector<double>& timesteps = plan_->timesteps;
    const int64_t steps = options_.steps;
    for (int64_t step = 0; step < steps; ++step) {
      const auto i = static_cast<size_t>(step);
      Add(step, false, sigmas[i], timesteps[i]);
      if (shape_.stages == Stages::kRepeatedFirst && step == 1) Add(step, false, sigmas[i], timesteps[i]);
      if (step + 1 == steps) break;
      if (shape_.stages == Stages::kNextLevel) {
        Add(step, true, sigmas[i + 1], timesteps[i + 1]);
      } else if (shape_.stages == Stages::kMiddle || shape_.stages == Stages::kAncestralMiddle) {
        const bool ancestral = shape_.stages == Stages::kAncestralMiddle;
        const double to = ancestral ? SplitAncestral(sigmas[i], sigmas[i + 1]).down : sigmas[i + 1];
        const double middle = LogMiddle(sigmas[i], to);
        Add(step, true, middle, schedule_.TimestepOf(middle));
        plan_->evaluations.back().noised = {1, sigmas[i + 1]};
      }
    }
    plan_->final_level = Level{};
  }

  // Where a run enters the list of PLMS, it begins with its two evaluations of one step.
  void RenumberSteps(int64_t begin) {
    const auto size = static_cast<int64_t>(plan_->evaluations.size());
    for (int64_t i = begin; i < size; ++i) {
      Evaluation& e = plan_->evaluations[static_cast<size_t>(i)];
      e.step = std::max<int64_t>(i - begin - 1, 0);
      e.second = i == begin + 1;
    }
  }

  absl::Status SetWindow(int64_t first) {
    std::vector<Evaluation>& list = plan_->evaluations;
    const auto size = static_cast<int64_t>(list.size());
    const bool pairs = shape_.stages == Stages::kNextLevel || shape_.stages == Stages::kMiddle ||
                       shape_.stages == Stages::kAncestralMiddle;
    const bool plms = shape_.stages == Stages::kRepeatedFirst;
    int64_t begin =
        std::find_if(list.begin(), list.end(), [&](const Evaluation& e) { return e.step >= first; }) -
        list.begin();
    if (plms && first < options_.steps) begin = first;
    if (options_.denoising_start) {
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
    if (plms) RenumberSteps(begin);
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
  const SolverSettings& solver_;
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

const Level& SamplerPlan::NoisedBefore(int64_t evaluation) const {
  const auto i = static_cast<size_t>(evaluation);
  return i < evaluations.size() ? evaluations[i].noised : final_level;
}

Level SamplerPlan::LevelAt(double sigma) const {
  return solver.edm ? Level{1, sigma} : PreservingLevel(sigma);
}

AncestralSplit SplitAncestral(double sigma, double next) {
  // In this form nothing cancels: up² + down² = next², and down = next²/sigma.
  const double down = next * next / sigma;
  return {down, std::sqrt(std::max(next * next - down * down, 0.0))};
}

double LogMiddle(double a, double b) { return a > 0 && b > 0 ? std::sqrt(a * b) : 0; }

absl::StatusOr<std::shared_ptr<const SamplerPlan>> MakePlan(const PlanShape& shape,
                                                            std::shared_ptr<const NoiseSchedule> schedule,
                                                            const SolverSettings& solver,
                                                            const SamplerOptions& options) {
  return PlanBuilder(shape, std::move(schedule), solver, options).Build();
}

}  // namespace latentd
