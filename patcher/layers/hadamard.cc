#include "patcher/layers/hadamard.h"

namespace latentd {
namespace {

// [out, in · kernel].
at::Tensor Factor(const at::Tensor& a, const at::Tensor& b, const at::Tensor& core) {
  if (!core.defined()) return Matrix(a).mm(Matrix(b));
  const at::Tensor inner = at::einsum("ijk,jp->ipk", {core.to(at::kFloat).flatten(2), Matrix(b)}).flatten(1);
  return Matrix(a).t().mm(inner);
}

bool CoreFits(const at::Tensor& core, int64_t rank) {
  return core.dim() >= 3 && core.size(0) == rank && core.size(1) == rank;
}

}  // namespace

absl::Status Hadamard::Check() const {
  for (const at::Tensor* t : {&w1_a, &w1_b, &w2_a, &w2_b}) {
    if (!IsWeight(*t)) return BadLayer("hada_w1_a, hada_w1_b, hada_w2_a and hada_w2_b must be matrices");
  }
  if (absl::Status status = CheckRank(rank()); !status.ok()) return status;
  if (t1.defined() != t2.defined()) return BadLayer("only one of hada_t1 and hada_t2 is there");
  const bool tucker = t1.defined();
  const int64_t rank2 = w2_b.size(0);
  if (absl::Status status = CheckRank(rank2); !status.ok()) return status;
  const bool ranks = tucker ? w1_a.size(0) == rank() && w2_a.size(0) == rank2 && CoreFits(t1, rank()) &&
                                  CoreFits(t2, rank2) && t1.sizes().slice(2) == t2.sizes().slice(2)
                            : Columns(w1_a) == rank() && Columns(w2_a) == rank2;
  const bool outer = tucker ? Columns(w1_a) == Columns(w2_a) : w1_a.size(0) == w2_a.size(0);
  if (!ranks || !outer || Columns(w1_b) != Columns(w2_b))
    return BadLayer("the factors do not fit each other");
  return absl::OkStatus();
}

Extent Hadamard::extent() const {
  if (!t1.defined()) return {.rows = w1_a.size(0), .columns = Columns(w1_b)};
  return {.rows = Columns(w1_a), .columns = Columns(w1_b) * (Columns(t1) / t1.size(1))};
}

at::Tensor Hadamard::Delta(at::IntArrayRef, const at::Tensor&) const {
  return Factor(w1_a, w1_b, t1).mul_(Factor(w2_a, w2_b, t2)).mul_(scale);
}

}  // namespace latentd
