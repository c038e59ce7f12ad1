#include "patcher/layers/sparse_low_rank.h"

namespace latentd {

absl::Status SparseLowRank::Check() const {
  if (absl::Status status = low_rank.Check(); !status.ok()) return status;
  const Extent extent = low_rank.extent();
  if (rows != extent.rows || columns != extent.columns) {
    return BadLayer(absl::StrCat("bias_size is [", rows, ", ", columns, "], the low-rank part is [",
                                 extent.rows, ", ", extent.columns, "]"));
  }
  if (places.dim() != 2 || places.size(0) != 2 || values.dim() != 1 || values.size(0) != places.size(1)) {
    return BadLayer("bias_indices and bias_values do not fit each other");
  }
  if (values.numel() == 0) return absl::OkStatus();
  for (int64_t d = 0; d < 2; ++d) {
    const at::Tensor line = places[d].to(at::kLong);
    if (line.min().item<int64_t>() < 0 || line.max().item<int64_t>() >= (d == 0 ? rows : columns)) {
      return BadLayer("bias_indices lie outside of bias_size");
    }
  }
  return absl::OkStatus();
}

at::Tensor SparseLowRank::Delta(at::IntArrayRef shape, const at::Tensor& base) const {
  const at::Tensor delta = low_rank.Delta(shape, base);
  const at::Tensor flat = places[0].to(at::kLong) * columns + places[1].to(at::kLong);
  delta.view({-1}).index_add_(0, flat, values.to(at::kFloat) * low_rank.scale);
  return delta;
}

}  // namespace latentd
