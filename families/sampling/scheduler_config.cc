#include "families/sampling/scheduler_config.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "families/config/json_config.h"
#include "families/request_checks.h"

namespace latentd {
namespace {

constexpr int64_t kMostOrders = 3, kMostUniPcOrders = 4;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A class of diffusers: the sampler that it is, what it takes a file without betas to mean, and which keys it
// has beside those of the training noise.
struct SchedulerClass {
  const char* name;
  const char* sampler;
  double beta_start, beta_end;
  const char* betas;
  const char* more_betas;  // beside linear, scaled_linear and squaredcos_cap_v2
  const char* keys;
};

#define RESPACED "use_karras_sigmas use_exponential_sigmas use_beta_sigmas "
#define SPACED "timestep_spacing steps_offset "
#define THRESHOLD "thresholding dynamic_thresholding_ratio sample_max_value "
#define CLIP "clip_sample clip_sample_range " THRESHOLD
#define SOLVER "solver_order algorithm_type solver_type lower_order_final use_flow_sigmas " THRESHOLD RESPACED

constexpr SchedulerClass kClasses[] = {
    {"DDIMScheduler", "ddim", 0.0001, 0.02, "linear", "",
     CLIP SPACED "set_alpha_to_one rescale_betas_zero_snr"},
    {"DDIMParallelScheduler", "ddim", 0.0001, 0.02, "linear", "",
     CLIP SPACED "set_alpha_to_one rescale_betas_zero_snr"},
    {"DDPMScheduler", "ddpm", 0.0001, 0.02, "linear", "sigmoid laplace",
     CLIP SPACED "variance_type rescale_betas_zero_snr"},
    {"DDPMParallelScheduler", "ddpm", 0.0001, 0.02, "linear", "sigmoid laplace",
     CLIP SPACED "variance_type rescale_betas_zero_snr"},
    {"PNDMScheduler", "pndm", 0.0001, 0.02, "linear", "", SPACED "skip_prk_steps set_alpha_to_one"},
    {"LMSDiscreteScheduler", "lms", 0.0001, 0.02, "linear", "", SPACED RESPACED},
    {"EulerDiscreteScheduler", "euler", 0.0001, 0.02, "linear", "",
     SPACED RESPACED "interpolation_type timestep_type rescale_betas_zero_snr final_sigmas_type"},
    {"EulerAncestralDiscreteScheduler", "euler_a", 0.0001, 0.02, "linear", "",
     SPACED "rescale_betas_zero_snr"},
    {"HeunDiscreteScheduler", "heun", 0.00085, 0.012, "linear", "exp",
     SPACED RESPACED "clip_sample clip_sample_range"},
    {"KDPM2DiscreteScheduler", "kdpm_2", 0.00085, 0.012, "linear", "", SPACED RESPACED},
    {"KDPM2AncestralDiscreteScheduler", "kdpm_2_a", 0.00085, 0.012, "linear", "", SPACED RESPACED},
    {"DPMSolverSDEScheduler", "dpmpp_sde", 0.00085, 0.012, "linear", "",
     SPACED RESPACED "noise_sampler_seed"},
    {"DPMSolverMultistepScheduler", "dpmpp_2m", 0.0001, 0.02, "linear", "",
     SOLVER SPACED "euler_at_final use_lu_lambdas final_sigmas_type lambda_min_clipped variance_type "
                   "rescale_betas_zero_snr"},
    {"DPMSolverSinglestepScheduler", "dpmpp_2s", 0.0001, 0.02, "linear", "",
     SOLVER "final_sigmas_type lambda_min_clipped variance_type"},
    {"DEISMultistepScheduler", "deis", 0.0001, 0.02, "linear", "", SOLVER SPACED},
    {"UniPCMultistepScheduler", "unipc", 0.0001, 0.02, "linear", "",
     SOLVER SPACED "predict_x0 disable_corrector solver_p final_sigmas_type rescale_betas_zero_snr "
                   "use_dynamic_shifting shift_terminal"},
    {"LCMScheduler", "lcm", 0.00085, 0.012, "scaled_linear", "",
     CLIP SPACED "original_inference_steps timestep_scaling rescale_betas_zero_snr"},
    {"TCDScheduler", "tcd", 0.00085, 0.012, "scaled_linear", "",
     SPACED "original_inference_steps rescale_betas_zero_snr"},
    {"EDMEulerScheduler", "euler", 0, 0, nullptr, "", "final_sigmas_type"},
    {"EDMDPMSolverMultistepScheduler", "dpmpp_2m", 0, 0, nullptr, "",
     "solver_order algorithm_type solver_type lower_order_final euler_at_final final_sigmas_type " THRESHOLD},
};

#undef RESPACED
#undef SPACED
#undef THRESHOLD
#undef CLIP
#undef SOLVER

// A sampler and its class; order 0: as the file says.
struct SamplerName {
  const char* name;
  const char* of;
  int64_t order = 0;
  bool noisy = false;
};
constexpr SamplerName kSamplers[] = {
    {"ddim", "DDIMScheduler"},
    {"ddpm", "DDPMScheduler"},
    {"deis", "DEISMultistepScheduler"},
    {"lms", "LMSDiscreteScheduler"},
    {"pndm", "PNDMScheduler"},
    {"heun", "HeunDiscreteScheduler"},
    {"euler", "EulerDiscreteScheduler"},
    {"euler_a", "EulerAncestralDiscreteScheduler"},
    {"kdpm_2", "KDPM2DiscreteScheduler"},
    {"kdpm_2_a", "KDPM2AncestralDiscreteScheduler"},
    {"dpmpp_2s", "DPMSolverSinglestepScheduler", 2},
    {"dpmpp_2m", "DPMSolverMultistepScheduler", 2},
    {"dpmpp_2m_sde", "DPMSolverMultistepScheduler", 2, true},
    {"dpmpp_3m", "DPMSolverMultistepScheduler", 3},
    {"dpmpp_sde", "DPMSolverSDEScheduler"},
    {"er_sde", "DPMSolverMultistepScheduler", 2},
    {"unipc", "UniPCMultistepScheduler"},
    {"lcm", "LCMScheduler"},
    {"tcd", "TCDScheduler"},
};

const SchedulerClass* FindClass(absl::string_view name) {
  for (const SchedulerClass& one : kClasses) {
    if (name == one.name) return &one;
  }
  return nullptr;
}

void ApplyName(const SamplerName& name, SolverSettings& settings) {
  if (name.order == 0) return;
  settings.order = name.order;
  settings.noisy = name.noisy;
  settings.on_noise = false;
}

bool HasWord(absl::string_view words, absl::string_view word) {
  const std::vector<absl::string_view> all = absl::StrSplit(words, ' ');
  return std::find(all.begin(), all.end(), word) != all.end();
}

// One class' reading of a file. `renamed`: the class is another one than the model's.
class ClassReader {
 public:
  ClassReader(JsonConfig json, const SchedulerClass& of, const SchedulerSource& source, bool renamed)
      : json_(std::move(json)), of_(of), source_(source), renamed_(renamed) {
    unset_ = json_.Strings("_use_default_values", {});
  }

  absl::StatusOr<SamplerSettings> Read() {
    SamplerSettings settings;
    if (edm()) {
      ReadEdm(settings.solver);
    } else {
      ReadTraining();
      ReadLevels(settings.solver);
    }
    ReadSolver(settings.solver);
    ReadClipping(settings.solver);
    RETURN_IF_ERROR(json_.status());
    settings.schedule = NoiseSchedule::Create(noise_);
    return settings;
  }

 private:
  template <typename T>
  using Choices = std::vector<std::pair<const char*, T>>;

  bool edm() const { return of_.betas == nullptr; }

  void Refuse(absl::string_view what) {
    json_.Fail(MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                         absl::StrCat(json_.label(), ": ", what, " of ", of_.name, " is not supported"),
                         {{"file", json_.label()}, {"what", std::string(what)}, {"scheduler", of_.name}}));
  }

  // Whether the file says something about a key that the class has.
  bool Set(absl::string_view key) const {
    return json_.Has(key) && std::find(unset_.begin(), unset_.end(), key) == unset_.end();
  }
  bool Reads(absl::string_view key) const { return HasWord(of_.keys, key) && Set(key); }
  bool Bool(const char* key, bool fallback) { return Reads(key) ? json_.Bool(key, fallback) : fallback; }
  template <typename T>
  T Choose(const char* key, T fallback, const Choices<T>& choices) {
    const std::string value = json_.String(key, "");
    for (const auto& [name, choice] : choices) {
      if (value == name) return choice;
    }
    if (Set(key)) Refuse(absl::StrCat(key, " ", value));
    return fallback;
  }
  template <typename T>
  T ChooseOwn(const char* key, T fallback, const Choices<T>& choices) {
    return Reads(key) ? Choose(key, fallback, choices) : fallback;
  }

  void ReadBetas() {
    const auto kinds = Choices<BetaSchedule>{{"scaled_linear", BetaSchedule::kScaledLinear},
                                             {"linear", BetaSchedule::kLinear},
                                             {"squaredcos_cap_v2", BetaSchedule::kSquaredCosine},
                                             {"exp", BetaSchedule::kExponential},
                                             {"laplace", BetaSchedule::kLaplace},
                                             {"sigmoid", BetaSchedule::kSigmoid}};
    Choices<BetaSchedule> known(kinds.begin(), kinds.begin() + 3);
    for (auto kind = kinds.begin() + 3; kind != kinds.end(); ++kind) {
      if (HasWord(of_.more_betas, kind->first)) known.push_back(*kind);
    }
    const auto usual = std::find_if(kinds.begin(), kinds.end(), [&](const auto& kind) {
      return absl::string_view(kind.first) == of_.betas;
    });
    noise_.betas = Set("beta_schedule") ? Choose("beta_schedule", usual->second, known) : usual->second;
    noise_.beta_start = of_.beta_start;
    noise_.beta_end = of_.beta_end;
    if (Set("beta_start")) noise_.beta_start = json_.Double("beta_start", 0, 1e-8, 0.999);
    if (Set("beta_end")) noise_.beta_end = json_.Double("beta_end", 0, 1e-8, 0.999);
    if (noise_.beta_end < noise_.beta_start) Refuse("beta_end below beta_start");
    if (!Set("trained_betas")) return;
    for (const double beta : json_.Doubles("trained_betas")) {
      if (!(beta > 0 && beta < 1)) Refuse("trained_betas that are not between 0 and 1");
      noise_.trained_betas.push_back(static_cast<float>(beta));
    }
    if (static_cast<int64_t>(noise_.trained_betas.size()) != noise_.train_steps) {
      Refuse("trained_betas of another number than num_train_timesteps");
    }
  }

  void ReadTraining() {
    if (Set("num_train_timesteps")) noise_.train_steps = json_.Int("num_train_timesteps", 1000, 2, 100000);
    ReadBetas();
    ReadPrediction();
    noise_.spacing = ChooseOwn<std::optional<TimestepSpacing>>("timestep_spacing", std::nullopt,
                                                               {{"leading", TimestepSpacing::kLeading},
                                                                {"trailing", TimestepSpacing::kTrailing},
                                                                {"linspace", TimestepSpacing::kLinspace}});
    if (Reads("steps_offset")) noise_.steps_offset = json_.Int("steps_offset", 0, 0, 100);
    if (source_.trailing && HasWord(of_.keys, "timestep_spacing"))
      noise_.spacing = TimestepSpacing::kTrailing;
    if (source_.sd1 && HasWord(of_.keys, "steps_offset")) noise_.steps_offset = 1;
    if (Reads("set_alpha_to_one")) noise_.set_alpha_to_one = json_.Bool("set_alpha_to_one", false);
    noise_.zero_terminal_snr = Bool("rescale_betas_zero_snr", false);
    if (source_.zero_terminal_snr) {
      noise_.zero_terminal_snr = HasWord(of_.keys, "rescale_betas_zero_snr");
      if (HasWord(of_.keys, "timestep_spacing")) noise_.spacing = TimestepSpacing::kTrailing;
    }
    if (Bool("use_flow_sigmas", false)) Refuse("use_flow_sigmas");
    if (Bool("use_dynamic_shifting", false)) Refuse("use_dynamic_shifting");
    if (Reads("shift_terminal")) Refuse("shift_terminal");
    for (const auto& [flag, sigmas] :
         {std::pair<const char*, SigmaSchedule>{"use_karras_sigmas", SigmaSchedule::kKarras},
          {"use_exponential_sigmas", SigmaSchedule::kExponential},
          {"use_beta_sigmas", SigmaSchedule::kBeta}}) {
      if (!Bool(flag, false)) continue;
      if (noise_.sigmas != SigmaSchedule::kDefault) Refuse("more than one kind of sigmas");
      noise_.sigmas = sigmas;
    }
    if (Bool("use_lu_lambdas", false) && noise_.sigmas != SigmaSchedule::kKarras) {
      noise_.sigmas = SigmaSchedule::kLu;
    }
  }

  void ReadPrediction() {
    const std::string sampler = of_.sampler;
    Choices<Prediction> kinds = {{"epsilon", Prediction::kEpsilon}, {"v_prediction", Prediction::kVelocity}};
    // Where diffusers has no formula for the picture, neither has a model that was saved by that class.
    const bool no_sample = edm() || sampler == "euler_a" || sampler == "kdpm_2" || sampler == "kdpm_2_a" ||
                           sampler == "dpmpp_sde";
    if (!no_sample || renamed_) kinds.push_back({"sample", Prediction::kSample});
    if (sampler == "pndm") kinds.resize(2);
    if (Set("prediction_type")) noise_.prediction = Choose("prediction_type", Prediction::kEpsilon, kinds);
    if (source_.velocity) noise_.prediction = Prediction::kVelocity;
  }

  void ReadLevels(SolverSettings& s) {
    s.ends_above_zero = ReadsFinal();
    s.log_linear = ChooseOwn("interpolation_type", false, {{"linear", false}, {"log_linear", true}});
    const bool continuous = ChooseOwn("timestep_type", false, {{"discrete", false}, {"continuous", true}});
    s.continuous = continuous && noise_.prediction == Prediction::kVelocity;
    // Every class looks for them when it makes levels anew, though few have them.
    if (Set("sigma_min")) s.sigma_min = json_.Double("sigma_min", 0, 1e-6, 1e6);
    if (Set("sigma_max")) s.sigma_max = json_.Double("sigma_max", 0, 1e-6, 1e6);
    if (s.sigma_min.value_or(0) > s.sigma_max.value_or(kInfinity)) Refuse("sigma_max below sigma_min");
    if (Reads("lambda_min_clipped")) {
      s.lambda_min = json_.Double("lambda_min_clipped", -kInfinity, -kInfinity, 100);
      if (s.lambda_min > -kInfinity && noise_.spacing == TimestepSpacing::kTrailing) {
        Refuse("lambda_min_clipped with timestep_spacing trailing");
      }
    }
  }

  bool ReadsFinal() { return ChooseOwn("final_sigmas_type", false, {{"zero", false}, {"sigma_min", true}}); }

  void ReadEdm(SolverSettings& s) {
    ReadPrediction();
    s.ends_above_zero = ReadsFinal();
    EdmSettings& edm = s.edm.emplace();
    edm.sigma_min = json_.Double("sigma_min", edm.sigma_min, 1e-6, 1e6);
    edm.sigma_max = json_.Double("sigma_max", edm.sigma_max, 1e-6, 1e6);
    edm.data = json_.Double("sigma_data", edm.data, 1e-6, 1e6);
    edm.rho = json_.Double("rho", edm.rho, 1e-3, 1e3);
    edm.exponential = Choose("sigma_schedule", false, {{"karras", false}, {"exponential", true}});
    if (edm.sigma_max <= edm.sigma_min) Refuse("sigma_max below sigma_min");
  }

  void ReadAlgorithm(SolverSettings& s) {
    enum class Kind { kData, kNoise, kNoisyData, kNoisyNoise };
    const Kind kind = ChooseOwn("algorithm_type", Kind::kData,
                                {{"dpmsolver++", Kind::kData},
                                 {"deis", Kind::kData},
                                 {"sde-dpmsolver++", Kind::kNoisyData},
                                 {"dpmsolver", Kind::kNoise},
                                 {"sde-dpmsolver", Kind::kNoisyNoise}});
    s.on_noise = kind == Kind::kNoise || kind == Kind::kNoisyNoise;
    s.noisy = kind == Kind::kNoisyData || kind == Kind::kNoisyNoise;
  }

  void ReadSolver(SolverSettings& s) {
    const std::string sampler = of_.sampler;
    const bool dpm = absl::StartsWith(sampler, "dpmpp_2");
    const bool unipc = sampler == "unipc";
    if (Reads("solver_order")) {
      s.order = json_.Int("solver_order", 2, 1, 100);
      if (s.order > (unipc ? kMostUniPcOrders : kMostOrders)) Refuse(absl::StrCat("solver_order ", s.order));
    }
    if (dpm && !renamed_) ReadAlgorithm(s);  // a name says it otherwise
    if (dpm || unipc) {
      // The types of other classes stand for the usual one.
      const std::string type = Reads("solver_type") ? json_.String("solver_type", "") : "";
      if (!HasWord("midpoint heun logrho bh1 bh2 ", type)) Refuse(absl::StrCat("solver_type ", type));
      s.heun = dpm && type == "heun";
      s.bh1 = unipc && type == "bh1";
    }
    s.lower_order_final = Bool("lower_order_final", sampler != "dpmpp_2s");
    s.euler_at_final = Bool("euler_at_final", false);
    if (unipc) ReadUniPc(s);
    if (s.on_noise && !s.ends_above_zero) {
      Refuse(absl::StrCat(unipc ? "predict_x0 false" : "an algorithm_type without ++",
                          " with final_sigmas_type zero"));
    }
    if (edm() && s.on_noise) Refuse("an algorithm_type without ++");
    if (!renamed_ && s.noisy && s.order == 3 && (s.on_noise || edm())) {
      Refuse("solver_order 3 with this algorithm_type");
    }
    if (!renamed_ && sampler == "pndm" && !Bool("skip_prk_steps", false)) Refuse("skip_prk_steps false");
    if (Reads("noise_sampler_seed")) Refuse("noise_sampler_seed");
    ReadVariance(s);
    if (Reads("original_inference_steps")) {
      s.original_steps = json_.Int("original_inference_steps", 50, 1, 100000);
      if (s.original_steps > noise_.train_steps) Refuse("original_inference_steps above num_train_timesteps");
    }
    if (Reads("timestep_scaling")) s.timestep_scaling = json_.Double("timestep_scaling", 10, 0, 1e6);
  }

  void ReadUniPc(SolverSettings& s) {
    s.on_noise = !Bool("predict_x0", true);
    if (Reads("disable_corrector")) s.uncorrected = json_.Ints("disable_corrector", {}, -1, 100000);
    if (Reads("solver_p")) Refuse("solver_p");
    if (s.order > 1 && !s.lower_order_final && !s.ends_above_zero) {
      Refuse("lower_order_final false with final_sigmas_type zero");
    }
  }

  void ReadVariance(SolverSettings& s) {
    if (!Reads("variance_type")) return;
    const std::string type = json_.String("variance_type", "");
    s.large_variance = type == "fixed_large";
    if (absl::StrContains(of_.name, "DPMSolver") && absl::StartsWith(type, "fixed_")) return;  // not read
    if (type != "fixed_small" && type != "fixed_small_log" && type != "fixed_large") {
      Refuse(absl::StrCat("variance_type ", type));
    }
  }

  void ReadClipping(SolverSettings& s) {
    const bool by_itself = absl::StartsWith(of_.sampler, "dd");  // DDIM and DDPM
    if (HasWord(of_.keys, "clip_sample") && !source_.sd1 && Bool("clip_sample", by_itself)) {
      s.clip = Reads("clip_sample_range") ? json_.Double("clip_sample_range", 1, 0, 1e6) : 1;
    }
    if (!Bool("thresholding", false)) return;
    ThresholdSettings& threshold = s.threshold.emplace();
    if (Reads("dynamic_thresholding_ratio")) {
      threshold.ratio = json_.Double("dynamic_thresholding_ratio", threshold.ratio, 0, 1);
    }
    if (Reads("sample_max_value"))
      threshold.most = json_.Double("sample_max_value", threshold.most, 1e-6, 1e6);
  }

  JsonConfig json_;
  const SchedulerClass& of_;
  const SchedulerSource& source_;
  const bool renamed_;
  std::vector<std::string> unset_;  // keys that say what a class did not
  NoiseScheduleConfig noise_;
};

// Of the samplers of one class, the one that its settings are.
std::string OwnName(const SchedulerClass& of, const SolverSettings& settings) {
  const std::string usual = of.sampler;
  if (usual != "dpmpp_2m") return usual;
  return settings.noisy ? "dpmpp_2m_sde" : settings.order == 3 ? "dpmpp_3m" : usual;
}

// The class of a sampler, for a model of a class.
const SchedulerClass* ClassOf(const SamplerName& sampler, const SchedulerClass& models) {
  if (models.betas != nullptr) return FindClass(sampler.of);
  if (sampler.name == absl::string_view("er_sde")) return nullptr;
  if (sampler.of == absl::string_view("EulerDiscreteScheduler")) return FindClass("EDMEulerScheduler");
  const bool dpm = sampler.of == absl::string_view("DPMSolverMultistepScheduler");
  return dpm ? FindClass("EDMDPMSolverMultistepScheduler") : nullptr;
}

}  // namespace

SolverSettings SettingsByName(absl::string_view sampler) {
  SolverSettings settings;
  for (const SamplerName& name : kSamplers) {
    if (sampler == name.name) ApplyName(name, settings);
  }
  return settings;
}

absl::StatusOr<std::shared_ptr<const SchedulerConfig>> SchedulerConfig::Load(const SchedulerSource& source) {
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(source.path, JsonConfig::kMaxConfigBytes));
  const std::string label = ShortPath(source.path);
  ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Parse(text, label));
  const std::string name = source.class_name.empty() ? json.String("_class_name", "") : source.class_name;
  RETURN_IF_ERROR(json.status());
  const SchedulerClass* own = FindClass(name);
  if (own == nullptr) {
    const std::string what =
        name.empty() ? "a scheduler without a class" : absl::StrCat("the scheduler ", name);
    return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                     absl::StrCat(label, ": ", what, " is not supported"), {{"file", label}, {"what", what}});
  }
  auto config = std::shared_ptr<SchedulerConfig>(new SchedulerConfig);
  ASSIGN_OR_RETURN(config->own_, ClassReader(std::move(json), *own, source, false).Read());
  config->sampler_ = OwnName(*own, config->own_.solver);
  for (const SamplerName& sampler : kSamplers) {
    if (sampler.name == config->sampler_) continue;
    const SchedulerClass* of = ClassOf(sampler, *own);
    if (of == nullptr) {
      config->others_.emplace(sampler.name, absl::InvalidArgumentError(absl::StrCat(
                                                "is not for models of ", own->name,
                                                "; use 'euler', 'dpmpp_2m', 'dpmpp_3m' or 'dpmpp_2m_sde'")));
      continue;
    }
    ASSIGN_OR_RETURN(JsonConfig again, JsonConfig::Parse(text, label));
    auto settings = ClassReader(std::move(again), *of, source, true).Read();
    if (settings.ok()) ApplyName(sampler, settings->solver);
    config->others_.emplace(sampler.name, std::move(settings));
  }
  return std::shared_ptr<const SchedulerConfig>(std::move(config));
}

std::shared_ptr<const SchedulerConfig> SchedulerConfig::Of(std::shared_ptr<const NoiseSchedule> schedule) {
  auto config = std::shared_ptr<SchedulerConfig>(new SchedulerConfig);
  config->sampler_ = "euler";
  config->own_.schedule = std::move(schedule);
  config->any_ = true;
  return config;
}

absl::StatusOr<SamplerSettings> SchedulerConfig::For(absl::string_view sampler) const {
  const absl::string_view name = absl::StripSuffix(sampler, "_k");
  if (any_) return SamplerSettings{own_.schedule, SettingsByName(name)};
  if (name == sampler_) return own_;
  const auto found = others_.find(name);
  if (found == others_.end()) return own_;  // no sampler of that name: MakeSampler says so
  if (found->second.ok()) return found->second;
  return FieldError("params.sampler",
                    absl::StrCat("'", sampler, "' ", MessageWithoutField(found->second.status())));
}

}  // namespace latentd
