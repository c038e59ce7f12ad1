// A model's scheduler_config.json, read as diffusers' class of a sampler reads it.
//
// A file is saved by one class. Another class takes those of its settings that it has itself, and its own
// defaults for all others, betas among them (diffusers' from_config). So here: the sampler that the model's
// class stands for runs with all of the model's settings; any other one with those that its class has. Where
// a name says more than a class does, the name goes before the file: `dpmpp_3m` is of order 3 and without
// noise.
//
// Immutable; any thread.
#ifndef LATENTD_FAMILIES_SAMPLING_SCHEDULER_CONFIG_H_
#define LATENTD_FAMILIES_SAMPLING_SCHEDULER_CONFIG_H_

#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "families/sampling/noise_schedule.h"
#include "families/sampling/solver_settings.h"

namespace latentd {

// What a sampler is made from.
struct SamplerSettings {
  std::shared_ptr<const NoiseSchedule> schedule;
  SolverSettings solver;
};

// Where a model's settings come from, and what goes before the file.
struct SchedulerSource {
  std::string path;        // of a scheduler_config.json
  std::string class_name;  // of model_index.json; empty: the class that saved the file
  // Pipelines of SD 1.x set steps_offset to 1 and clip_sample to false, whatever the file says.
  bool sd1 = false;
  // Marks in a checkpoint.
  bool velocity = false, zero_terminal_snr = false;
  // Of a distilled checkpoint: timesteps are spaced so, whatever the file says.
  bool trailing = false;
};

class SchedulerConfig {
 public:
  // Errors: those of JsonConfig; FAILED_PRECONDITION UNSUPPORTED_MODEL for a class that no sampler stands
  // for, and for settings of the model's own class that are not followed, by name.
  static absl::StatusOr<std::shared_ptr<const SchedulerConfig>> Load(const SchedulerSource& source);
  // One schedule for all samplers, `euler` by default.
  static std::shared_ptr<const SchedulerConfig> Of(std::shared_ptr<const NoiseSchedule> schedule);

  // The sampler that the model's class stands for ("euler_a").
  const std::string& sampler() const { return sampler_; }
  const SamplerSettings& own() const { return own_; }
  // By a name of AllSamplers(), with or without "_k". Errors: INVALID_ARGUMENT INVALID_FIELD on
  // params.sampler for settings that the sampler's class does not take, and for a model of EDM's, whose
  // samplers are few.
  absl::StatusOr<SamplerSettings> For(absl::string_view sampler) const;

 private:
  SchedulerConfig() = default;

  std::string sampler_;
  SamplerSettings own_;
  std::map<std::string, absl::StatusOr<SamplerSettings>, std::less<>> others_;
  bool any_ = false;  // all samplers have own_'s schedule
};

// What a name alone says.
SolverSettings SettingsByName(absl::string_view sampler);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_SCHEDULER_CONFIG_H_
