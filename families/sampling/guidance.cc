#include "families/sampling/guidance.h"

#include <numeric>
#include <vector>

#include "ATen/ATen.h"

namespace latentd {
namespace {

// Of each picture by itself, [N, 1, …].
at::Tensor Deviation(const at::Tensor& prediction) {
  std::vector<int64_t> dims(static_cast<size_t>(prediction.dim() - 1));
  std::iota(dims.begin(), dims.end(), 1);
  return prediction.std(at::OptionalIntArrayRef(dims), /*correction=*/1, /*keepdim=*/true);
}

}  // namespace

at::Tensor Guide(const at::Tensor& positive, const at::Tensor& negative, double scale) {
  return at::add(negative, positive - negative, scale);
}

at::Tensor GuidanceRescale(const at::Tensor& guided, const at::Tensor& positive, double share) {
  if (share == 0) return guided;
  return guided * (Deviation(positive) / Deviation(guided) * share + (1 - share));
}

}  // namespace latentd
