// GLoRA as LyCORIS trains it: Δ = scale · (W · a1 · a2 + b1 · b2), scale = alpha / rank, or 1 without alpha.
//
// Chavan et al. 2023, "One-for-All: Generalized LoRA", equation 9, its A and B alone. Files come in two
// orders: today's is a1 [in, r], a2 [r, in], b1 [out, r], b2 [r, in]; the older one has both pairs the other
// way round (Δ = W · a2 · a1 + b2 · b1). Shapes tell them apart.
#ifndef LATENTD_PATCHER_LAYERS_GLORA_H_
#define LATENTD_PATCHER_LAYERS_GLORA_H_

#include "patcher/layers/layer_math.h"

namespace latentd {

struct Glora {
  at::Tensor a1, a2, b1, b2;  // in today's order after Arrange()
  double scale = 1;

  // Brings a file's tensors into today's order. A rank below the width decides; equal, today's is meant.
  void Arrange();
  template <class Visitor>
  void ForEachTensor(Visitor&& visit) {
    for (at::Tensor* t : {&a1, &a2, &b1, &b2}) visit(*t);
  }
  absl::Status Check() const;
  Extent extent() const;
  int64_t rank() const { return a2.size(0); }
  at::Tensor Delta(at::IntArrayRef shape, const at::Tensor& base) const;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_GLORA_H_
