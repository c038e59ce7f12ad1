// The samplers by name, and what each of them can do.
#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "families/sampling/sampler.h"
#include "families/sampling/sampler_plan.h"
#include "families/sampling/scheduler_config.h"
#include "families/sampling/solver.h"

namespace latentd {
namespace {

using Space = PlanShape::Space;
using Stages = PlanShape::Stages;

struct Row {
  const char* name;
  const char* description;
  PlanShape shape;
  MakeSolver make;
  bool stochastic = false;
  bool has_karras_twin = false;  // NAME_k
  std::optional<double> eta;     // its default; absent: takes none
};

constexpr PlanShape Sigma(Stages stages) {
  PlanShape shape;
  shape.stages = stages;
  return shape;
}
constexpr PlanShape Kdpm2(Stages stages) {
  PlanShape shape = Sigma(stages);
  shape.rounds_karras = true;
  return shape;
}
constexpr PlanShape KarrasByItself(Stages stages) {
  PlanShape shape = Sigma(stages);
  shape.karras_by_itself = true;
  return shape;
}
constexpr PlanShape Preserving() {
  PlanShape shape;
  shape.space = Space::kPreserving;
  return shape;
}
constexpr PlanShape Multistep() {
  PlanShape shape = Preserving();
  shape.floors_cosine = true;
  return shape;
}
constexpr PlanShape SingleStep() {
  PlanShape shape = Preserving();
  shape.only_linspace = true;
  return shape;
}
constexpr PlanShape EndsInList(bool above_zero) {
  PlanShape shape = Preserving();
  shape.ends_in_list = true;
  shape.ends_above_zero = above_zero;
  return shape;
}
constexpr PlanShape AlphaBar(Stages stages) {
  PlanShape shape = Sigma(stages);
  shape.space = Space::kAlphaBar;
  return shape;
}
constexpr PlanShape Consistency() {
  PlanShape shape;
  shape.space = Space::kConsistency;
  return shape;
}

const std::vector<Row>& Rows() {
  static const auto* rows = new std::vector<Row>{
      {"ddim", "DDIM", AlphaBar(Stages::kOne), MakeDdim, false, false, 0.0},
      {"ddpm", "DDPM, ancestral", AlphaBar(Stages::kOne), MakeDdpm, true, false, {}},
      {"deis", "DEIS, multistep of order 2", EndsInList(true), MakeDeis, false, true, {}},
      {"lms", "linear multistep of order 4", KarrasByItself(Stages::kOne), MakeLms, false, true, {}},
      {"pndm", "PNDM, linear multistep", AlphaBar(Stages::kRepeatedFirst), MakePndm, false, false, {}},
      {"heun", "Heun", Sigma(Stages::kNextLevel), MakeHeun, false, true, {}},
      {"euler", "Euler", Sigma(Stages::kOne), MakeEuler, false, true, {}},
      {"euler_a", "Euler, ancestral", Sigma(Stages::kOne), MakeEulerAncestral, true, false, {}},
      {"kdpm_2", "DPM2 of k-diffusion", Kdpm2(Stages::kMiddle), MakeKdpm2, false, true, {}},
      {"kdpm_2_a",
       "DPM2 of k-diffusion, ancestral",
       Kdpm2(Stages::kAncestralMiddle),
       MakeKdpm2Ancestral,
       true,
       true,
       {}},
      {"dpmpp_2s", "DPM-Solver++ of order 2, single step", SingleStep(), MakeDpmSingleStep, false, true, {}},
      {"dpmpp_2m", "DPM-Solver++ of order 2, multistep", Multistep(), MakeDpmMultistep, false, true, {}},
      {"dpmpp_2m_sde",
       "DPM-Solver++ of order 2, multistep, with noise",
       Multistep(),
       MakeDpmMultistep,
       true,
       true,
       {}},
      {"dpmpp_3m", "DPM-Solver++ of order 3, multistep", Multistep(), MakeDpmMultistep, false, true, {}},
      {"dpmpp_sde",
       "DPM-Solver++ with noise, two evaluations a step",
       KarrasByItself(Stages::kMiddle),
       MakeDpmSde,
       true,
       true,
       {}},
      {"er_sde", "extended reverse-time SDE of order 3", Preserving(), MakeErSde, true, false, {}},
      {"unipc", "UniPC of order 2", EndsInList(false), MakeUniPc, false, true, {}},
      {"lcm",
       "latent consistency, for models and LoRAs distilled for it",
       Consistency(),
       MakeLcm,
       true,
       false,
       {}},
      {"tcd", "trajectory consistency, for models and LoRAs distilled for it", Consistency(), MakeTcd, true,
       false, 0.3},
  };
  return *rows;
}

struct Found {
  const Row* row = nullptr;
  bool karras = false;
};

Found Find(absl::string_view name) {
  for (const Row& row : Rows()) {
    if (name == row.name) return {&row, false};
    if (row.has_karras_twin && name == absl::StrCat(row.name, "_k")) return {&row, true};
  }
  return {};
}

bool BySigma(const Row& row) {
  return row.shape.space == Space::kSigma || row.shape.space == Space::kPreserving;
}

SamplerInfo Info(const Row& row, bool karras, absl::string_view name, absl::string_view description) {
  SamplerInfo info;
  info.name = name;
  info.description = description;
  info.stochastic = row.stochastic;
  info.respaced = BySigma(row) && !karras;
  info.spaced = row.shape.space != Space::kConsistency && !karras;
  info.second_order = row.shape.stages == Stages::kNextLevel || row.shape.stages == Stages::kMiddle ||
                      row.shape.stages == Stages::kAncestralMiddle;
  return info;
}

std::string NamesThat(bool (*predicate)(const SamplerInfo&)) {
  std::vector<absl::string_view> names;
  for (const SamplerInfo& info : AllSamplers()) {
    if (predicate(info)) names.push_back(info.name);
  }
  return absl::StrJoin(names, ", ");
}

// Neither NaN nor out of [low, high].
bool Within(double value, double low, double high) { return value >= low && value <= high; }

absl::Status CheckSchedule(absl::string_view name, const Found& found, SigmaSchedule schedule) {
  if (schedule == SigmaSchedule::kDefault) return absl::OkStatus();
  const SamplerInfo info = Info(*found.row, found.karras, "", "");
  if (schedule == SigmaSchedule::kTrailing ? info.spaced : info.respaced) return absl::OkStatus();
  if (found.karras) {
    if (schedule == SigmaSchedule::kKarras) return absl::OkStatus();
    return FieldError("params.schedule", absl::StrCat("'", name, "' has the schedule 'karras'; use '",
                                                      found.row->name, "' for another"));
  }
  if (schedule == SigmaSchedule::kTrailing) {
    return FieldError("params.schedule",
                      absl::StrCat("'", name, "' has timesteps of its own; leave the schedule out"));
  }
  return FieldError("params.schedule",
                    absl::StrCat("'", name, "' runs on whole training timesteps; use 'trailing', or one of: ",
                                 NamesThat([](const SamplerInfo& i) { return i.respaced; })));
}

absl::Status CheckModel(absl::string_view name, const Row& row, Prediction prediction) {
  if (row.shape.stages != Stages::kRepeatedFirst || prediction != Prediction::kSample)
    return absl::OkStatus();
  return FieldError("params.sampler", absl::StrCat("'", name,
                                                   "' is not for models that predict the picture; use "
                                                   "'ddim' or 'euler'"));
}

// What EDM's models have no word for: cuts at training steps and other lists of levels.
absl::Status CheckEdm(const SamplerOptions& options) {
  for (const auto& [field, set] :
       {std::pair<const char*, bool>{"params.denoising_start", options.denoising_start.has_value()},
        {"params.denoising_end", options.denoising_end.has_value()}}) {
    if (set) return FieldError(field, "is a share of training steps, which this model (EDM) does not have");
  }
  const SigmaSchedule schedule = options.schedule;
  if (schedule == SigmaSchedule::kDefault || schedule == SigmaSchedule::kKarras ||
      schedule == SigmaSchedule::kExponential) {
    return absl::OkStatus();
  }
  return FieldError("params.schedule", "must be 'karras' or 'exponential' for this model (EDM)");
}

// From a level without a picture nothing leads to one but the velocity, or the picture itself.
absl::Status CheckLevels(absl::string_view name, const Row& row, const SamplerPlan& plan) {
  const bool divides = row.shape.stages == Stages::kRepeatedFirst ||
                       plan.schedule->config().prediction == Prediction::kEpsilon;
  for (int64_t i = plan.begin; divides && i < plan.end; ++i) {
    if (plan.evaluations[static_cast<size_t>(i)].level.alpha > 0) continue;
    return FieldError("params.sampler",
                      absl::StrCat("'", name,
                                   "' divides by the picture's share of the first level, which is 0 with "
                                   "this model's zero terminal SNR; use 'euler' or 'dpmpp_2m'"));
  }
  return absl::OkStatus();
}

absl::Status CheckRanges(absl::string_view name, const Row& row, const SamplerOptions& options) {
  if (!Within(options.strength, 0, 1) || options.strength == 0) {
    return FieldError("params.strength", "must be above 0 and at most 1");
  }
  for (const auto& [field, value] :
       {std::pair<const char*, std::optional<double>>{"params.denoising_start", options.denoising_start},
        {"params.denoising_end", options.denoising_end}}) {
    if (value && !Within(*value, 0, 1)) return FieldError(field, "must be from 0 to 1");
  }
  if (options.denoising_start && options.denoising_end &&
      *options.denoising_start >= *options.denoising_end) {
    return FieldError("params.denoising_end", "must be above denoising_start");
  }
  if (!options.eta) return absl::OkStatus();
  if (!row.eta) return FieldError("params.eta", absl::StrCat("'", name, "' takes none; 'ddim' and 'tcd' do"));
  return Within(*options.eta, 0, 1) ? absl::OkStatus() : FieldError("params.eta", "must be from 0 to 1");
}

}  // namespace

const std::vector<SamplerInfo>& AllSamplers() {
  static const auto* all = [] {
    static auto* strings = new std::deque<std::string>;  // keeps the twins' texts where they are
    auto* infos = new std::vector<SamplerInfo>;
    for (const Row& row : Rows()) {
      infos->push_back(Info(row, false, row.name, row.description));
      if (!row.has_karras_twin) continue;
      const std::string& name = strings->emplace_back(absl::StrCat(row.name, "_k"));
      const std::string& text = strings->emplace_back(absl::StrCat(row.description, "; Karras levels"));
      infos->push_back(Info(row, true, name, text));
    }
    return infos;
  }();
  return *all;
}

namespace {

constexpr std::pair<absl::string_view, SigmaSchedule> kScheduleNames[] = {
    {"karras", SigmaSchedule::kKarras},
    {"exponential", SigmaSchedule::kExponential},
    {"beta", SigmaSchedule::kBeta},
    {"trailing", SigmaSchedule::kTrailing},
    {"sgm_uniform", SigmaSchedule::kTrailing},
    {"simple", SigmaSchedule::kTrailing},
    {"ays", SigmaSchedule::kAys}};

}  // namespace

std::vector<absl::string_view> SigmaScheduleNames() {
  std::vector<absl::string_view> names;
  for (const auto& [name, schedule] : kScheduleNames) names.push_back(name);
  return names;
}

absl::StatusOr<SigmaSchedule> ParseSigmaSchedule(absl::string_view name, absl::string_view field) {
  if (name.empty()) return SigmaSchedule::kDefault;
  for (const auto& [text, schedule] : kScheduleNames) {
    if (text == name) return schedule;
  }
  return FieldError(
      field,
      absl::StrCat("'", name, "' is not known; there are: ", absl::StrJoin(SigmaScheduleNames(), ", ")));
}

absl::StatusOr<std::unique_ptr<Sampler>> MakeSampler(absl::string_view name,
                                                     std::shared_ptr<const NoiseSchedule> schedule,
                                                     const SamplerOptions& options) {
  const Found found = Find(name);
  if (found.row == nullptr) {
    return FieldError("params.sampler", absl::StrCat("'", name, "' is not known; there are: ",
                                                     NamesThat([](const SamplerInfo&) { return true; })));
  }
  const Row& row = *found.row;
  RETURN_IF_ERROR(CheckSchedule(name, found, options.schedule));
  RETURN_IF_ERROR(CheckModel(name, row, schedule->config().prediction));
  RETURN_IF_ERROR(CheckRanges(name, row, options));
  SamplerOptions planned = options;
  if (found.karras) planned.schedule = SigmaSchedule::kKarras;
  const SolverSettings solver = options.solver ? *options.solver : SettingsByName(row.name);
  if (solver.edm) RETURN_IF_ERROR(CheckEdm(planned));
  SolverInputs inputs;
  ASSIGN_OR_RETURN(inputs.plan, MakePlan(row.shape, std::move(schedule), solver, planned));
  RETURN_IF_ERROR(CheckLevels(name, row, *inputs.plan));
  inputs.noise = options.noise != nullptr ? options.noise : std::make_shared<NoiseSource>(0);
  inputs.eta = options.eta.value_or(row.eta.value_or(0));
  return row.make(inputs);
}

}  // namespace latentd
