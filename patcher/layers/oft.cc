#include "patcher/layers/oft.h"

namespace latentd {
namespace {

// As in the trainers, so that a norm of zero divides nothing.
constexpr double kNormFloor = 1e-8;

}  // namespace

absl::Status Oft::Check() const {
  if (blocks.empty()) return BadLayer("holds no blocks");
  for (const at::Tensor& b : blocks) {
    if (b.dim() != 3 || b.numel() == 0 || b.size(1) != b.size(2))
      return BadLayer("oft_blocks must be square blocks");
    if (b.size(1) > kMaxRank) return BadLayer(absl::StrCat("blocks of ", b.size(1), " are out of range"));
  }
  if (rescale.defined() && rescale.numel() != extent().rows)
    return BadLayer("rescale does not fit the blocks");
  return absl::OkStatus();
}

Extent Oft::extent() const {
  Extent extent{.rows = 0};
  for (const at::Tensor& b : blocks) extent.rows += b.size(0) * b.size(1);
  return extent;
}

at::Tensor Oft::Delta(at::IntArrayRef shape, const at::Tensor& base) const {
  const at::Tensor weight = Matrix(base);
  std::vector<at::Tensor> rotated;
  int64_t row = 0;
  for (const at::Tensor& b : blocks) {
    const int64_t rows = b.size(0) * b.size(1);
    const at::Tensor raw = b.to(at::kFloat);
    at::Tensor q = raw - raw.transpose(1, 2);
    if (alpha > 0) {
      const double limit = alpha * static_cast<double>(shape[0]);
      const double norm = q.norm().item<double>() + kNormFloor;
      if (norm > limit) q.mul_(limit / norm);
    }
    // Rᵀ = (I + Q)⁻¹ · (I − Q), for Qᵀ = −Q.
    const at::Tensor eye = at::eye(b.size(1), q.options());
    const at::Tensor part = weight.narrow(0, row, rows).view({b.size(0), b.size(1), -1});
    rotated.push_back(at::linalg_solve(eye + q, (eye - q).bmm(part)).reshape({rows, -1}));
    row += rows;
  }
  at::Tensor result = at::cat(rotated, 0);
  if (rescale.defined()) result.mul_(rescale.to(at::kFloat).view({-1, 1}));
  return result.sub_(weight);
}

}  // namespace latentd
