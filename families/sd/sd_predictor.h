// The network's guided answer to one noisy latent: what is the same for every sampler, with and without
// tiles.
//
// One run's; one thread at a time. Conditioning comes from host memory and is taken to where the weights are
// by Prepare().
#ifndef LATENTD_FAMILIES_SD_SD_PREDICTOR_H_
#define LATENTD_FAMILIES_SD_SD_PREDICTOR_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "families/sd/unet.h"
#include "patcher/weight_view.h"

namespace latentd {

// One prompt, encoded; in host memory.
struct SdPromptRow {
  std::vector<at::Tensor> hidden;  // [1, tokens, dim] of each encoder; side by side they are the context
  at::Tensor pooled;               // [1, pooled_dim]; undefined for models without
  at::Tensor time_ids;             // [1, n]; likewise
};

// What a step is denoised with.
struct SdPrompts {
  std::vector<SdPromptRow> rows;  // the unwanted prompt where there is one, then the wanted ones
  std::vector<double> weights;    // of the wanted ones; as many as there are
};

class SdPredictor {
 public:
  SdPredictor(std::shared_ptr<const UNet2DCondition> unet, double guidance_rescale);

  // What the calls that follow are about. REQUIRES: several wanted prompts come with an unwanted one.
  void Prepare(const WeightView& w, const SdPrompts& prompts);

  // x: [1, C, h, w], scaled as the network takes it; `more`: channels to put behind it (a mask and what it
  // covers), or undefined. The unwanted prompt and the first wanted one are one batch, every other wanted one
  // is a batch of its own; at a guidance of 1 or less a single wanted prompt is run alone. Several are
  //   unwanted + guidance · Σ weight · (wanted − unwanted)
  // Liu et al. 2022, "Compositional Visual Generation with Composable Diffusion Models". → x's shape.
  at::Tensor operator()(const WeightView& w, const at::Tensor& x, const at::Tensor& more, double timestep,
                        double guidance);

 private:
  UNetConditioning Rows(int64_t begin, int64_t count) const;

  const std::shared_ptr<const UNet2DCondition> unet_;
  const double guidance_rescale_;
  UNetConditioning all_;
  std::vector<double> weights_;
  // Of the last call: pictures of a step share them.
  double timestep_ = -1;
  double guidance_ = 0;  // where the network embeds it
  bool guided_ = false;
  std::vector<UNetConditioning> batches_;
  std::vector<at::Tensor> times_;  // by batch
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_PREDICTOR_H_
