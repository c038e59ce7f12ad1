// What needs no oracle: errors, clones, noise. Numbers are compared with diffusers in tests/goldens.
#include "families/sampling/sampler.h"

#include <cmath>
#include <fstream>
#include <limits>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/sampling/beta_quantile.h"
#include "families/sampling/sampler_plan.h"
#include "families/sampling/scheduler_config.h"
#include "families/sampling/sigma_list.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::DoubleEq;
using testing::ElementsAre;
using testing::HasSubstr;

std::shared_ptr<const NoiseSchedule> Schedule(bool zero_snr = false,
                                              Prediction prediction = Prediction::kEpsilon) {
  NoiseScheduleConfig config;
  config.spacing = TimestepSpacing::kTrailing;
  config.zero_terminal_snr = zero_snr;
  config.prediction = prediction;
  return NoiseSchedule::Create(config);
}

SamplerOptions Steps(int64_t steps, uint64_t seed = 1) {
  SamplerOptions options;
  options.steps = steps;
  options.noise = std::make_shared<NoiseSource>(seed);
  return options;
}

std::unique_ptr<Sampler> Make(absl::string_view name, const SamplerOptions& options) {
  auto sampler = MakeSampler(name, Schedule(), options);
  EXPECT_TRUE(sampler.ok()) << name << ": " << sampler.status();
  return *std::move(sampler);
}

void ExpectFieldError(const absl::Status& status, const std::string& field, const std::string& text) {
  ASSERT_FALSE(status.ok()) << field;
  EXPECT_EQ(ErrorReason(status), "INVALID_FIELD");
  EXPECT_EQ(GetErrorDetails(status)["field"], field);
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}
void ExpectFieldError(const absl::StatusOr<std::unique_ptr<Sampler>>& sampler, const std::string& field,
                      const std::string& text) {
  ExpectFieldError(sampler.status(), field, text);
}

at::Tensor StepOnce(Sampler& sampler, const at::Tensor& x) {
  return sampler.Step(sampler.ScaleInput(x) * 0.6 + 0.3 * std::sin(sampler.timestep()), x);
}

at::Tensor Finish(Sampler& sampler, at::Tensor x) {
  while (!sampler.done()) x = StepOnce(sampler, x);
  return x;
}

TEST(SamplerTest, NamesAreThoseOfTheApi) {
  std::vector<std::string> names;
  for (const SamplerInfo& info : AllSamplers()) {
    names.emplace_back(info.name);
    EXPECT_FALSE(info.description.empty());
  }
  EXPECT_THAT(names,
              testing::UnorderedElementsAre(
                  "ddim", "ddpm", "deis", "deis_k", "lms", "lms_k", "pndm", "heun", "heun_k", "euler",
                  "euler_k", "euler_a", "kdpm_2", "kdpm_2_k", "kdpm_2_a", "kdpm_2_a_k", "dpmpp_2s",
                  "dpmpp_2s_k", "dpmpp_2m", "dpmpp_2m_k", "dpmpp_2m_sde", "dpmpp_2m_sde_k", "dpmpp_3m",
                  "dpmpp_3m_k", "dpmpp_sde", "dpmpp_sde_k", "er_sde", "unipc", "unipc_k", "lcm", "tcd"));
}

TEST(SamplerTest, WhatCannotBeRunIsRefusedWithWhatToUseInstead) {
  ExpectFieldError(MakeSampler("eulr", Schedule(), Steps(4)), "params.sampler", "dpmpp_2m_sde_k");
  SamplerOptions options = Steps(4);
  options.schedule = SigmaSchedule::kKarras;
  EXPECT_TRUE(MakeSampler("euler_k", Schedule(), options).ok());
  ExpectFieldError(MakeSampler("ddim", Schedule(), options), "params.schedule", "euler");
  ExpectFieldError(MakeSampler("lcm", Schedule(), options), "params.schedule", "euler");
  options.schedule = SigmaSchedule::kTrailing;
  EXPECT_TRUE(MakeSampler("ddim", Schedule(), options).ok());
  ExpectFieldError(MakeSampler("tcd", Schedule(), options), "params.schedule", "of its own");
  ExpectFieldError(MakeSampler("dpmpp_2m_k", Schedule(), options), "params.schedule", "use 'dpmpp_2m'");
  ExpectFieldError(MakeSampler("ddim", Schedule(true), Steps(4)), "params.sampler", "euler");
  EXPECT_TRUE(MakeSampler("ddim", Schedule(true, Prediction::kVelocity), Steps(4)).ok());
  EXPECT_TRUE(MakeSampler("euler", Schedule(true), Steps(4)).ok());
  ExpectFieldError(MakeSampler("pndm", Schedule(true, Prediction::kVelocity), Steps(4)), "params.sampler",
                   "euler");
  ExpectFieldError(MakeSampler("pndm", Schedule(false, Prediction::kSample), Steps(4)), "params.sampler",
                   "ddim");
  EXPECT_EQ(ErrorReason(ParseSigmaSchedule("karas", "params.schedule").status()), "INVALID_FIELD");
}

TEST(SamplerTest, RangesAreChecked) {
  for (const int64_t steps : {int64_t{0}, int64_t{-1}, int64_t{1000}, std::numeric_limits<int64_t>::max()}) {
    for (const SamplerInfo& info : AllSamplers()) {
      ExpectFieldError(MakeSampler(info.name, Schedule(), Steps(steps)), "params.steps", "from 1 to");
    }
  }
  ExpectFieldError(MakeSampler("lcm", Schedule(), Steps(51)), "params.steps", "1 to 50");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double strength : {0.0, -1.0, 1.01, nan}) {
    SamplerOptions options = Steps(4);
    options.strength = strength;
    ExpectFieldError(MakeSampler("euler", Schedule(), options), "params.strength", "at most 1");
  }
  SamplerOptions options = Steps(4);
  options.strength = 0.2;
  ExpectFieldError(MakeSampler("euler", Schedule(), options), "params.strength", "none of 4 steps");
  options = Steps(4);
  options.denoising_start = 1;
  ExpectFieldError(MakeSampler("euler", Schedule(), options), "params.denoising_start", "none of 4 steps");
  options.denoising_start = 0.5;
  options.denoising_end = 0.4;
  ExpectFieldError(MakeSampler("euler", Schedule(), options), "params.denoising_end", "above");
  options.denoising_end = nan;
  ExpectFieldError(MakeSampler("euler", Schedule(), options), "params.denoising_end", "0 to 1");
  options = Steps(4);
  options.eta = 0.5;
  ExpectFieldError(MakeSampler("euler", Schedule(), options), "params.eta", "ddim");
  options.eta = 2;
  ExpectFieldError(MakeSampler("ddim", Schedule(), options), "params.eta", "0 to 1");
}

TEST(SamplerTest, EverySamplerRunsEveryNumberOfStepsAndStaysFinite) {
  const at::Tensor noise = NoiseSource(3).Draw({1, 4, 3, 5});
  for (const SamplerInfo& info : AllSamplers()) {
    for (const int64_t steps : {1, 2, 3, 7, 50}) {
      auto sampler = Make(info.name, Steps(steps));
      EXPECT_EQ(sampler->step_count(), steps) << info.name;
      EXPECT_EQ(sampler->evaluation_count(), info.second_order                  ? 2 * steps - 1
                                             : info.name == "pndm" && steps > 1 ? steps + 1
                                                                                : steps);
      const at::Tensor x = Finish(*sampler, noise * sampler->initial_noise_scale());
      EXPECT_TRUE(x.isfinite().all().item<bool>()) << info.name << " " << steps;
      EXPECT_EQ(sampler->steps_done(), steps);
      EXPECT_EQ(sampler->sigma(), 0) << info.name;
      EXPECT_TRUE(at::equal(sampler->AddNoise(noise, noise), noise)) << "a whole run ends at the picture";
    }
  }
}

TEST(SamplerTest, ClonesGoTheirOwnWay) {
  const at::Tensor noise = NoiseSource(3).Draw({1, 4, 3, 5});
  for (const SamplerInfo& info : AllSamplers()) {
    auto sampler = Make(info.name, Steps(9));
    at::Tensor x = noise * sampler->initial_noise_scale();
    for (int i = 0; i < 4; ++i) x = StepOnce(*sampler, x);
    auto clone = sampler->Clone();
    auto other = sampler->Clone(std::make_shared<NoiseSource>(99));
    Finish(*other, x * -3);  // leaves no trace
    const at::Tensor end = Finish(*sampler, x);
    EXPECT_EQ(clone->evaluations_done(), 4);
    EXPECT_TRUE(at::equal(Finish(*clone, x), end)) << info.name;
  }
}

TEST(SamplerTest, OneSourceServesTilesInTurn) {
  auto source = std::make_shared<NoiseSource>(5);
  auto first = Make("euler_a", Steps(4));
  auto a = first->Clone(source), b = first->Clone(source);
  const at::Tensor x = NoiseSource(3).Draw({1, 4, 3, 5});
  const at::Tensor moved_a = StepOnce(*a, x), moved_b = StepOnce(*b, x);
  const std::vector<at::Tensor> draws = DrawNoise(5, {1, 4, 3, 5}, 2);
  EXPECT_LE(((moved_a - moved_b) / (draws[0] - draws[1])).std().item<double>(), 1e-3)
      << "each has its own draw";
}

TEST(SamplerTest, OneSeedGivesOnePictureAndAnotherAnother) {
  const at::Tensor noise = NoiseSource(3).Draw({1, 4, 3, 5});
  for (const SamplerInfo& info : AllSamplers()) {
    auto run = [&](uint64_t seed) {
      auto sampler = Make(info.name, Steps(5, seed));
      return Finish(*sampler, noise * sampler->initial_noise_scale());
    };
    const at::Tensor picture = run(7);
    EXPECT_TRUE(at::equal(run(7), picture)) << info.name;
    EXPECT_EQ(!at::equal(run(8), picture), info.stochastic) << info.name;
  }
}

// The noise of both halves of a step is one Brownian motion's: that of the whole step has a deviation of 1,
// too.
TEST(SamplerTest, DpmSdeKeepsTheNoiseLevel) {
  auto schedule = Schedule();
  for (const char* name : {"dpmpp_sde", "euler_a", "kdpm_2_a", "dpmpp_2m_sde", "er_sde"}) {
    auto sampler = *MakeSampler(name, schedule, Steps(30));
    // The picture is 0 and the network finds all the noise there is.
    at::Tensor x = sampler->AddNoise(at::zeros({1, 4, 64, 64}), NoiseSource(3).Draw({1, 4, 64, 64}));
    while (!sampler->done()) {
      const at::Tensor scaled = sampler->ScaleInput(x);
      const double share = sampler->sigma() / std::hypot(sampler->sigma(), 1);
      const bool ends = sampler->ends_step();
      x = sampler->Step(scaled / share, x);
      if (!ends || sampler->done()) continue;
      const double expected = sampler->AddNoise(at::zeros({1}), at::ones({1})).item<double>();
      EXPECT_NEAR(x.std().item<double>() / expected, 1, 0.05) << name << " " << sampler->steps_done();
    }
    EXPECT_NEAR(x.abs().max().item<double>(), 0, 1e-3) << name;
  }
}

TEST(SamplerTest, CutsOfTwoModelsMeet) {
  const at::Tensor noise = NoiseSource(3).Draw({1, 4, 3, 5});
  for (const char* name : {"euler", "ddim"}) {  // no history: two halves are a whole
    auto whole = Make(name, Steps(20));
    SamplerOptions options = Steps(20);
    options.denoising_end = 0.7;
    auto base = Make(name, options);
    options.denoising_end.reset();
    options.denoising_start = 0.7;
    auto refiner = Make(name, options);
    EXPECT_EQ(base->step_count() + refiner->step_count(), 20);
    at::Tensor x = Finish(*base, noise * base->initial_noise_scale());
    EXPECT_EQ(base->sigma(), refiner->sigma());
    EXPECT_TRUE(at::equal(Finish(*refiner, x), Finish(*whole, noise * whole->initial_noise_scale())));
  }
}

TEST(SigmaListTest, QuantilesOfKnownDistributions) {
  for (const double p : {0.0, 0.1, 0.5, 0.93, 1.0}) {
    EXPECT_NEAR(BetaQuantile(p, 1, 1), p, 1e-13);
    EXPECT_NEAR(BetaQuantile(p, 0.5, 0.5), std::pow(std::sin(M_PI / 2 * p), 2), 1e-12);
    EXPECT_NEAR(BetaQuantile(p, 2, 1), std::sqrt(p), 1e-12);
  }
}

TEST(SigmaListTest, PublishedTableIsItsOwnInterpolation) {
  EXPECT_THAT(AysSigmas(AysTable::kSd15, 2), ElementsAre(DoubleEq(14.615), DoubleEq(1.396)));
  EXPECT_THAT(AysSigmas(AysTable::kSdxl, 5), ElementsAre(14.615, 3.771, 1.342, 0.555, 0.234));
  EXPECT_NEAR(AysSigmas(AysTable::kSdxl, 20)[1], std::sqrt(14.615 * 6.315), 1e-12);
}

class SchedulerConfigTest : public testing::Test {
 protected:
  // `settings` beside a class.
  static absl::StatusOr<std::shared_ptr<const SchedulerConfig>> Load(const std::string& of,
                                                                     const std::string& settings,
                                                                     SchedulerSource source = {}) {
    source.path = absl::StrCat(testing::TempDir(), "/scheduler_config.", getpid(), ".json");
    const std::string comma = settings.empty() ? "" : ", ";
    std::ofstream(source.path) << "{\"_class_name\": \"" << of << "\"" << comma << settings << "}";
    auto config = SchedulerConfig::Load(source);
    std::remove(source.path.c_str());
    return config;
  }
  static void ExpectRefused(const std::string& of, const std::string& settings, const std::string& named) {
    const absl::Status status = Load(of, settings).status();
    EXPECT_EQ(ErrorReason(status), "UNSUPPORTED_MODEL") << of << " " << settings << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(named)) << settings;
  }
};

constexpr char kEuler[] = "EulerDiscreteScheduler", kDpm[] = "DPMSolverMultistepScheduler";

TEST_F(SchedulerConfigTest, WhatIsNotFollowedIsRefusedByName) {
  EXPECT_TRUE(Load(kEuler, R"("clip_sample": true, "trained_betas": null, "x": 1)").ok()) << "not its keys";
  for (const char* scheduler :
       {"FlowMatchEulerDiscreteScheduler", "IPNDMScheduler", "SASolverScheduler", "Euler"}) {
    ExpectRefused(scheduler, "", scheduler);
  }
  ExpectRefused("", "", "without a class");
  for (const auto& [settings, named] : std::vector<std::pair<std::string, std::string>>{
           {R"("trained_betas": [0.1])", "trained_betas"},
           {R"("num_train_timesteps": 2, "trained_betas": [0.1, 1.5])", "trained_betas"},
           {R"("beta_schedule": "sigmoid")", "beta_schedule sigmoid"},
           {R"("prediction_type": "flow_prediction")", "prediction_type flow_prediction"},
           {R"("timestep_spacing": "even")", "timestep_spacing even"},
           {R"("beta_start": 0.5, "beta_end": 0.1)", "beta_end below beta_start"},
           {R"("num_train_timesteps": 1)", "num_train_timesteps"},
           {R"("final_sigmas_type": "one")", "final_sigmas_type one"},
           {R"("timestep_type": "odd")", "timestep_type odd"},
           {R"("interpolation_type": "cubic")", "interpolation_type cubic"},
           {R"("sigma_min": 3, "sigma_max": 2)", "sigma_max below sigma_min"},
           {R"("use_karras_sigmas": true, "use_beta_sigmas": true)", "more than one kind of sigmas"}}) {
    ExpectRefused(kEuler, settings, named);
  }
  ExpectRefused(kDpm, R"("use_flow_sigmas": true)", "use_flow_sigmas");
  ExpectRefused(kDpm, R"("solver_order": 4)", "solver_order 4");
  ExpectRefused(kDpm, R"("algorithm_type": "dpmsolver")", "final_sigmas_type zero");
  ExpectRefused(kDpm, R"("algorithm_type": "euler")", "algorithm_type euler");
  ExpectRefused(kDpm, R"("solver_type": "exact")", "solver_type exact");
  ExpectRefused(kDpm, R"("variance_type": "learned")", "variance_type learned");
  ExpectRefused(kDpm, R"("lambda_min_clipped": -2, "timestep_spacing": "trailing")", "lambda_min_clipped");
  ExpectRefused("UniPCMultistepScheduler", R"("predict_x0": false)", "predict_x0");
  ExpectRefused("UniPCMultistepScheduler", R"("lower_order_final": false)", "lower_order_final false");
  ExpectRefused("UniPCMultistepScheduler", R"("shift_terminal": 0.1)", "shift_terminal");
  ExpectRefused("UniPCMultistepScheduler", R"("use_dynamic_shifting": true)", "use_dynamic_shifting");
  ExpectRefused("PNDMScheduler", "", "skip_prk_steps");
  ExpectRefused("DDPMScheduler", R"("variance_type": "learned_range")", "variance_type learned_range");
  ExpectRefused("DPMSolverSDEScheduler", R"("noise_sampler_seed": 1)", "noise_sampler_seed");
  ExpectRefused("KDPM2DiscreteScheduler", R"("prediction_type": "sample")", "prediction_type sample");
  ExpectRefused("LCMScheduler", R"("original_inference_steps": 1001)", "original_inference_steps");
  ExpectRefused("EDMEulerScheduler", R"("sigma_schedule": "beta")", "sigma_schedule beta");
  ExpectRefused("EDMEulerScheduler", R"("sigma_min": 100)", "sigma_max below sigma_min");
  SchedulerSource missing;
  missing.path = testing::TempDir() + "/none.json";
  EXPECT_EQ(ErrorReason(SchedulerConfig::Load(missing).status()), "MISSING_FILE");
}

TEST_F(SchedulerConfigTest, TimestepsAndLevelsAreInverse) {
  const auto schedule = NoiseSchedule::Create({});
  for (const double t : {0.0, 1.0, 17.25, 500.0, 998.5, 999.0}) {
    EXPECT_NEAR(schedule->TimestepOf(schedule->SigmaAt(t)), t, 1e-2) << t;
  }
  EXPECT_EQ(schedule->TimestepOf(1e9), 999);
  EXPECT_EQ(schedule->TimestepOf(0), 0);
  EXPECT_NEAR(schedule->sigmas().back(), 14.6146, 1e-3) << "SD 1.5's highest level";
}

TEST_F(SchedulerConfigTest, ModelsLevelsAreTheDefault) {
  const auto karras = Load(kDpm, R"("use_karras_sigmas": true)").value();
  SamplerOptions options = Steps(5);
  options.solver = karras->own().solver;
  auto implied = *MakeSampler("dpmpp_2m", karras->own().schedule, options),
       named = *MakeSampler("dpmpp_2m_k", karras->own().schedule, options);
  const at::Tensor x = at::ones({1, 4, 2, 2});
  EXPECT_TRUE(at::equal(Finish(*implied, x), Finish(*named, x)));
  EXPECT_EQ(karras->For("euler")->schedule->config().sigmas, SigmaSchedule::kKarras);
  EXPECT_EQ(karras->For("euler_a")->schedule->config().sigmas, SigmaSchedule::kDefault) << "has no such key";
}

TEST_F(SchedulerConfigTest, AnotherSamplerTakesWhatItsClassHas) {
  const auto config =
      Load(kDpm, R"("solver_order": 3, "algorithm_type": "sde-dpmsolver++", "solver_type": "heun",
      "beta_schedule": "scaled_linear", "rescale_betas_zero_snr": true, "final_sigmas_type": "sigma_min",
      "clip_sample_range": 2, "steps_offset": 3)")
          .value();
  EXPECT_EQ(config->sampler(), "dpmpp_2m_sde");
  EXPECT_EQ(config->For("dpmpp_2m_sde_k")->solver.order, 3) << "the model's own";
  const SamplerSettings plain = config->For("dpmpp_2m").value();
  EXPECT_EQ(plain.solver.order, 2);
  EXPECT_FALSE(plain.solver.noisy);
  EXPECT_TRUE(plain.solver.heun);
  EXPECT_EQ(config->For("deis")->solver.order, 3);
  EXPECT_TRUE(config->For("euler")->solver.ends_above_zero);
  EXPECT_FALSE(config->For("heun")->solver.ends_above_zero);
  EXPECT_TRUE(config->For("ddim")->schedule->config().zero_terminal_snr);
  EXPECT_FALSE(config->For("heun")->schedule->config().zero_terminal_snr);
  EXPECT_EQ(config->For("ddim")->schedule->config().steps_offset, 3);
  EXPECT_EQ(config->For("ddim")->solver.clip, 2) << "clip_sample is what DDIM does when nothing is said";
  EXPECT_EQ(config->For("lcm")->solver.clip, std::nullopt);
  EXPECT_EQ(config->For("heun")->schedule->config().betas, BetaSchedule::kScaledLinear);
  EXPECT_EQ(config->For("heun")->schedule->config().beta_start, 0.00085);
  EXPECT_EQ(config->For("lms")->schedule->config().beta_start, 0.0001);
  ExpectFieldError(Load(kDpm, R"("beta_schedule": "squaredcos_cap_v2", "prediction_type": "sample")")
                       .value()
                       ->For("pndm")
                       .status(),
                   "params.sampler", "prediction_type sample");
}

TEST_F(SchedulerConfigTest, PipelinesOfSd1SetTwoKeysThemselves) {
  SchedulerSource sd1;
  sd1.sd1 = true;
  for (const auto& [source, offset, clip] :
       {std::tuple{SchedulerSource{}, 0, std::optional<double>(1)}, {sd1, 1, std::optional<double>()}}) {
    const auto config = Load("DDIMScheduler", R"("clip_sample": true)", source).value();
    EXPECT_EQ(config->own().schedule->config().steps_offset, offset);
    EXPECT_EQ(config->own().solver.clip, clip);
    EXPECT_EQ(config->For("dpmpp_2s")->schedule->config().steps_offset, 0) << "has no such key";
  }
}

TEST_F(SchedulerConfigTest, EdmHasFewSamplersAndNoTrainingSteps) {
  const auto config = Load("EDMEulerScheduler", "").value();
  EXPECT_EQ(config->sampler(), "euler");
  EXPECT_TRUE(config->For("dpmpp_3m_k")->solver.edm.has_value());
  ExpectFieldError(config->For("ddim").status(), "params.sampler", "EDMEulerScheduler");
  SamplerOptions options = Steps(4);
  options.solver = config->own().solver;
  EXPECT_TRUE(MakeSampler("euler", config->own().schedule, options).ok());
  options.denoising_end = 0.5;
  ExpectFieldError(MakeSampler("euler", config->own().schedule, options), "params.denoising_end", "EDM");
  options.denoising_end.reset();
  options.schedule = SigmaSchedule::kBeta;
  ExpectFieldError(MakeSampler("euler", config->own().schedule, options), "params.schedule", "EDM");
}

}  // namespace
}  // namespace latentd
