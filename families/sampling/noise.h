// Gaussian noise as the Python ecosystem draws it: on the CPU, fp32, from torch's generator.
#ifndef LATENTD_FAMILIES_SAMPLING_NOISE_H_
#define LATENTD_FAMILIES_SAMPLING_NOISE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Generator.h"
#include "ATen/core/Tensor.h"

namespace latentd {

// Draws in a row from one generator. Every picture has a source of its own, so a picture does not depend on
// what else is in its batch. One thread at a time.
class NoiseSource {
 public:
  explicit NoiseSource(uint64_t seed);

  // fp32, in host memory.
  at::Tensor Draw(at::IntArrayRef shape);
  // One that goes on with the same draws as this one.
  std::shared_ptr<NoiseSource> Clone() const;

 private:
  explicit NoiseSource(at::Generator generator);

  at::Generator generator_;
};

// The first `count` draws of a source with this seed, each of `shape`. Any thread.
std::vector<at::Tensor> DrawNoise(uint64_t seed, const std::vector<int64_t>& shape, int count = 1);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_NOISE_H_
