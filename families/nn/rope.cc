#include "families/nn/rope.h"

#include "ATen/ATen.h"

namespace latentd {

at::Tensor RopeTable(const at::Tensor& positions, const std::vector<int64_t>& axes, double theta) {
  std::vector<at::Tensor> parts;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    const int64_t dim = axes[axis];
    at::Tensor exponents = at::arange(0, dim, 2, at::kDouble).div_(static_cast<double>(dim));
    at::Tensor frequencies = at::pow(theta, exponents).reciprocal_();
    parts.push_back(at::outer(positions.select(1, static_cast<int64_t>(axis)).to(at::kDouble), frequencies));
  }
  const at::Tensor angles = at::cat(parts, 1);
  return at::complex(angles.cos().to(at::kFloat), angles.sin().to(at::kFloat)).unsqueeze(1);
}

at::Tensor ApplyRopeInPlace(at::Tensor x, const at::Tensor& table) {
  at::view_as_complex(x.unflatten(-1, {-1, 2})).mul_(table);
  return x;
}

}  // namespace latentd
