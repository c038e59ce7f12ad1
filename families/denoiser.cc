#include "families/denoiser.h"

#include "cache/base/error.h"

namespace latentd {

absl::StatusOr<std::optional<StepReport>> Denoiser::Turn(const WeightView& weights) {
  ASSIGN_OR_RETURN(const at::Tensor latents, StepPicture(weights, picture_));
  RETURN_IF_ERROR(finite_.Look(step_, picture_, latents));
  if (++picture_ < picture_count()) return std::nullopt;
  picture_ = 0;
  ++step_;
  return EndStep();
}

absl::StatusOr<StepReport> Denoiser::Step(const WeightView& weights) {
  while (true) {
    ASSIGN_OR_RETURN(const std::optional<StepReport> report, Turn(weights));
    if (report) return *report;
  }
}

}  // namespace latentd
