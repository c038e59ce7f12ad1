#include "families/sampling/noise.h"

#include <utility>

#include "ATen/ATen.h"
#include "ATen/CPUGeneratorImpl.h"

namespace latentd {

NoiseSource::NoiseSource(uint64_t seed) : generator_(at::detail::createCPUGenerator(seed)) {}

NoiseSource::NoiseSource(at::Generator generator) : generator_(std::move(generator)) {}

at::Tensor NoiseSource::Draw(at::IntArrayRef shape) {
  return at::randn(shape, generator_, at::TensorOptions(at::kFloat));
}

std::shared_ptr<NoiseSource> NoiseSource::Clone() const {
  return std::shared_ptr<NoiseSource>(new NoiseSource(generator_.clone()));
}

std::vector<at::Tensor> DrawNoise(uint64_t seed, const std::vector<int64_t>& shape, int count) {
  NoiseSource source(seed);
  std::vector<at::Tensor> draws;
  for (int i = 0; i < count; ++i) draws.push_back(source.Draw(shape));
  return draws;
}

}  // namespace latentd
