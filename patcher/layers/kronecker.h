// LoKr: Δ = scale · w1 ⊗ w2, each factor full or a product of two.
//
// LyCORIS (arXiv 2309.14859), section 3.3. scale = alpha / rank where a factor is a product; 1 when both are
// full, whatever alpha says, or without alpha. w1 is a matrix [a, c], w2 is [b, d, …]; Δ is [a · b, c · d,
// …]. With a Tucker core, w2 = Σ_ij t2[i,j,…] · w2_a[i,b] · w2_b[j,d].
#ifndef LATENTD_PATCHER_LAYERS_KRONECKER_H_
#define LATENTD_PATCHER_LAYERS_KRONECKER_H_

#include "patcher/layers/layer_math.h"

namespace latentd {

struct Kronecker {
  at::Tensor w1, w2;      // full factors; undefined where a product stands for them
  at::Tensor w1_a, w1_b;  // [a, rank], [rank, c]
  at::Tensor w2_a, w2_b;  // [b, rank], [rank, d · kernel]; with a core [rank, b], [rank, d]
  at::Tensor t2;          // [rank, rank, …], or undefined
  double scale = 1;

  template <class Visitor>
  void ForEachTensor(Visitor&& visit) {
    for (at::Tensor* t : {&w1, &w1_a, &w1_b, &w2, &w2_a, &w2_b, &t2}) {
      if (t->defined()) visit(*t);
    }
  }
  absl::Status Check() const;
  Extent extent() const;
  // 0 when both factors are full.
  int64_t rank() const { return w1_b.defined() ? w1_b.size(0) : w2_b.defined() ? w2_b.size(0) : 0; }
  at::Tensor Delta(at::IntArrayRef shape, const at::Tensor& base) const;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_KRONECKER_H_
