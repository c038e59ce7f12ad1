#include "families/sampling/noise.h"

#include "ATen/ATen.h"
#include "ATen/CPUGeneratorImpl.h"

namespace latentd {

std::vector<at::Tensor> DrawNoise(uint64_t seed, const std::vector<int64_t>& shape, int count) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  std::vector<at::Tensor> draws;
  for (int i = 0; i < count; ++i) draws.push_back(at::randn(shape, generator, at::TensorOptions(at::kFloat)));
  return draws;
}

}  // namespace latentd
