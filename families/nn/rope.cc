#include "families/nn/rope.h"

#include <algorithm>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "families/nn/kernels.h"

namespace latentd {

at::Tensor RopeTable(const at::Tensor& positions, const std::vector<int64_t>& axes, double theta) {
  const at::TensorOptions options = positions.options().dtype(at::kDouble);
  std::vector<at::Tensor> parts;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    const int64_t dim = axes[axis];
    at::Tensor exponents = at::arange(0, dim, 2, options).div_(static_cast<double>(dim));
    at::Tensor frequencies = at::pow(theta, exponents).reciprocal_();
    parts.push_back(at::outer(positions.select(1, static_cast<int64_t>(axis)).to(at::kDouble), frequencies));
  }
  const at::Tensor angles = at::cat(parts, 1);
  return at::complex(angles.cos().to(at::kFloat), angles.sin().to(at::kFloat)).unsqueeze(1);
}

void NormRopeTo(at::Tensor out, const at::Tensor& x, const at::Tensor& weight, double eps,
                const at::Tensor& table) {
  const int64_t tokens = out.size(1), heads = out.size(2), dim = out.size(3);
  const bool in_host_memory = x.is_cpu() && out.is_cpu() && weight.is_cpu() && table.is_cpu();
  const bool own_kernel = in_host_memory && x.scalar_type() == at::kFloat && x.is_contiguous() &&
                          out.is_contiguous() && table.is_contiguous() && weight.is_contiguous();
  if (!own_kernel) {
    NormRopeComposed(out, x, weight, eps, table);
    return;
  }
  const float* from = x.const_data_ptr<float>();
  const float* scale = weight.const_data_ptr<float>();
  const auto* turns = static_cast<const float*>(table.const_data_ptr());  // (cos, sin) pairs
  float* to = out.mutable_data_ptr<float>();
  const int64_t row = heads * dim;
  at::parallel_for(0, tokens, std::max<int64_t>(1, kKernelGrain / row), [&](int64_t begin, int64_t end) {
    NormRopeKernel(from + begin * row, scale, turns + begin * dim, to + begin * row, end - begin, heads, dim,
                   static_cast<float>(eps));
  });
}

void NormRopeComposed(at::Tensor out, const at::Tensor& x, const at::Tensor& weight, double eps,
                      const at::Tensor& table) {
  const at::Tensor normed = at::rms_norm(x.view(out.sizes()), {out.size(3)}, weight, eps);
  if (out.scalar_type() != at::kFloat) {
    // Turned in fp32, as in diffusers; there are no complex numbers of less.
    const at::Tensor pairs = at::view_as_complex(normed.to(at::kFloat).unflatten(-1, {-1, 2}));
    out.copy_(at::view_as_real(pairs * table).flatten(-2));
    return;
  }
  at::Tensor turned = at::view_as_complex(out.unflatten(-1, {-1, 2}));
  at::mul_out(turned, at::view_as_complex(normed.unflatten(-1, {-1, 2})), table);
}

}  // namespace latentd
