#include "families/sd/unet.h"

#include <algorithm>
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
  if (config.added_dim > 0) {
    add_embedding_ = EmbedderMlp::Describe(*layout, "add_embedding", config.added_dim, config.time_dim());
  }
  conv_in_ = Conv2d::Describe(*layout, "conv_in", config.in_channels, channels, 3, 1, 1);
  DescribeDown(*layout);
  const UNetConfig::Level& deepest = config.levels.back();
  middle_ = DescribeStage(*layout, "mid_block", 0, deepest.channels, deepest, /*attention=*/true);
  layout->BeginBlock("mid_block.resnets.1");
  middle_end_ =
      UNetResnet::Describe(*layout, "mid_block.resnets.1", deepest.channels, deepest.channels, config);
  DescribeUp(*layout);
  layout->BeginBlock("output", ComponentLayout::Residency::kStays);
  norm_out_ = GroupNorm::Describe(*layout, "conv_norm_out", channels, config.groups, config.norm_eps);
  conv_out_ = Conv2d::Describe(*layout, "conv_out", channels, config.out_channels, 3, 1, 1);
  layout_ = std::move(layout);
}

UNet2DCondition::Stage UNet2DCondition::DescribeStage(ComponentLayout& layout, const std::string& level,
                                                      int64_t index, int64_t in, const UNetConfig::Level& of,
                                                      bool attention) const {
  Stage stage;
  stage.name = level;
  stage.index = index;
  const std::string resnet = absl::StrCat(level, ".resnets.", index);
  layout.BeginBlock(resnet);
  stage.resnet = UNetResnet::Describe(layout, resnet, in, of.channels, config_);
  if (attention) {
    stage.transformer =
        UNetTransformer::Describe(layout, absl::StrCat(level, ".attentions.", index), of, config_);
  }
  return stage;
}

void UNet2DCondition::DescribeDown(ComponentLayout& layout) {
  int64_t in = config_.levels.front().channels;
  for (size_t i = 0; i < config_.levels.size(); ++i) {
    const UNetConfig::Level& of = config_.levels[i];
    Level level;
    level.name = absl::StrCat("down_blocks.", i);
    for (int64_t j = 0; j < config_.layers_per_block; ++j) {
      level.stages.push_back(DescribeStage(layout, level.name, j, in, of, of.attention));
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
    const int64_t left = config_.layers_per_block + (i + 1 < config_.levels.size() ? 1 : 0);
    skips.insert(skips.end(), static_cast<size_t>(left), config_.levels[i].channels);
  }
  int64_t in = config_.levels.back().channels;
  for (size_t i = 0; i < config_.levels.size(); ++i) {
    const UNetConfig::Level& of = config_.levels[config_.levels.size() - 1 - i];
    Level level;
    level.name = absl::StrCat("up_blocks.", i);
    for (int64_t j = 0; j < config_.layers_per_block + 1; ++j) {
      level.stages.push_back(DescribeStage(layout, level.name, j, in + skips.back(), of, of.up_attention));
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

at::Tensor UNet2DCondition::TimeEmbedding(const WeightView& w, float timestep,
                                          const UNetConditioning& conditioning) const {
  const int64_t channels = config_.levels.front().channels;
  at::Tensor embedding =
      time_embedding_(w, SinusoidalEmbedding(timestep, channels, w.device()).to(w.compute_type()));
  if (conditioning.added.defined()) embedding = embedding + conditioning.added;
  return ActivateInPlace(Activation::kSilu, embedding);
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
  h = call.Resnet(middle_end_, "mid_block", 1, call.Run(middle_, h));
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

int64_t UNet2DCondition::WorkingBytes(int64_t tokens, int64_t height, int64_t width) const {
  // A convolution at its widest holds its input, its output, copies of both where the library's kernel wants
  // them in an order of its own, and the resnet its own input beside that; a transformer holds x, a norm, and
  // either queries, keys, values and what was attended, or the feed-forward's hidden layer (8·dim) and half
  // of it twice. A heap has gaps. What the way down leaves behind is there all the time.
  constexpr double kHeapGaps = 1.5;
  constexpr int64_t kBatch = 2, kSlackBytes = 16 << 20;
  double widest = 0, left = 0;
  int64_t workspace = 0;  // of our own kernels, kept from one convolution to the next
  for (size_t i = 0; i < config_.levels.size(); ++i) {
    const UNetConfig::Level& level = config_.levels[i];
    const double places = static_cast<double>(((height >> i) + 1) * ((width >> i) + 1));
    const int64_t below = config_.levels[std::min(i + 1, config_.levels.size() - 1)].channels;
    const int64_t joined = below + level.channels;
    const int64_t conv = std::max(3 * joined + 2 * level.channels, joined + 4 * level.channels);
    const int64_t transformer = level.attention || level.up_attention ? 19 * level.channels : 0;
    widest = std::max(widest, places * static_cast<double>(std::max(conv, transformer)));
    for (const int64_t out : {level.channels, below}) {
      const HostConvShape shape{kBatch, joined, out, (height >> i) + 1, (width >> i) + 1};
      workspace = std::max(workspace, HostConvWorkspace(ChooseHostConv(shape), shape));
    }
    left += places * static_cast<double>((config_.layers_per_block + 1) * level.channels);
  }
  int64_t largest_weight = 0;
  for (const TensorDecl& tensor : layout_->tensors()) {
    int64_t n = 1;
    for (int64_t extent : tensor.shape) n *= extent;
    largest_weight = std::max(largest_weight, n);
  }
  const double text =
      static_cast<double>(tokens * (config_.context_dim + 2 * config_.levels.back().channels));
  const double floats = kHeapGaps * kBatch * (widest + left + text) +
                        2.5 * static_cast<double>(largest_weight) + static_cast<double>(workspace);
  return static_cast<int64_t>(floats * sizeof(float)) + kSlackBytes;
}

}  // namespace latentd
