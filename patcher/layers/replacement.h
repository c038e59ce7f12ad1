// A value in place of the weight's. The norms of BFL's control LoRAs (`scale`).
//
// The one type that the user's weight does not scale, unless it is 0: the low-rank layers of such a file were
// trained with these values, and diffusers sets them at any strength. Where several patches set one tensor,
// the last in order of name does.
#ifndef LATENTD_PATCHER_LAYERS_REPLACEMENT_H_
#define LATENTD_PATCHER_LAYERS_REPLACEMENT_H_

#include "patcher/layers/layer_math.h"

namespace latentd {

struct Replacement {
  at::Tensor value;  // of the weight's shape

  template <class Visitor>
  void ForEachTensor(Visitor&& visit) {
    visit(value);
  }
  absl::Status Check() const {
    return value.dim() >= 1 && value.dim() <= 5 && value.numel() > 0 ? absl::OkStatus()
                                                                     : BadLayer("holds no number");
  }
  Extent extent() const { return {.rows = value.size(0), .columns = Columns(value)}; }
  int64_t rank() const { return 0; }
  at::Tensor Delta(at::IntArrayRef, const at::Tensor& base) const { return Matrix(value) - Matrix(base); }
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_REPLACEMENT_H_
