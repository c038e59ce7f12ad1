// LoRA and LoCon: Δ = scale · up · [mid ·] down, scale = alpha / rank, or 1 without alpha.
//
// Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1. LoCon is the same for
// convolutions: down has the kernel's size, up is 1×1; or both are 1×1 and a Tucker core `mid` has it:
// Δ[o,i,…] = scale · Σ_mn up[o,m] · mid[m,n,…] · down[n,i] (LyCORIS, Yeh et al. 2023, arXiv 2309.14859,
// section 3.2).
#ifndef LATENTD_PATCHER_LAYERS_LOW_RANK_H_
#define LATENTD_PATCHER_LAYERS_LOW_RANK_H_

#include "patcher/layers/layer_math.h"

namespace latentd {

struct LowRank {
  at::Tensor down;  // [rank, in, …], storage type of the file
  at::Tensor up;    // [out, rank, 1…]
  at::Tensor mid;   // [rank, rank, …], or undefined
  double scale = 1;

  template <class Visitor>
  void ForEachTensor(Visitor&& visit) {
    for (at::Tensor* t : {&down, &up, &mid}) {
      if (t->defined()) visit(*t);
    }
  }
  // Do the tensors fit each other? Errors: INVALID_ARGUMENT, in words.
  absl::Status Check() const;
  Extent extent() const;
  int64_t rank() const { return down.size(0); }
  // What comes before `up`: down, with mid in it. [rank, numbers in a row of the weight], fp32.
  at::Tensor Inner() const;
  // [rows, columns], fp32. REQUIRES: Check() is OK; `shape` fits extent().
  at::Tensor Delta(at::IntArrayRef shape, const at::Tensor& base) const;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_LOW_RANK_H_
