// One running generation, picture by picture. Whoever runs it owns the loop, so that progress, previews,
// cancelling and fairness between sessions are written once; what a turn is, and that it leaves nothing that
// is not finite behind, is written here; a family says what becomes of one picture in one step.
//
// One thread at a time.
#ifndef LATENTD_FAMILIES_DENOISER_H_
#define LATENTD_FAMILIES_DENOISER_H_

#include <cstdint>
#include <optional>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "families/finite_watch.h"
#include "patcher/weight_view.h"

namespace latentd {

struct StepReport {
  int64_t index = 0;  // 1-based, after the step
  int64_t count = 0;
  double sigma = 0;  // noise level that the step started from
};

class Denoiser {
 public:
  virtual ~Denoiser() = default;
  virtual int64_t step_count() const = 0;
  virtual int64_t picture_count() const = 0;
  virtual bool done() const = 0;

  // One picture's share of the step that is under way; pictures have their turns in order. A report once the
  // last one had its turn, which ends the step. A turn that fails, or that an exception leaves, changes
  // nothing: the next call makes it again, with other weights in memory if need be. Errors:
  // FAILED_PRECONDITION NON_FINITE where latents are in host memory. REQUIRES: !done().
  absl::StatusOr<std::optional<StepReport>> Turn(const WeightView& weights);

  // All turns of a step; for whoever shares the device with nobody.
  absl::StatusOr<StepReport> Step(const WeightView& weights);

  // NON_FINITE when latents on a device stopped being finite, with the first step that did it. Waits for the
  // device: for the end of a run.
  absl::Status CheckFinite() const { return finite_.Check(); }

  // Current latents [N, C, h, w] in the unpacked form that Pipeline::Decode takes, as of the last whole step.
  // Copies, to host memory.
  virtual at::Tensor latents() const = 0;
  // What the last step takes the finished latents to be, for previews; in the same form.
  virtual at::Tensor prediction() const { return latents(); }

 protected:
  // The step of one picture: puts the result aside, over what an earlier try has put there, and returns its
  // latents, in whatever form. Called for picture 0, 1, … of a step.
  virtual absl::StatusOr<at::Tensor> StepPicture(const WeightView& weights, int64_t picture) = 0;
  // All pictures were stepped: what was put aside takes the place of what was there before.
  virtual StepReport EndStep() = 0;

 private:
  int64_t step_ = 1;     // that is under way
  int64_t picture_ = 0;  // whose turn it is
  FiniteWatch finite_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_DENOISER_H_
