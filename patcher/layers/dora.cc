#include "patcher/layers/dora.h"

namespace latentd {
namespace {

// A row or column of zeros stays zero.
constexpr double kNormFloor = 1.2e-7;

}  // namespace

absl::Status Dora::Check() const {
  if (absl::Status status = std::visit([](const auto& layer) { return layer.Check(); }, inner);
      !status.ok()) {
    return status;
  }
  const Extent extent = std::visit([](const auto& layer) { return layer.extent(); }, inner);
  if (!per_column() ? magnitude.numel() != extent.rows
                    : magnitude.size(1) != magnitude.numel() || extent.columns % magnitude.numel() != 0) {
    return BadLayer("the magnitudes do not fit the layer");
  }
  return absl::OkStatus();
}

Extent Dora::extent() const {
  Extent extent = std::visit([](const auto& layer) { return layer.extent(); }, inner);
  if (per_column()) extent.inputs = magnitude.numel();
  return extent;
}

at::Tensor Dora::Delta(at::IntArrayRef shape, const at::Tensor& base) const {
  const at::Tensor weight = Matrix(base);
  at::Tensor sum =
      std::visit([&](const auto& layer) { return layer.Delta(shape, base); }, inner).add_(weight);
  const at::Tensor m = magnitude.to(at::kFloat).flatten();
  if (!per_column()) {
    const at::Tensor norm = at::linalg_vector_norm(sum, 2, at::IntArrayRef{1}).clamp_min_(kNormFloor);
    return sum.mul_((m / norm).unsqueeze(1)).sub_(weight);
  }
  // [out, in, kernel], with a norm over rows and kernel.
  at::Tensor by_input = sum.view({shape[0], m.numel(), -1});
  const at::Tensor norm = at::linalg_vector_norm(by_input, 2, at::IntArrayRef{0, 2}).clamp_min_(kNormFloor);
  return by_input.mul_((m / norm).view({1, -1, 1})).reshape(weight.sizes()).sub_(weight);
}

}  // namespace latentd
