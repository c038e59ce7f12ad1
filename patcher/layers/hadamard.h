// LoHa: Δ = scale · (w1_a · w1_b) ∘ (w2_a · w2_b), scale = alpha / rank, or 1 without alpha.
//
// Hyeon-Woo et al. 2021, "FedPara", proposition 2; LyCORIS (arXiv 2309.14859), section 3.3. With Tucker
// cores, each factor is Σ_ij t[i,j,…] · w_a[i,o] · w_b[j,p].
#ifndef LATENTD_PATCHER_LAYERS_HADAMARD_H_
#define LATENTD_PATCHER_LAYERS_HADAMARD_H_

#include "patcher/layers/layer_math.h"

namespace latentd {

struct Hadamard {
  at::Tensor w1_a, w2_a;  // [out, rank]; with cores [rank, out]
  at::Tensor w1_b, w2_b;  // [rank, in · kernel]; with cores [rank, in]
  at::Tensor t1, t2;      // [rank, rank, …], or both undefined
  double scale = 1;

  template <class Visitor>
  void ForEachTensor(Visitor&& visit) {
    for (at::Tensor* t : {&w1_a, &w1_b, &w2_a, &w2_b, &t1, &t2}) {
      if (t->defined()) visit(*t);
    }
  }
  absl::Status Check() const;
  Extent extent() const;
  int64_t rank() const { return w1_b.size(0); }
  at::Tensor Delta(at::IntArrayRef shape, const at::Tensor& base) const;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_HADAMARD_H_
