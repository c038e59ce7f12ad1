#include "patcher/layers/boft.h"

namespace latentd {
namespace {

constexpr double kNormFloor = 1e-8;  // as in oft.cc
constexpr int64_t kMaxStages = 32;

}  // namespace

absl::Status Boft::Check() const {
  if (blocks.dim() != 4 || blocks.numel() == 0 || blocks.size(2) != blocks.size(3) ||
      blocks.size(2) % 2 != 0) {
    return BadLayer("oft_blocks must be stages of square blocks of even size");
  }
  if (blocks.size(2) > kMaxRank)
    return BadLayer(absl::StrCat("blocks of ", blocks.size(2), " are out of range"));
  const int64_t rows = extent().rows;
  if (blocks.size(0) > kMaxStages || rows % (blocks.size(2) << (blocks.size(0) - 1)) != 0) {
    return BadLayer(absl::StrCat(blocks.size(0), " stages do not fit ", rows, " rows"));
  }
  if (rescale.defined() && rescale.numel() != rows) return BadLayer("rescale does not fit the blocks");
  return absl::OkStatus();
}

at::Tensor Boft::Delta(at::IntArrayRef shape, const at::Tensor& base) const {
  const at::Tensor weight = Matrix(base);
  const int64_t rows = weight.size(0), n = blocks.size(1), b = blocks.size(2);
  const at::Tensor raw = blocks.to(at::kFloat);
  at::Tensor q = raw - raw.transpose(2, 3);
  if (alpha > 0) {
    const double limit = alpha * static_cast<double>(shape[0]);
    const double norm = q.norm().item<double>() + kNormFloor;
    if (norm > limit) q.mul_(limit / norm);
  }
  const at::Tensor eye = at::eye(b, q.options());
  at::Tensor result = weight;
  for (int64_t i = 0; i < blocks.size(0); ++i) {
    const int64_t k = (int64_t{1} << i) * (b / 2);
    result = result.reshape({-1, 2, k, weight.size(1)}).transpose(1, 2).reshape({n, b, -1});
    result = at::linalg_solve(eye - q[i], (eye + q[i]).bmm(result));
    result = result.reshape({-1, k, 2, weight.size(1)}).transpose(1, 2).reshape({rows, -1});
  }
  if (rescale.defined()) result = result * rescale.to(at::kFloat).view({-1, 1});
  return result - weight;
}

}  // namespace latentd
