// The network's guided answer to one noisy latent: what is the same for every sampler, with and without
// tiles.
//
// One run's; one thread at a time. Conditioning comes from host memory and is taken to where the weights are
// by Prepare().
#ifndef LATENTD_FAMILIES_SD_SD_PREDICTOR_H_
#define LATENTD_FAMILIES_SD_SD_PREDICTOR_H_

#include <memory>

#include "ATen/core/Tensor.h"
#include "families/sd/unet.h"
#include "patcher/weight_view.h"

namespace latentd {

// Rows are the prompts: the wanted one, or the unwanted and the wanted one.
struct SdPrompts {
  at::Tensor context;   // [rows, tokens, context_dim]
  at::Tensor pooled;    // [rows, pooled_dim]; undefined for models without
  at::Tensor time_ids;  // [rows, n]; likewise
};

class SdPredictor {
 public:
  SdPredictor(std::shared_ptr<const UNet2DCondition> unet, SdPrompts prompts, double guidance_rescale);

  // Before the first call; again at no cost.
  void Prepare(const WeightView& w);

  // x: [1, C, h, w], scaled as the network takes it; `more`: channels to put behind it (a mask and what it
  // covers), or undefined. Both prompts are one batch; at a guidance of 1 or less the wanted one is run
  // alone. → x's shape.
  at::Tensor operator()(const WeightView& w, const at::Tensor& x, const at::Tensor& more, double timestep,
                        double guidance);

 private:
  const std::shared_ptr<const UNet2DCondition> unet_;
  SdPrompts prompts_;
  const double guidance_rescale_;
  UNetConditioning both_, wanted_;
  // Of the last call: pictures of a step share it.
  double timestep_ = -1;
  bool guided_ = false;
  at::Tensor time_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_PREDICTOR_H_
