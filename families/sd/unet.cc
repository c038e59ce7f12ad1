#include "families/sd/unet.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "families/nn/host_conv.h"

namespace latentd {

// ------------------------------------------------------------------------------------------- description

UNet2DCondition::UNet2DCondition(const UNetConfig& config) : config_(config) {
  auto layout = std::make_shared<ComponentLayout>();
  const int64_t channels = config.levels.front().channels;
  layout->BeginBlock("embeddings", ComponentLayout::Residency::kStays);
  time_embedding_ = EmbedderMlp::Describe(*layout, "time_embedding", channels, config.time_dim());
  if (config.guidance_dim > 0) {
    guidance_embedding_ = Linear::Describe(*layout, "time_embedding.cond_proj", config.guidance_dim, channels,
                                           /*with_bias=*/false);
  }
  if (config.added_dim > 0) {
    add_embedding_ = EmbedderMlp::Describe(*layout, "add_embedding", config.added_dim, config.time_dim());
  }
  conv_in_ = Conv2d::Describe(*layout, "conv_in", config.in_channels, channels, 3, 1, 1);
  DescribeDown(*layout);
  DescribeMiddle(*layout);
  DescribeUp(*layout);
  layout->BeginBlock("output", ComponentLayout::Residency::kStays);
  norm_out_ = GroupNorm::Describe(*layout, "conv_norm_out", channels, config.groups, config.norm_eps);
  conv_out_ = Conv2d::Describe(*layout, "conv_out", channels, config.out_channels, 3, 1, 1);
  layout_ = std::move(layout);
}

UNet2DCondition::Stage UNet2DCondition::DescribeStage(ComponentLayout& layout, const std::string& level,
                                                      size_t index, int64_t in, const UNetConfig::Level& of,
                                                      int64_t transformer_layers) const {
  Stage stage;
  stage.name = level;
  stage.index = static_cast<int64_t>(index);
  const std::string resnet = absl::StrCat(level, ".resnets.", index);
  layout.BeginBlock(resnet);
  stage.resnet = UNetResnet::Describe(layout, resnet, in, of.channels, config_);
  if (transformer_layers > 0) {
    stage.transformer = UNetTransformer::Describe(layout, absl::StrCat(level, ".attentions.", index),
                                                  of.channels, of.heads, transformer_layers, config_);
  }
  return stage;
}

void UNet2DCondition::DescribeMiddle(ComponentLayout& layout) {
  if (!config_.middle) return;
  const UNetConfig::Level& deepest = config_.levels.back();
  middle_ = DescribeStage(layout, "mid_block", 0, deepest.channels, deepest, *config_.middle);
  if (*config_.middle == 0) return;
  layout.BeginBlock("mid_block.resnets.1");
  middle_end_ =
      UNetResnet::Describe(layout, "mid_block.resnets.1", deepest.channels, deepest.channels, config_);
}

void UNet2DCondition::DescribeDown(ComponentLayout& layout) {
  int64_t in = config_.levels.front().channels;
  for (size_t i = 0; i < config_.levels.size(); ++i) {
    const UNetConfig::Level& of = config_.levels[i];
    Level level;
    level.name = absl::StrCat("down_blocks.", i);
    for (size_t j = 0; j < of.down.size(); ++j) {
      level.stages.push_back(DescribeStage(layout, level.name, j, in, of, of.down[j]));
      in = of.channels;
    }
    if (i + 1 < config_.levels.size()) {
      layout.BeginBlock(level.name + ".downsamplers.0");
      level.resample = Conv2d::Describe(layout, level.name + ".downsamplers.0.conv", in, in, 3, 2, 1);
    }
    down_.push_back(std::move(level));
  }
}

void UNet2DCondition::DescribeUp(ComponentLayout& layout) {
  // What the way down leaves behind, the last of it taken first.
  std::vector<int64_t> skips = {config_.levels.front().channels};
  for (size_t i = 0; i < config_.levels.size(); ++i) {
    const size_t left = config_.levels[i].down.size() + (i + 1 < config_.levels.size() ? 1 : 0);
    skips.insert(skips.end(), left, config_.levels[i].channels);
  }
  int64_t in = config_.levels.back().channels;
  for (size_t i = 0; i < config_.levels.size(); ++i) {
    const UNetConfig::Level& of = config_.levels[config_.levels.size() - 1 - i];
    Level level;
    level.name = absl::StrCat("up_blocks.", i);
    for (size_t j = 0; j < of.up.size(); ++j) {
      level.stages.push_back(DescribeStage(layout, level.name, j, in + skips.back(), of, of.up[j]));
      skips.pop_back();
      in = of.channels;
    }
    if (i + 1 < config_.levels.size()) {
      layout.BeginBlock(level.name + ".upsamplers.0");
      level.resample = Conv2d::Describe(layout, level.name + ".upsamplers.0.conv", in, in, 3, 1, 1);
    }
    up_.push_back(std::move(level));
  }
}

// ------------------------------------------------------------------------------------------------ forward

UNetConditioning UNet2DCondition::PrepareConditioning(const WeightView& w, const at::Tensor& context,
                                                      const at::Tensor& pooled,
                                                      const at::Tensor& time_ids) const {
  UNetConditioning conditioning;
  conditioning.context = context.to(w.device(), w.compute_type());
  if (!add_embedding_) return conditioning;
  // All numbers of a row side by side, each as a sinusoid, after the pooled text.
  std::vector<at::Tensor> rows;
  const at::Tensor numbers = time_ids.to(at::kCPU, at::kFloat).contiguous();
  for (int64_t row = 0; row < numbers.size(0); ++row) {
    std::vector<at::Tensor> sinusoids;
    for (int64_t i = 0; i < numbers.size(1); ++i) {
      sinusoids.push_back(
          SinusoidalEmbedding(numbers[row][i].item<float>(), config_.time_ids_dim, w.device()));
    }
    rows.push_back(at::cat(sinusoids, -1));
  }
  conditioning.added = (*add_embedding_)(
      w, at::cat({pooled.to(w.device(), w.compute_type()), at::cat(rows).to(w.compute_type())}, -1));
  return conditioning;
}

at::Tensor UNet2DCondition::TimeEmbedding(const WeightView& w, float timestep, double guidance,
                                          const UNetConditioning& conditioning) const {
  const int64_t channels = config_.levels.front().channels;
  at::Tensor sinusoid = SinusoidalEmbedding(timestep, channels, w.device()).to(w.compute_type());
  if (config_.guidance_dim > 0) {
    sinusoid =
        sinusoid + guidance_embedding_(
                       w, GuidanceEmbedding(guidance, config_.guidance_dim).to(w.device(), w.compute_type()));
  }
  at::Tensor embedding = time_embedding_(w, sinusoid);
  if (conditioning.added.defined()) embedding = embedding + conditioning.added;
  return ActivateInPlace(Activation::kSilu, embedding);
}

// [1, dim], in host memory: sin and cos of 1000·(guidance − 1) at dim/2 frequencies from 1 down to 1/10000.
// Luo et al. 2023, "Latent Consistency Models", section 4.2; the same as diffusers'
// get_guidance_scale_embedding.
at::Tensor UNet2DCondition::GuidanceEmbedding(double guidance, int64_t dim) {
  const int64_t half = dim / 2;
  const double step = half > 1 ? std::log(10000.0) / static_cast<double>(half - 1) : 0;
  const at::Tensor frequencies = at::exp(at::arange(half, at::kFloat) * static_cast<float>(-step));
  const at::Tensor angles = frequencies * static_cast<float>((guidance - 1) * 1000);
  at::Tensor embedding = at::cat({at::sin(angles), at::cos(angles)}).unsqueeze(0);
  return dim % 2 == 0 ? embedding : at::constant_pad_nd(embedding, {0, 1});
}

struct UNet2DCondition::Call {
  const WeightView& w;
  const at::Tensor& time;
  const at::Tensor& context;
  const Observer& observer;

  void See(const std::string& level, const char* part, int64_t index, const at::Tensor& result) const {
    if (observer) observer(absl::StrCat(level, ".", part, ".", index), result);
  }
  at::Tensor Resnet(const UNetResnet& resnet, const std::string& level, int64_t index,
                    const at::Tensor& x) const {
    at::Tensor y = resnet(w, x, time);
    See(level, "resnets", index, y);
    return y;
  }
  at::Tensor Run(const Stage& stage, const at::Tensor& x) const {
    at::Tensor y = Resnet(stage.resnet, stage.name, stage.index, x);
    if (!stage.transformer) return y;
    y = (*stage.transformer)(w, y, context);
    See(stage.name, "attentions", stage.index, y);
    return y;
  }
};

at::Tensor UNet2DCondition::operator()(const WeightView& w, const at::Tensor& x,
                                       const at::Tensor& time_embedding, const at::Tensor& context,
                                       const Observer& observer) const {
  const Call call{w, time_embedding, context, observer};
  at::Tensor h = conv_in_(w, x.is_cpu() ? x.contiguous(at::MemoryFormat::ChannelsLast) : x);
  std::vector<at::Tensor> skips = {h};
  for (const Level& level : down_) {
    for (const Stage& stage : level.stages) {
      h = call.Run(stage, h);
      skips.push_back(h);
    }
    if (!level.resample) continue;
    h = (*level.resample)(w, h);
    call.See(level.name, "downsamplers", 0, h);
    skips.push_back(h);
  }
  if (middle_) h = call.Run(*middle_, h);
  if (middle_end_) h = call.Resnet(*middle_end_, "mid_block", 1, h);
  for (const Level& level : up_) {
    for (const Stage& stage : level.stages) {
      h = at::cat({h, skips.back()}, 1);
      skips.pop_back();
      h = call.Run(stage, h);
    }
    if (!level.resample) continue;
    // Twice the size, or one place less where the way down had rounded up.
    h = (*level.resample)(w, at::upsample_nearest2d(h, {skips.back().size(2), skips.back().size(3)}));
    call.See(level.name, "upsamplers", 0, h);
  }
  return conv_out_(w, norm_out_.WithSilu(w, h)).contiguous();
}

// ------------------------------------------------------------------------------------------------- memory

// Goes through one forward pass as operator() does it.
class UNet2DCondition::Estimate {
 public:
  Estimate(const UNet2DCondition& unet, int64_t batch, int64_t tokens, const WeightUse& use)
      : unet_(unet), batch_(batch), tokens_(tokens), use_(use) {}

  LiveFloats Run(int64_t height, int64_t width) {
    height_ = height, width_ = width;
    const UNetConfig& config = unet_.config_;
    live_.Hold(batch_ * tokens_ * config.context_dim);
    live_.Hold(2 * config.in_channels * places());  // as it came, and with channels last
    Skip(Conv(unet_.conv_in_));
    for (const Level& level : unet_.down_) {
      for (const Stage& stage : level.stages) Skip(Run(stage));
      if (level.resample) Skip(Conv(*level.resample));
    }
    int64_t h = Deepest();
    if (unet_.middle_) h = Run(*unet_.middle_);
    if (unet_.middle_end_) h = Replace(h, Resnet(*unet_.middle_end_));
    for (const Level& level : unet_.up_) {
      for (const Stage& stage : level.stages) {
        const int64_t joined = h + skips_.back().floats;
        live_.Hold(joined);
        live_.Drop(joined);  // both parts
        skips_.pop_back();
        h = Replace(joined, Run(stage));
      }
      if (!level.resample) continue;
      const int64_t channels = h / places();
      height_ = skips_.back().height, width_ = skips_.back().width;
      live_.Hold(channels * places());
      const int64_t up = channels * places();
      h = Replace(h + up, Conv(*level.resample));
    }
    live_.Hold(h);  // a norm
    Conv(unet_.conv_out_);
    live_.Reach(config.out_channels * places());
    return live_;
  }

 private:
  struct Skipped {
    int64_t floats, height, width;
  };

  int64_t places() const { return batch_ * height_ * width_; }
  int64_t beside(int64_t places) const { return use_.beside_rank * places; }
  void Skip(int64_t floats) { skips_.push_back({floats, height_, width_}); }
  int64_t Replace(int64_t old, int64_t floats) {
    live_.Drop(old);
    return floats;
  }
  const std::vector<int64_t>& Shape(const Conv2d& conv) const { return (*unet_.layout_)[conv.weight].shape; }

  // The last map of the way down, when nothing is made of it: kept for the way up already.
  int64_t Deepest() {
    if (unet_.middle_) return 0;
    live_.Hold(skips_.back().floats);
    return skips_.back().floats;
  }

  // Holds the result, and returns its floats; so do those below.
  int64_t Conv(const Conv2d& conv) {
    const std::vector<int64_t>& shape = Shape(conv);
    live_.Convolve({batch_, shape[1], shape[0], height_, width_, conv.stride}, shape[2]);
    height_ = (height_ - 1) / conv.stride + 1, width_ = (width_ - 1) / conv.stride + 1;
    const int64_t floats = shape[0] * places();
    live_.Reach(floats + beside(places()));
    live_.Hold(floats);
    return floats;
  }
  int64_t Resnet(const UNetResnet& resnet) {
    const int64_t norm = Shape(resnet.conv1)[1] * places();
    live_.Hold(norm);
    const int64_t h = Conv(resnet.conv1);
    live_.Drop(norm);
    live_.Hold(h);  // the second norm
    const int64_t result = Conv(resnet.conv2);
    live_.Drop(2 * h);
    if (resnet.shortcut) live_.Drop(Conv(*resnet.shortcut));
    return result;
  }
  int64_t Run(const Stage& stage) {
    const int64_t y = Resnet(stage.resnet);
    if (!stage.transformer) return y;
    const int64_t n = height_ * width_, dim = y / places();
    live_.Hold(3 * y);  // a norm, the tokens, and a block's norm
    live_.Reach(5 * y + beside(places()) +
                AttentionScratch(n, n, stage.transformer->blocks.front().self_attention.head_dim));
    live_.Reach(3 * y + 2 * batch_ * tokens_ * dim + beside(places()) +
                AttentionScratch(n, tokens_, stage.transformer->blocks.front().self_attention.head_dim));
    // A norm, both halves of the hidden layer, their product, and what it becomes.
    live_.Reach(14 * y + beside(places()));
    live_.Drop(3 * y);
    live_.Reach(3 * y);
    return y;  // the result takes its place
  }

  const UNet2DCondition& unet_;
  const int64_t batch_, tokens_;
  const WeightUse use_;
  int64_t height_ = 0, width_ = 0;
  std::vector<Skipped> skips_;
  LiveFloats live_;
};

int64_t UNet2DCondition::WorkingBytes(int64_t batch, int64_t tokens, int64_t height, int64_t width,
                                      const WeightUse& use) const {
  constexpr int64_t kSlackBytes = 1 << 20;
  return Estimate(*this, batch, tokens, use)
      .Run(height, width)
      .PeakBytes(ConvertedFloats(*layout_, use), kSlackBytes);
}

}  // namespace latentd
