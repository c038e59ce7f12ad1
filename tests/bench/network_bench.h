// A network without the pipeline around it, timed: the UNet of an SD model on a batch of two, as guidance
// gives it, or a VAE's decoder. Weights are loaded as the server loads them, and read through a view. ATen's
// pool of threads.
//
//   const auto unet = OpenUNet("build/bench/sd15", "build/bench/sd15-512.safetensors");
//   double ms = unet->Call().wall;
#ifndef LATENTD_TESTS_BENCH_NETWORK_BENCH_H_
#define LATENTD_TESTS_BENCH_NETWORK_BENCH_H_

#include <cstdint>
#include <memory>
#include <string>

#include "tests/bench/bench_model.h"

namespace latentd::bench {

class NetworkBench {
 public:
  virtual ~NetworkBench() = default;
  // From now on, calls take the tensors of this safetensors file.
  virtual void SetInputs(const std::string& file) = 0;
  // From now on, calls have this LoRA beside the weights, or with an empty name none.
  virtual void SetLora(const std::string& file) = 0;
  virtual Elapsed Call() = 0;
  // Milliseconds of the last call's longest slice: how long an executor is not asked whether to go on.
  virtual double longest_slice() const = 0;
  // The last call's, as plain fp32.
  virtual void WriteResult(const std::string& file) const = 0;
};

// `folder`: a diffusers folder, of which unet/ is read. Inputs: `latents` [2, C, h, w], `context` [2, tokens,
// dim], `timestep` [1], and for models that take them `pooled` [2, dim] and `time_ids` [2, n].
std::unique_ptr<NetworkBench> OpenUNet(const std::string& folder);

// Of `folder`, vae/ is read. Inputs: `vae_latents` [1, C, h, w].
std::unique_ptr<NetworkBench> OpenVaeDecoder(const std::string& folder);

// The most bytes that this process ever had resident.
int64_t PeakResidentBytes();

}  // namespace latentd::bench

#endif  // LATENTD_TESTS_BENCH_NETWORK_BENCH_H_
