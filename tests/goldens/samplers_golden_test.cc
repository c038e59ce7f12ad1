// Samplers against diffusers' schedulers, evaluation by evaluation, with the same draws of noise.
#include <algorithm>
#include <cmath>
#include <map>

#include "ATen/ATen.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "families/sampling/guidance.h"
#include "families/sampling/sampler.h"
#include "families/sampling/scheduler_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

// What both sides round differently in a case that forgives it, and how much more than the oracle's own
// wobble (samplers.py) a case that does not may be off. The wobble is the largest of few tries, not a bound.
constexpr double kTolerance = 1e-4;
constexpr double kWobbles = 4;

at::Tensor Network(const at::Tensor& x, double t) { return x * 0.6 + 0.3 * std::sin(t); }

using Settings = std::map<std::string, std::string>;

std::optional<double> Number(const Settings& settings, const char* key) {
  const auto it = settings.find(key);
  double value = 0;
  if (it == settings.end() || !absl::SimpleAtod(it->second, &value)) return std::nullopt;
  return value;
}

// The largest differences of one sampler's cases.
struct Errors {
  void Add(double& worst, double error, const std::string& what) {
    EXPECT_LE(error, tolerance) << what;
    worst = std::max(worst, error);
    of_tolerance = std::max(of_tolerance, error / tolerance);
  }

  double tolerance = kTolerance;  // of the case
  double of_tolerance = 0;
  double timesteps = 0, sigmas = 0, scale = 0, start = 0, noised = 0, prediction = 0, x = 0;
};

SamplerOptions OptionsOf(const Settings& settings, bool twin) {
  SamplerOptions options;
  options.steps = static_cast<int64_t>(Number(settings, "steps").value());
  const auto schedule = settings.find("schedule");
  if (schedule != settings.end() && !twin) {
    options.schedule = ParseSigmaSchedule(schedule->second, "params.schedule").value();
  }
  if (settings.count("table") && settings.at("table") == "XL") options.ays = AysTable::kSdxl;
  options.strength = Number(settings, "strength").value_or(1);
  options.denoising_start = Number(settings, "start");
  options.denoising_end = Number(settings, "end");
  options.eta = Number(settings, "eta");
  options.noise = std::make_shared<NoiseSource>(static_cast<uint64_t>(options.steps));
  for (int i = 0; i < 3; ++i) options.noise->Draw({1, 2, 3, 4});  // the case's own three
  return options;
}

void Compare(const Golden& golden, const std::string& prefix, const std::string& name,
             const std::string& what, const SamplerOptions& options, const NoiseSchedule& schedule,
             Sampler& sampler, Errors& worst) {
  const at::Tensor timesteps = golden[prefix + "timesteps"], sigmas = golden[prefix + "sigmas"];
  const at::Tensor x_seen = golden[prefix + "x"], noised = golden[prefix + "noised"];
  const at::Tensor picture = golden[prefix + "picture"], noise = golden[prefix + "noise"];
  ASSERT_EQ(sampler.evaluation_count(), timesteps.size(0)) << what;
  ASSERT_LE(sampler.step_count(), options.steps) << what;
  worst.Add(worst.scale,
            std::abs(sampler.initial_noise_scale() / golden[prefix + "scale"].item<double>() - 1), what);
  worst.Add(worst.start, RelativeError(sampler.AddNoise(picture, noise), golden[prefix + "start"][0]), what);

  const bool whole =
      sampler.step_count() == options.steps && options.strength == 1 && !options.denoising_start;
  at::Tensor x = whole || (options.strength == 1 && !options.denoising_start)
                     ? golden[prefix + "first"] * sampler.initial_noise_scale()
                     : sampler.AddNoise(picture, noise);
  int64_t steps = 0;
  for (int64_t i = 0; !sampler.done(); ++i) {
    ASSERT_EQ(sampler.evaluations_done(), i);
    ASSERT_EQ(sampler.steps_done(), steps);
    const std::string at = absl::StrCat(what, ", evaluation ", i);
    const double t = sampler.timestep();
    worst.Add(worst.timesteps, std::abs(t - timesteps[i].item<double>()) / schedule.config().train_steps, at);
    worst.Add(worst.sigmas, std::abs(sampler.sigma() / sigmas[i].item<double>() - 1), at);
    const bool ends = sampler.ends_step();
    x = sampler.Step(Network(sampler.ScaleInput(x), t), x);
    steps += ends ? 1 : 0;
    worst.Add(worst.x, RelativeError(x, x_seen[i]), at);
    if (golden.Has(prefix + "prediction")) {
      worst.Add(worst.prediction, RelativeError(sampler.prediction(), golden[prefix + "prediction"][i]), at);
    }
    if (!sampler.done() || !options.denoising_end) {
      worst.Add(worst.noised, RelativeError(sampler.AddNoise(picture, noise), noised[i]), at);
    }
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_EQ(steps, sampler.step_count()) << name;
}

bool Known(const std::string& name) {
  const std::vector<SamplerInfo>& all = AllSamplers();
  return std::any_of(all.begin(), all.end(), [&](const SamplerInfo& info) { return info.name == name; });
}

class SamplerGolden : public testing::TestWithParam<std::string> {};

TEST_P(SamplerGolden, EveryEvaluationIsThatOfDiffusers) {
  const c10::InferenceMode inference;
  const std::string name = GetParam();
  const Golden golden("sampler-" + name);
  Errors worst;
  int64_t count = 0;
  const std::vector<std::string> rows = absl::StrSplit(golden.Setting("cases"), ';');
  for (size_t i = 0; i < rows.size(); ++i) {
    Settings settings;
    for (absl::string_view pair : absl::StrSplit(rows[i], ',')) {
      settings.insert(std::pair<std::string, std::string>(absl::StrSplit(pair, absl::MaxSplits('=', 1))));
    }
    SchedulerSource source;
    source.path = GoldenPath(absl::StrCat("noise-schedules/", settings["model"], ".json"));
    source.class_name = "EulerDiscreteScheduler";
    const auto config = SchedulerConfig::Load(source);
    ASSERT_TRUE(config.ok()) << config.status();
    const auto model = (*config)->For(name);
    ASSERT_TRUE(model.ok()) << model.status();
    worst.tolerance = kTolerance + kWobbles * golden[absl::StrCat(i, ".wobble")].item<double>();
    for (const std::string& called : {name, name + "_k"}) {
      const bool twin = called != name;
      if (twin && (settings["schedule"] != "karras" || !Known(called))) continue;
      SamplerOptions options = OptionsOf(settings, twin);
      options.solver = model->solver;
      auto sampler = MakeSampler(called, model->schedule, options);
      ASSERT_TRUE(sampler.ok()) << rows[i] << ": " << sampler.status();
      Compare(golden, absl::StrCat(i, "."), called, called + ": " + rows[i], options, *model->schedule,
              **sampler, worst);
      if (HasFailure()) return;
      ++count;
    }
  }
  EXPECT_GE(count, 25);
  Report(name + " timesteps", worst.timesteps);
  Report(name + " sigmas", worst.sigmas);
  Report(name + " noised", std::max(worst.noised, worst.start));
  Report(name + " prediction", worst.prediction);
  Report(name + " x", worst.x);
  Report(name + " share of a case's tolerance", worst.of_tolerance);
}

std::vector<std::string> BaseNames() {
  std::vector<std::string> names;
  for (const SamplerInfo& info : AllSamplers()) {
    if (info.name.size() < 2 || info.name.substr(info.name.size() - 2) != "_k") names.emplace_back(info.name);
  }
  return names;
}
INSTANTIATE_TEST_SUITE_P(All, SamplerGolden, testing::ValuesIn(BaseNames()),
                         [](const auto& info) { return info.param; });

TEST(GuidanceGolden, DeviationIsBroughtBackAsByDiffusers) {
  const Golden golden("guidance");
  const at::Tensor guided = Guide(golden["positive"], golden["negative"], 7.5);
  EXPECT_LE(RelativeError(guided, golden["guided"]), 1e-6);
  EXPECT_LE(RelativeError(GuidanceRescale(guided, golden["positive"], 0.7), golden["rescaled"]), 1e-6);
  EXPECT_TRUE(at::equal(GuidanceRescale(guided, golden["positive"], 0), guided));
}

}  // namespace
}  // namespace latentd
