// (IA)³: Δ = W ∘ v, v over input columns or over output rows.
//
// Liu et al. 2022, "Few-Shot Parameter-Efficient Fine-Tuning", section 3.3, with v the difference from one as
// LyCORIS stores it.
#ifndef LATENTD_PATCHER_LAYERS_IA3_H_
#define LATENTD_PATCHER_LAYERS_IA3_H_

#include "patcher/layers/layer_math.h"

namespace latentd {

struct Ia3 {
  at::Tensor vector;  // [in] or [out], with ones around it for convolutions
  bool on_input = false;

  template <class Visitor>
  void ForEachTensor(Visitor&& visit) {
    visit(vector);
  }
  absl::Status Check() const {
    if (vector.numel() == 0) return BadLayer("holds no number");
    int64_t longest = 1;
    for (int64_t extent : vector.sizes()) longest = std::max(longest, extent);
    return longest == vector.numel() ? absl::OkStatus() : BadLayer("weight must be a vector");
  }
  Extent extent() const {
    return on_input ? Extent{.inputs = vector.numel()} : Extent{.rows = vector.numel()};
  }
  int64_t rank() const { return 0; }
  at::Tensor Delta(at::IntArrayRef shape, const at::Tensor& base) const {
    const at::Tensor v = vector.to(at::kFloat).flatten();
    if (!on_input) return Matrix(base) * v.unsqueeze(1);
    return (base.reshape({shape[0], shape[1], -1}) * v.view({1, -1, 1})).flatten(1);
  }
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_IA3_H_
