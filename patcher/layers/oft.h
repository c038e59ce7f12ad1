// OFT: output rows are rotated in blocks, W'_k = R_kᵀ · W_k, and may be rescaled. Δ = W' − W.
//
// Qiu et al. 2023, "Controlling Text-to-Image Diffusion by Orthogonal Finetuning", section 3; as kohya's
// sd-scripts and LyCORIS ("Diag-OFT") store it: Q = B − Bᵀ from each block B, R = (I + Q) · (I − Q)⁻¹
// (Cayley). The file's alpha is no scale but a constraint: where the norm of all Q is above alpha · out, Q is
// shrunk to it.
//
// A fused layer of kohya's holds one set of blocks for each of its parts ("oft_blocks.0", …), each with a
// norm of its own.
#ifndef LATENTD_PATCHER_LAYERS_OFT_H_
#define LATENTD_PATCHER_LAYERS_OFT_H_

#include <vector>

#include "patcher/layers/layer_math.h"

namespace latentd {

struct Oft {
  std::vector<at::Tensor> blocks;  // [n, b, b] each; in order of rows
  at::Tensor rescale;              // [out, 1…], or undefined
  double alpha = 0;                // 0 = no constraint

  template <class Visitor>
  void ForEachTensor(Visitor&& visit) {
    for (at::Tensor& t : blocks) visit(t);
    if (rescale.defined()) visit(rescale);
  }
  absl::Status Check() const;
  Extent extent() const;
  int64_t rank() const { return 0; }
  at::Tensor Delta(at::IntArrayRef shape, const at::Tensor& base) const;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_OFT_H_
