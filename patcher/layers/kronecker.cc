#include "patcher/layers/kronecker.h"

#include <utility>

namespace latentd {
namespace {

absl::Status CheckFactor(absl::string_view name, const at::Tensor& full, const at::Tensor& a,
                         const at::Tensor& b, const at::Tensor& core) {
  if (full.defined()) {
    if (a.defined() || b.defined() || core.defined()) return BadLayer(absl::StrCat(name, " is there twice"));
    return IsWeight(full) ? absl::OkStatus() : BadLayer(absl::StrCat(name, " must be a matrix"));
  }
  if (!IsWeight(a) || !IsWeight(b)) return BadLayer(absl::StrCat(name, " is incomplete"));
  if (absl::Status status = CheckRank(b.size(0)); !status.ok()) return status;
  const bool fits = core.defined() ? core.dim() >= 3 && a.size(0) == core.size(0) && b.size(0) == core.size(1)
                                   : Columns(a) == b.size(0);
  return fits ? absl::OkStatus() : BadLayer(absl::StrCat("the factors of ", name, " do not fit each other"));
}

// Rows and numbers in a row.
std::pair<int64_t, int64_t> Size(const at::Tensor& full, const at::Tensor& a, const at::Tensor& b,
                                 const at::Tensor& core) {
  if (full.defined()) return {full.size(0), Columns(full)};
  if (core.defined()) return {Columns(a), Columns(b) * (Columns(core) / core.size(1))};
  return {a.size(0), Columns(b)};
}

}  // namespace

absl::Status Kronecker::Check() const {
  if (absl::Status status = CheckFactor("lokr_w1", w1, w1_a, w1_b, {}); !status.ok()) return status;
  if (w1.defined() && Columns(w1) != w1.size(1)) return BadLayer("lokr_w1 must be a matrix");
  return CheckFactor("lokr_w2", w2, w2_a, w2_b, t2);
}

Extent Kronecker::extent() const {
  const auto [rows1, columns1] = Size(w1, w1_a, w1_b, {});
  const auto [rows2, columns2] = Size(w2, w2_a, w2_b, t2);
  return {.rows = rows1 * rows2, .columns = columns1 * columns2};
}

at::Tensor Kronecker::Delta(at::IntArrayRef, const at::Tensor&) const {
  const at::Tensor first = w1.defined() ? Matrix(w1) : Matrix(w1_a).mm(Matrix(w1_b));
  at::Tensor second;
  if (w2.defined()) {
    second = Matrix(w2);
  } else if (t2.defined()) {
    second = Matrix(w2_a).t().mm(
        at::einsum("ijk,jd->idk", {t2.to(at::kFloat).flatten(2), Matrix(w2_b)}).flatten(1));
  } else {
    second = Matrix(w2_a).mm(Matrix(w2_b));
  }
  // A kernel's numbers stay together: [c · d · kernel] is the order of the flattened weight, so the product
  // of the flattened factors is the flattened product.
  return at::kron(first, second * scale);
}

}  // namespace latentd
