#include "patcher/layers/low_rank.h"

namespace latentd {

absl::Status LowRank::Check() const {
  if (!IsWeight(down) || !IsWeight(up)) return BadLayer("down and up must be matrices");
  if (absl::Status status = CheckRank(rank()); !status.ok()) return status;
  if (Columns(up) != rank())
    return BadLayer(absl::StrCat("down has rank ", rank(), ", up has ", Columns(up)));
  if (!mid.defined()) return absl::OkStatus();
  if (mid.dim() < 3 || mid.size(0) != rank() || mid.size(1) != rank() || Columns(down) != down.size(1)) {
    return BadLayer("mid does not fit down and up");
  }
  return absl::OkStatus();
}

Extent LowRank::extent() const {
  const int64_t kernel = mid.defined() ? Columns(mid) / mid.size(1) : 1;
  return {.rows = up.size(0), .columns = Columns(down) * kernel};
}

at::Tensor LowRank::Inner() const {
  if (!mid.defined()) return Matrix(down);
  // [m, n, k] × [n, i] → [m, i · k]
  return at::einsum("mnk,ni->mik", {mid.to(at::kFloat).flatten(2), Matrix(down)}).flatten(1);
}

at::Tensor LowRank::Delta(at::IntArrayRef, const at::Tensor&) const {
  return (Matrix(up) * scale).mm(Inner());
}

}  // namespace latentd
