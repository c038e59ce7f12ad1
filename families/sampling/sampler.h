// Samplers of variance-preserving diffusion models (SD 1.x, SDXL): how a noisy latent becomes a clean one.
// Knows no model; the caller evaluates the network:
//
//   ASSIGN_OR_RETURN(auto sampler, MakeSampler("dpmpp_2m", schedule, options));
//   at::Tensor x = noise * sampler->initial_noise_scale();     // txt2img
//   at::Tensor x = sampler->AddNoise(init_latents, noise);     // img2img
//   while (!sampler->done()) {
//     const bool ends_step = sampler->ends_step();
//     x = sampler->Step(network(sampler->ScaleInput(x), sampler->timestep()), x);
//     … inpainting blends with sampler->AddNoise(init_latents, noise) …
//     if (ends_step) … sampler->prediction() is a preview …
//   }
//
// A user's step may take two evaluations of the network (Heun, KDPM2, DPM++ SDE, the first one of PNDM).
//
// Latents are fp32 and may be on any device; network outputs of another type are converted. A step copies
// nothing to the host, and only noise from it. One run of one picture; one thread at a time.
#ifndef LATENTD_FAMILIES_SAMPLING_SAMPLER_H_
#define LATENTD_FAMILIES_SAMPLING_SAMPLER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "families/sampling/noise.h"
#include "families/sampling/noise_schedule.h"
#include "families/sampling/solver_settings.h"

namespace latentd {

struct SamplerPlan;  // sampler_plan.h

class Sampler {
 public:
  virtual ~Sampler() = default;
  Sampler& operator=(const Sampler&) = delete;

  // Of this run, after strength and cuts.
  int64_t step_count() const { return step_count_; }
  int64_t evaluation_count() const;
  // What was run so far.
  int64_t steps_done() const { return steps_done_; }
  int64_t evaluations_done() const;
  bool done() const;

  // The evaluation that comes next. REQUIRES: !done().
  double timestep() const;  // what the network takes; whole numbers where diffusers' scheduler has those
  bool ends_step() const;   // whether it is the last one of a user's step

  // σ/α that x has now: before the evaluation that comes next, or after the last.
  double sigma() const;
  // What pure noise is multiplied with to start a run that has no picture and no cut.
  double initial_noise_scale() const;
  // A picture brought to the level that x has now; the picture itself after a whole run. Before the first
  // Step, the start of img2img; after a Step, the unpainted part of inpainting. (In the middle of a step of
  // KDPM2 and DPM++ SDE it is brought to the next step's level, as by diffusers.)
  at::Tensor AddNoise(const at::Tensor& picture, const at::Tensor& noise) const;

  // x as the network takes it. REQUIRES: !done().
  at::Tensor ScaleInput(const at::Tensor& x) const;
  // The next x. `output` is the network's for ScaleInput(x) at timestep(), of x's shape. REQUIRES: !done().
  at::Tensor Step(const at::Tensor& output, const at::Tensor& x);
  // The picture as the last Step took it to be; undefined before the first.
  const at::Tensor& prediction() const { return prediction_; }

  // A sampler in the same state, that goes its own way from here. It draws from `noise`; without one, from a
  // copy of this one's, which repeats the same draws. (Tiles of one picture share one source.)
  virtual std::unique_ptr<Sampler> Clone(std::shared_ptr<NoiseSource> noise = nullptr) const = 0;

 protected:
  Sampler(std::shared_ptr<const SamplerPlan> plan, std::shared_ptr<NoiseSource> noise);
  Sampler(const Sampler&) = default;  // tensors are shared: none is ever changed in place

  // The formula. Sees the evaluation that comes next as `evaluations_done()`.
  virtual at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) = 0;

  const SamplerPlan& plan() const { return *plan_; }
  int64_t index() const;  // of the user's step, in the whole plan
  bool second() const;    // whether this is the second evaluation of its step
  // The picture or the noise that an output stands for, at this evaluation's level; the picture is clipped
  // where the model's settings say so.
  at::Tensor Picture(const at::Tensor& output, const at::Tensor& x) const;
  at::Tensor Noise(const at::Tensor& output, const at::Tensor& x) const;
  // What x has beside a picture.
  at::Tensor NoiseBeside(const at::Tensor& picture, const at::Tensor& x) const;
  at::Tensor Draw(const at::Tensor& like) const;
  void set_prediction(const at::Tensor& prediction) { prediction_ = prediction; }
  void TakeNoise(std::shared_ptr<NoiseSource> noise);  // null: a copy of its own

 private:
  at::Tensor Predicted(const at::Tensor& output, const at::Tensor& x) const;  // Picture, not clipped

  std::shared_ptr<const SamplerPlan> plan_;
  std::shared_ptr<NoiseSource> noise_;
  int64_t evaluation_;  // in the whole plan
  int64_t step_count_ = 0, steps_done_ = 0;
  at::Tensor prediction_;
};

struct SamplerOptions {
  int64_t steps = 30;
  SigmaSchedule schedule = SigmaSchedule::kDefault;
  AysTable ays = AysTable::kSd15;  // for SigmaSchedule::kAys
  // img2img: the share of the steps that is run, from the end. Not looked at when denoising_start is set.
  double strength = 1;
  // Hand-over between two models: the first one runs timesteps >= T·(1 − end), the second one those below.
  std::optional<double> denoising_start, denoising_end;
  // Share of noise: DDIM (0 when absent), TCD (0.3). Others take none.
  std::optional<double> eta;
  // What the model's settings say; absent: what the sampler's name says.
  std::optional<SolverSettings> solver;
  // Where noise comes from; absent: a source with seed 0. A caller that wants diffusers' pictures passes the
  // source that it drew the initial latents from.
  std::shared_ptr<NoiseSource> noise;
};

struct SamplerInfo {
  absl::string_view name;  // "dpmpp_2m_k"
  absl::string_view description;
  bool stochastic = false;    // draws noise in its steps
  bool respaced = false;      // takes karras, exponential, beta and ays
  bool spaced = false;        // takes trailing
  bool second_order = false;  // two evaluations a step
};

// All samplers, by name.
const std::vector<SamplerInfo>& AllSamplers();

// Of ParseSigmaSchedule, but for the empty one.
std::vector<absl::string_view> SigmaScheduleNames();

// Names of the API: "", "karras", "exponential", "beta", "trailing", "sgm_uniform", "simple", "ays".
// Errors: INVALID_ARGUMENT INVALID_FIELD on `field`.
absl::StatusOr<SigmaSchedule> ParseSigmaSchedule(absl::string_view name, absl::string_view field);

// Errors: INVALID_ARGUMENT INVALID_FIELD on params.sampler for a name that is not known or that does not go
// with the model's schedule or settings, params.schedule for a schedule that it does not take, and on
// params.steps, params.strength, params.denoising_start, params.denoising_end, params.eta.
absl::StatusOr<std::unique_ptr<Sampler>> MakeSampler(absl::string_view name,
                                                     std::shared_ptr<const NoiseSchedule> schedule,
                                                     const SamplerOptions& options);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_SAMPLER_H_
