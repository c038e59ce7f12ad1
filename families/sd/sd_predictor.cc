#include "families/sd/sd_predictor.h"

#include <utility>

#include "ATen/ATen.h"
#include "families/sampling/guidance.h"

namespace latentd {

SdPredictor::SdPredictor(std::shared_ptr<const UNet2DCondition> unet, SdPrompts prompts,
                         double guidance_rescale)
    : unet_(std::move(unet)), prompts_(std::move(prompts)), guidance_rescale_(guidance_rescale) {}

void SdPredictor::Prepare(const WeightView& w) {
  both_ = unet_->PrepareConditioning(w, prompts_.context, prompts_.pooled, prompts_.time_ids);
  const int64_t last = both_.context.size(0) - 1;
  wanted_.context = both_.context.narrow(0, last, 1);
  if (both_.added.defined()) wanted_.added = both_.added.narrow(0, last, 1);
  timestep_ = -1;
}

at::Tensor SdPredictor::operator()(const WeightView& w, const at::Tensor& x, const at::Tensor& more,
                                   double timestep, double guidance) {
  const bool guided = guidance > 1 && both_.context.size(0) == 2;
  const UNetConditioning& conditioning = guided ? both_ : wanted_;
  if (timestep != timestep_ || guided != guided_) {
    time_ = unet_->TimeEmbedding(w, static_cast<float>(timestep), conditioning);
    timestep_ = timestep;
    guided_ = guided;
  }
  at::Tensor input = more.defined() ? at::cat({x, more}, 1) : x;
  if (guided) input = at::cat({input, input});
  at::Tensor output = (*unet_)(w, input.to(w.compute_type()), time_, conditioning.context);
  if (!guided) return output;
  const at::Tensor negative = output.narrow(0, 0, 1), positive = output.narrow(0, 1, 1);
  output = Guide(positive, negative, guidance);
  return guidance_rescale_ > 0 ? GuidanceRescale(output, positive, guidance_rescale_) : output;
}

}  // namespace latentd
