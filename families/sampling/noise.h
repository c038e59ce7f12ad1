// Gaussian noise as the Python ecosystem draws it: on the CPU, fp32, from torch's generator.
#ifndef LATENTD_FAMILIES_SAMPLING_NOISE_H_
#define LATENTD_FAMILIES_SAMPLING_NOISE_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"

namespace latentd {

// `count` draws in a row from one generator seeded with `seed`, each of `shape`. Every picture has a
// generator of its own, so a picture does not depend on what else is in its batch. Any thread.
std::vector<at::Tensor> DrawNoise(uint64_t seed, const std::vector<int64_t>& shape, int count = 1);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_NOISE_H_
