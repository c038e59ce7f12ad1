#include "patcher/layers/glora.h"

#include <utility>

namespace latentd {

void Glora::Arrange() {
  if (!IsWeight(a1) || !IsWeight(a2)) return;
  if (a1.size(0) < Columns(a1)) {
    std::swap(a1, a2);
    std::swap(b1, b2);
  }
}

absl::Status Glora::Check() const {
  for (const at::Tensor* t : {&a1, &a2, &b1, &b2}) {
    if (!IsWeight(*t)) return BadLayer("a1, a2, b1 and b2 must be matrices");
  }
  if (absl::Status status = CheckRank(rank()); !status.ok()) return status;
  if (absl::Status status = CheckRank(b2.size(0)); !status.ok()) return status;
  if (Columns(a1) != rank() || a1.size(0) != Columns(a2) || Columns(b1) != b2.size(0) ||
      b2.size(1) != a1.size(0)) {
    return BadLayer("a1, a2, b1 and b2 do not fit each other");
  }
  return absl::OkStatus();
}

Extent Glora::extent() const { return {.rows = b1.size(0), .columns = Columns(b2), .inputs = a1.size(0)}; }

at::Tensor Glora::Delta(at::IntArrayRef shape, const at::Tensor& base) const {
  // Over a convolution's inputs, at each place of its kernel.
  const at::Tensor kernel_last = base.reshape({shape[0], shape[1], -1});
  const at::Tensor mixed =
      at::einsum("oik,ir,rj->ojk", {kernel_last, Matrix(a1), Matrix(a2)}).reshape({shape[0], -1});
  return Matrix(b1).mm(Matrix(b2)).add_(mixed).mul_(scale);
}

}  // namespace latentd
