// A whole difference: Δ = diff. LyCORIS "full" and "norm" (`w_norm`), and what extraction tools write.
#ifndef LATENTD_PATCHER_LAYERS_DIFFERENCE_H_
#define LATENTD_PATCHER_LAYERS_DIFFERENCE_H_

#include "patcher/layers/layer_math.h"

namespace latentd {

struct Difference {
  at::Tensor diff;  // of the weight's shape

  template <class Visitor>
  void ForEachTensor(Visitor&& visit) {
    visit(diff);
  }
  absl::Status Check() const {
    return diff.dim() >= 1 && diff.dim() <= 5 && diff.numel() > 0 ? absl::OkStatus()
                                                                  : BadLayer("holds no number");
  }
  Extent extent() const { return {.rows = diff.size(0), .columns = Columns(diff)}; }
  int64_t rank() const { return 0; }
  at::Tensor Delta(at::IntArrayRef, const at::Tensor&) const { return Matrix(diff); }
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_DIFFERENCE_H_
