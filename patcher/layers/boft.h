// BOFT: output rows go through m butterfly stages of block rotations, and may be rescaled. Δ = W' − W.
//
// Liu et al. 2023, "Parameter-Efficient Orthogonal Finetuning via Butterfly Factorization", section 4, as
// LyCORIS stores and orders it: `oft_blocks` with four dimensions. Stage i rotates rows that lie 2^i · b/2
// apart; R and the constraint as in oft.h, but it is R that is applied, not Rᵀ.
#ifndef LATENTD_PATCHER_LAYERS_BOFT_H_
#define LATENTD_PATCHER_LAYERS_BOFT_H_

#include "patcher/layers/layer_math.h"

namespace latentd {

struct Boft {
  at::Tensor blocks;   // [m, n, b, b]
  at::Tensor rescale;  // [out, 1…], or undefined
  double alpha = 0;    // 0 = no constraint

  template <class Visitor>
  void ForEachTensor(Visitor&& visit) {
    visit(blocks);
    if (rescale.defined()) visit(rescale);
  }
  absl::Status Check() const;
  Extent extent() const { return {.rows = blocks.size(1) * blocks.size(2)}; }
  int64_t rank() const { return 0; }
  at::Tensor Delta(at::IntArrayRef shape, const at::Tensor& base) const;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_BOFT_H_
