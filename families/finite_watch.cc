#include "families/finite_watch.h"

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"

namespace latentd {

at::Tensor FiniteFlag(const at::Tensor& x) {
  c10::InferenceMode inference;
  // Both carry NaN on, and one of them an infinity: one pass, and no tensor of x's size.
  const auto [least, most] = at::aminmax(x);
  return least.mul(0).add(most.mul(0)).eq(0);  // 0 times what is not finite is NaN
}

bool IsFinite(const at::Tensor& x) {
  if (!x.defined() || x.numel() == 0 || !at::isFloatingType(x.scalar_type())) return true;
  return FiniteFlag(x).item<bool>();
}

absl::Status NonFinite(absl::string_view phase, const ErrorDetails& where) {
  std::string place;
  for (const auto& [name, value] : where) absl::StrAppend(&place, ", ", name, " ", value);
  ErrorDetails details = where;
  details["phase"] = std::string(phase);
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "NON_FINITE",
      absl::StrCat("numbers are no longer finite (", phase, place,
                   "): a weight of the model or of a LoRA is broken, a strength is too large, or "
                   "sampler and schedule do not go together; try without LoRAs, then another sampler"),
      details);
}

absl::Status FiniteWatch::Look(int64_t step, int64_t picture, const at::Tensor& latents) {
  if (!latents.is_cpu()) {
    flags_.push_back({step, picture, FiniteFlag(latents)});
    return absl::OkStatus();
  }
  if (IsFinite(latents)) return absl::OkStatus();
  return NonFinite("denoise", {{"step", absl::StrCat(step)}, {"picture", absl::StrCat(picture)}});
}

absl::Status FiniteWatch::Check() const {
  if (flags_.empty()) return absl::OkStatus();
  c10::InferenceMode inference;
  std::vector<at::Tensor> all;
  for (const Flag& flag : flags_) all.push_back(flag.finite);
  const at::Tensor finite = at::stack(all).to(at::kCPU);
  for (size_t i = 0; i < flags_.size(); ++i) {
    if (finite.const_data_ptr<bool>()[i]) continue;
    return NonFinite("denoise",
                     {{"step", absl::StrCat(flags_[i].step)}, {"picture", absl::StrCat(flags_[i].picture)}});
  }
  return absl::OkStatus();
}

}  // namespace latentd
