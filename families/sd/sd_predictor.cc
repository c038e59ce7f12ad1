#include "families/sd/sd_predictor.h"

#include <utility>

#include "ATen/ATen.h"
#include "families/sampling/guidance.h"

namespace latentd {
namespace {

at::Tensor OnTopOfEachOther(const std::vector<at::Tensor>& rows) {
  return rows.front().defined() ? at::cat(rows) : at::Tensor();
}

}  // namespace

SdPredictor::SdPredictor(std::shared_ptr<const UNet2DCondition> unet, double guidance_rescale)
    : unet_(std::move(unet)), guidance_rescale_(guidance_rescale) {}

void SdPredictor::Prepare(const WeightView& w, const SdPrompts& prompts) {
  std::vector<at::Tensor> contexts, pooled, time_ids;
  for (const SdPromptRow& row : prompts.rows) {
    contexts.push_back(at::cat(row.hidden, -1));
    pooled.push_back(row.pooled);
    time_ids.push_back(row.time_ids);
  }
  all_ =
      unet_->PrepareConditioning(w, at::cat(contexts), OnTopOfEachOther(pooled), OnTopOfEachOther(time_ids));
  weights_ = prompts.weights;
  timestep_ = -1;
}

UNetConditioning SdPredictor::Rows(int64_t begin, int64_t count) const {
  UNetConditioning rows;
  rows.context = all_.context.narrow(0, begin, count);
  if (all_.added.defined()) rows.added = all_.added.narrow(0, begin, count);
  return rows;
}

at::Tensor SdPredictor::operator()(const WeightView& w, const at::Tensor& x, const at::Tensor& more,
                                   double timestep, double guidance) {
  const auto wanted = static_cast<int64_t>(weights_.size());
  const int64_t unwanted = all_.context.size(0) - wanted;
  const bool guided = unwanted > 0 && (guidance > 1 || wanted > 1);
  const double embedded = unet_->config().guidance_dim > 0 ? guidance : 0;
  if (timestep != timestep_ || guided != guided_ || embedded != guidance_) {
    timestep_ = -1;  // until all of it is there: an exception may come between
    batches_.clear();
    times_.clear();
    batches_.push_back(guided ? Rows(0, 2) : Rows(unwanted, 1));
    for (int64_t i = 1; i < wanted; ++i) batches_.push_back(Rows(unwanted + i, 1));
    for (const UNetConditioning& batch : batches_) {
      times_.push_back(unet_->TimeEmbedding(w, static_cast<float>(timestep), guidance, batch));
    }
    timestep_ = timestep;
    guided_ = guided;
    guidance_ = embedded;
  }
  const at::Tensor input = (more.defined() ? at::cat({x, more}, 1) : x).to(w.compute_type());
  auto predict = [&](size_t batch) {
    const at::Tensor& context = batches_[batch].context;
    return (*unet_)(w, context.size(0) == 1 ? input : at::cat({input, input}), times_[batch], context);
  };
  at::Tensor output = predict(0);
  if (!guided) return output;
  const at::Tensor negative = output.narrow(0, 0, 1);
  at::Tensor positive = output.narrow(0, 1, 1);
  if (wanted > 1) {
    at::Tensor sum = negative + weights_[0] * (positive - negative);
    for (int64_t i = 1; i < wanted; ++i) {
      const auto part = static_cast<size_t>(i);
      sum.add_(predict(part) - negative, weights_[part]);
    }
    positive = sum;
  }
  output = Guide(positive, negative, guidance);
  return guidance_rescale_ > 0 ? GuidanceRescale(output, positive, guidance_rescale_) : output;
}

}  // namespace latentd
