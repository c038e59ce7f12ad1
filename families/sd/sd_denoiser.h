// One running generation of SD 1.5 or SDXL: sampler and network, picture by picture and tile by tile, and
// what inpainting does between steps.
#ifndef LATENTD_FAMILIES_SD_SD_DENOISER_H_
#define LATENTD_FAMILIES_SD_SD_DENOISER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "families/family.h"
#include "families/sampling/noise.h"
#include "families/sampling/sampler.h"
#include "families/sd/sd_predictor.h"
#include "families/sd/sd_tiles.h"

namespace latentd {

// Latents here are [1, C, h, w] fp32, in host memory until the first step.
struct SdPicture {
  at::Tensor x;
  std::shared_ptr<NoiseSource> source;  // what the sampler draws from
  std::unique_ptr<Sampler> sampler;     // before its first step
  // Channels behind x at each evaluation, for networks that take a mask and what it leaves.
  at::Tensor more;
  // What the unpainted part is made of, for networks that do not.
  at::Tensor original, noise;
};

// Which places are repainted, where the network does not know.
struct SdMask {
  at::Tensor mask;  // [1, 1, h, w], 1: repainted; undefined: all of it
  // A place is repainted as soon as the noise level is below it: t/train_steps < mask.
  bool gradient = false;
  int64_t train_steps = 1000;  // of the model
};

struct SdDenoising {
  SdPredictor predictor;
  std::vector<SdPrompts> prompts;
  std::vector<size_t> prompts_of_step;  // index of `prompts`; the last one stands for those that follow
  std::vector<SdPicture> pictures;      // at least one, all of one size
  SdMask mask;
  // At least one. Each has a sampler of its own, since those remember; they draw from one source, in this
  // order, and are brought together after every step.
  std::vector<SdTile> tiles;
  std::vector<double> guidance;  // of each step; the last one stands for those that follow. Not empty
};
std::unique_ptr<Denoiser> MakeSdDenoiser(SdDenoising run);

// The places that come from the model after an evaluation; `next_timestep` is that of the next one, 0 after
// the last. [1, 1, h, w], 0 to 1.
at::Tensor RepaintedPlaces(const SdMask& mask, double next_timestep);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_DENOISER_H_
