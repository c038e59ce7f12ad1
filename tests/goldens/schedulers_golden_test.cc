// Models' scheduler configs against diffusers: every class and setting that it saves is drawn as by
// diffusers, or refused by name (schedulers.py).
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "ATen/ATen.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cache/base/error.h"
#include "families/sampling/sampler.h"
#include "families/sd/sd_open.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

// What both sides round differently, and how much more than the oracle's own wobble (samplers.py).
constexpr double kTolerance = 1e-4;
constexpr double kWobbles = 4;

// A timestep of a level that is cut off or rounded may lie on the edge between two, and an edge falls to
// either side with kernels that round otherwise than those that the goldens were made with: of so few cases,
// and by so little.
constexpr double kEdgeShare = 0.005, kEdgeError = 0.1;

// What is refused of the classes that are served, and nothing else is: class, what the error names. Cases
// that diffusers cannot run either are not here.
const std::set<std::pair<std::string, std::string>>& Refused() {
  static const auto* refused = new std::set<std::pair<std::string, std::string>>{
      {"PNDMScheduler", "skip_prk_steps false"},
      {"DPMSolverMultistepScheduler", "use_flow_sigmas"},
      {"DPMSolverMultistepScheduler", "lambda_min_clipped with timestep_spacing trailing"},
      {"DPMSolverMultistepScheduler", "prediction_type flow_prediction"},
      {"DPMSolverMultistepScheduler", "solver_order 4"},
      {"DPMSolverMultistepScheduler", "variance_type learned"},
      {"DPMSolverMultistepScheduler", "variance_type learned_range"},
      {"DPMSolverSinglestepScheduler", "use_flow_sigmas"},
      {"DPMSolverSinglestepScheduler", "prediction_type flow_prediction"},
      {"DPMSolverSinglestepScheduler", "variance_type learned"},
      {"DPMSolverSinglestepScheduler", "variance_type learned_range"},
      {"DEISMultistepScheduler", "use_flow_sigmas"},
      {"DEISMultistepScheduler", "prediction_type flow_prediction"},
      {"DEISMultistepScheduler", "solver_order 4"},
      {"UniPCMultistepScheduler", "use_flow_sigmas"},
      {"UniPCMultistepScheduler", "prediction_type flow_prediction"},
      {"EDMDPMSolverMultistepScheduler", "solver_order 4"},
  };
  return *refused;
}

struct Case {
  std::string scheduler, folder, family, label, sampler, state;
  int64_t steps = 0;
  double strength = 0;  // 0: from noise

  explicit Case(absl::string_view row) {
    const std::vector<std::string> words = absl::StrSplit(row, '|');
    scheduler = words[0];
    folder = GoldenPath("sd-schedulers/" + words[1]);
    family = words[2];
    label = words[3];
    sampler = words[4];
    state = words[7];
    EXPECT_TRUE(absl::SimpleAtoi(words[5], &steps)) << row;
    EXPECT_TRUE(words[6].empty() || absl::SimpleAtod(words[6], &strength)) << row;
  }
  std::string what() const {
    return absl::StrCat(scheduler, sampler.empty() ? "" : " as " + sampler, ", ", family, ", ", steps,
                        " steps, ", label);
  }
};

absl::StatusOr<std::unique_ptr<Sampler>> Open(const Case& c) {
  const SdKind kind = c.family == "sd15" ? SdKind::kSd15 : SdKind::kSdxl;
  ASSIGN_OR_RETURN(const auto scheduler, ReadScheduler(nullptr, c.folder, kind));
  const std::string name = c.sampler.empty() ? scheduler->sampler() : c.sampler;
  ASSIGN_OR_RETURN(const SamplerSettings settings, scheduler->For(name));
  SamplerOptions options;
  options.steps = c.steps;
  options.solver = settings.solver;
  if (c.strength > 0) options.strength = c.strength;
  options.noise = std::make_shared<NoiseSource>(static_cast<uint64_t>(c.steps));
  for (int i = 0; i < 3; ++i) options.noise->Draw({1, 2, 3, 4});  // the case's own three
  return MakeSampler(name, settings.schedule, options);
}

// The largest difference of an evaluation; infinite where their number is another.
double Difference(const Golden& golden, const std::string& prefix, const Case& c, Sampler& sampler) {
  const at::Tensor seen = golden[prefix + "x"];
  if (sampler.evaluation_count() != seen.size(0)) return std::numeric_limits<double>::infinity();
  at::Tensor x = c.strength > 0 ? sampler.AddNoise(golden[prefix + "picture"], golden[prefix + "noise"])
                                : golden[prefix + "first"] * sampler.initial_noise_scale();
  double worst = 0;
  for (int64_t i = 0; !sampler.done(); ++i) {
    const double t = sampler.timestep();
    x = sampler.Step(sampler.ScaleInput(x) * 0.6 + 0.3 * std::sin(t), x);
    worst = std::max(worst, RelativeError(x, seen[i]));
  }
  return worst;
}

// Of a run that diffusers has no numbers of.
bool EndsFinite(const Case& c, Sampler& sampler) {
  const std::vector<at::Tensor> draws = DrawNoise(3, {1, 2, 3, 4}, 2);
  at::Tensor x =
      c.strength > 0 ? sampler.AddNoise(draws[0], draws[1]) : draws[0] * sampler.initial_noise_scale();
  while (!sampler.done()) x = sampler.Step(sampler.ScaleInput(x) * 0.6, x);
  return x.isfinite().all().item<bool>();
}

TEST(SchedulersGolden, EveryClassAndSettingIsDiffusersOrRefusedByName) {
  const c10::InferenceMode inference;
  const Golden golden("sd-schedulers");
  const std::vector<std::string> rows = absl::StrSplit(golden.Text("cases"), ';');
  std::set<std::pair<std::string, std::string>> met;
  std::set<std::string> served, refused_classes;
  int64_t equal = 0, refused = 0, neither = 0, only_here = 0;
  int64_t edges = 0;
  double worst = 0;
  const bool other_kernels = at::get_cpu_capability() != Golden("noise").Setting("capability");
  for (size_t i = 0; i < rows.size(); ++i) {
    const Case c(rows[i]);
    const std::string prefix = absl::StrCat(i, ".");
    auto sampler = Open(c);
    if (c.state == "refused") {  // a class that is not for SD
      EXPECT_EQ(ErrorReason(sampler.status()), "UNSUPPORTED_MODEL") << c.what();
      EXPECT_THAT(std::string(sampler.status().message()), testing::HasSubstr(c.scheduler));
      refused_classes.insert(c.scheduler);
      ++refused;
    } else if (c.state != "runs") {
      ++(sampler.ok() ? only_here : neither);
      EXPECT_TRUE(!sampler.ok() || EndsFinite(c, **sampler))
          << c.what() << ": " << c.state << " by diffusers";
    } else if (!sampler.ok()) {
      const ErrorDetails details = GetErrorDetails(sampler.status());
      const auto scheduler = details.find("scheduler"), what = details.find("what");
      if (scheduler == details.end() || what == details.end()) {
        ADD_FAILURE() << c.what() << ": " << sampler.status();
        continue;
      }
      EXPECT_EQ(ErrorReason(sampler.status()), "UNSUPPORTED_MODEL") << c.what();
      met.insert({scheduler->second, what->second});
      EXPECT_EQ(Refused().count({scheduler->second, what->second}), 1)
          << c.what() << ": " << sampler.status();
      ++refused;
    } else {
      const double error = Difference(golden, prefix, c, **sampler);
      // Some have no numbers when their levels are wrong by a rounding: those forgive nothing.
      const double wobble = golden[prefix + "wobble"].item<double>();
      const double tolerance = kTolerance + (std::isfinite(wobble) ? kWobbles * wobble : 0);
      if (error > tolerance && error < kEdgeError && other_kernels) {
        ++edges;
      } else {
        EXPECT_LE(error, tolerance) << c.what();
        worst = std::max(worst, error / tolerance);
      }
      served.insert(c.scheduler);
      ++equal;
    }
  }
  EXPECT_LE(static_cast<double>(edges), kEdgeShare * static_cast<double>(equal));
  EXPECT_EQ(met, Refused()) << "what is said to be refused is met, and refused";
  EXPECT_GE(served.size(), 20);
  EXPECT_GE(refused_classes.size(), 15);
  Report("schedulers, share of a case's tolerance", worst);
  std::cout << "schedulers: " << equal << " cases of " << served.size() << " classes equal, " << refused
            << " refused, of them " << refused_classes.size() << " whole classes; diffusers does not run "
            << neither + only_here << ", of which " << neither << " are refused here, too\n";
}

}  // namespace
}  // namespace latentd
