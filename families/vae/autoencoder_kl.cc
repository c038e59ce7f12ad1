#include "families/vae/autoencoder_kl.h"

#include <algorithm>
#include <map>
#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/mutex.h"
#include "families/config/json_config.h"
#include "families/vae/tiling.h"

namespace latentd {
namespace {

constexpr double kNormEps = 1e-6;
constexpr double kMinLogVariance = -30, kMaxLogVariance = 20;

// Of a place of what comes out.
double FlopsOf(const ComponentLayout& layout, const Conv2d& conv) {
  double flops = 2;
  for (const int64_t extent : layout[conv.weight].shape) flops *= static_cast<double>(extent);
  return flops;
}

// In host memory, convolutions are faster with channels last, and all that follows a map keeps its order.
at::Tensor InOrder(const at::Tensor& x) {
  return x.is_cpu() ? x.contiguous(at::MemoryFormat::ChannelsLast) : x;
}

}  // namespace

absl::StatusOr<AutoencoderKlConfig> AutoencoderKlConfig::Load(const std::string& path) {
  ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path));
  AutoencoderKlConfig config;
  config.in_channels = json.Int("in_channels", 3, 3, 3);
  config.out_channels = json.Int("out_channels", 3, 3, 3);
  config.latent_channels = json.Int("latent_channels", 4, 1, 256);
  config.channels = json.Ints("block_out_channels", {64}, 1, 1 << 14);
  config.layers_per_block = json.Int("layers_per_block", 1, 1, 64);
  config.groups = json.Int("norm_num_groups", 32, 1, 1 << 14);
  config.mid_attention = json.Bool("mid_block_add_attention", true);
  config.quant_conv = json.Bool("use_quant_conv", true);
  config.post_quant_conv = json.Bool("use_post_quant_conv", true);
  config.scaling_factor = json.Double("scaling_factor", 0.18215, 1e-6, 1e6);
  config.shift_factor = json.Double("shift_factor", 0, -1e6, 1e6);

  auto refuse = [&](const std::string& what) {
    json.Fail(MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                        absl::StrCat(json.label(), ": ", what, " is not supported"),
                        {{"file", json.label()}, {"what", what}}));
  };
  const std::string name = json.String("_class_name", "AutoencoderKL");
  if (name != "AutoencoderKL") refuse("the autoencoder " + name);
  if (json.String("act_fn", "silu") != "silu") refuse("an activation other than silu");
  // One without the other counts for nothing in diffusers.
  if (json.Has("latents_mean") && json.Has("latents_std")) {
    for (const double value : json.Doubles("latents_mean"))
      config.latents_mean.push_back(static_cast<float>(value));
    for (const double value : json.Doubles("latents_std"))
      config.latents_std.push_back(static_cast<float>(value));
    const auto wanted = static_cast<size_t>(config.latent_channels);
    if (config.latents_mean.size() != wanted || config.latents_std.size() != wanted) {
      refuse(absl::StrCat(config.latents_mean.size(), " means and ", config.latents_std.size(),
                          " standard deviations of latents for ", wanted, " channels"));
    }
  }
  if (config.channels.empty() || config.channels.size() > 8) refuse("this number of levels");
  for (int64_t channels : config.channels) {
    if (channels % config.groups != 0)
      refuse(absl::StrCat(channels, " channels in ", config.groups, " groups"));
  }
  RETURN_IF_ERROR(json.status());
  return config;
}

// ------------------------------------------------------------------------------------------- description

AutoencoderKl::Resnet AutoencoderKl::Resnet::Describe(ComponentLayout& layout, const std::string& name,
                                                      int64_t in, int64_t out, int64_t groups) {
  Resnet resnet;
  resnet.norm1 = GroupNorm::Describe(layout, name + ".norm1", in, groups, kNormEps);
  resnet.conv1 = Conv2d::Describe(layout, name + ".conv1", in, out, 3, 1, 1);
  resnet.norm2 = GroupNorm::Describe(layout, name + ".norm2", out, groups, kNormEps);
  resnet.conv2 = Conv2d::Describe(layout, name + ".conv2", out, out, 3, 1, 1);
  if (in != out) resnet.shortcut = Conv2d::Describe(layout, name + ".conv_shortcut", in, out, 1);
  return resnet;
}

AutoencoderKl::Middle AutoencoderKl::DescribeMiddle(ComponentLayout& layout, const std::string& name) const {
  const int64_t channels = config_.channels.back();
  layout.BeginBlock(name);
  Middle middle;
  middle.first = Resnet::Describe(layout, name + ".resnets.0", channels, channels, config_.groups);
  if (config_.mid_attention) {
    const std::string attention = name + ".attentions.0";
    middle.attention = SelfAttention{
        GroupNorm::Describe(layout, attention + ".group_norm", channels, config_.groups, kNormEps),
        Linear::Describe(layout, attention + ".to_q", channels, channels),
        Linear::Describe(layout, attention + ".to_k", channels, channels),
        Linear::Describe(layout, attention + ".to_v", channels, channels),
        Linear::Describe(layout, attention + ".to_out.0", channels, channels)};
  }
  middle.second = Resnet::Describe(layout, name + ".resnets.1", channels, channels, config_.groups);
  return middle;
}

void AutoencoderKl::DescribeEncoder(ComponentLayout& layout) {
  const std::vector<int64_t>& channels = config_.channels;
  layout.BeginBlock("encoder.conv_in");
  encoder_.in = Conv2d::Describe(layout, "encoder.conv_in", config_.in_channels, channels.front(), 3, 1, 1);
  int64_t in = channels.front();
  for (size_t i = 0; i < channels.size(); ++i) {
    const std::string name = absl::StrCat("encoder.down_blocks.", i);
    layout.BeginBlock(name);
    Level level;
    for (int64_t j = 0; j < config_.layers_per_block; ++j) {
      level.resnets.push_back(
          Resnet::Describe(layout, absl::StrCat(name, ".resnets.", j), in, channels[i], config_.groups));
      in = channels[i];
    }
    if (i + 1 < channels.size()) {
      level.resample = Conv2d::Describe(layout, name + ".downsamplers.0.conv", in, in, 3, 2);
    }
    encoder_.levels.push_back(std::move(level));
  }
  encoder_.middle = DescribeMiddle(layout, "encoder.mid_block");
  layout.BeginBlock("encoder.conv_out");
  encoder_.norm_out = GroupNorm::Describe(layout, "encoder.conv_norm_out", in, config_.groups, kNormEps);
  encoder_.out = Conv2d::Describe(layout, "encoder.conv_out", in, 2 * config_.latent_channels, 3, 1, 1);
  if (config_.quant_conv) {
    quant_conv_ =
        Conv2d::Describe(layout, "quant_conv", 2 * config_.latent_channels, 2 * config_.latent_channels, 1);
  }
}

void AutoencoderKl::DescribeDecoder(ComponentLayout& layout) {
  const std::vector<int64_t> channels(config_.channels.rbegin(), config_.channels.rend());
  layout.BeginBlock("decoder.conv_in");
  if (config_.post_quant_conv) {
    post_quant_conv_ =
        Conv2d::Describe(layout, "post_quant_conv", config_.latent_channels, config_.latent_channels, 1);
  }
  decoder_.in =
      Conv2d::Describe(layout, "decoder.conv_in", config_.latent_channels, channels.front(), 3, 1, 1);
  decoder_.middle = DescribeMiddle(layout, "decoder.mid_block");
  int64_t in = channels.front();
  for (size_t i = 0; i < channels.size(); ++i) {
    const std::string name = absl::StrCat("decoder.up_blocks.", i);
    layout.BeginBlock(name);
    Level level;
    for (int64_t j = 0; j < config_.layers_per_block + 1; ++j) {
      level.resnets.push_back(
          Resnet::Describe(layout, absl::StrCat(name, ".resnets.", j), in, channels[i], config_.groups));
      in = channels[i];
    }
    if (i + 1 < channels.size()) {
      level.resample = Conv2d::Describe(layout, name + ".upsamplers.0.conv", in, in, 3, 1, 1);
    }
    decoder_.levels.push_back(std::move(level));
  }
  layout.BeginBlock("decoder.conv_out");
  decoder_.norm_out = GroupNorm::Describe(layout, "decoder.conv_norm_out", in, config_.groups, kNormEps);
  decoder_.out = Conv2d::Describe(layout, "decoder.conv_out", in, config_.out_channels, 3, 1, 1);
}

AutoencoderKl::AutoencoderKl(const AutoencoderKlConfig& config) : config_(config) {
  auto layout = std::make_shared<ComponentLayout>();
  DescribeEncoder(*layout);
  DescribeDecoder(*layout);
  layout_ = std::move(layout);
  ListEncoder();
  ListDecoder();
}

AutoencoderKl::~AutoencoderKl() = default;

// ------------------------------------------------------------------------------------------------ forward

at::Tensor AutoencoderKl::Resnet::operator()(const WeightView& w, const at::Tensor& x) const {
  at::Tensor h = norm1.WithSilu(w, x);
  h = conv1(w, h);
  h = norm2.WithSilu(w, h);
  h = conv2(w, h);
  return h.add_(shortcut ? (*shortcut)(w, x) : x);
}

double AutoencoderKl::Resnet::Flops(const ComponentLayout& layout) const {
  return FlopsOf(layout, conv1) + FlopsOf(layout, conv2) + (shortcut ? FlopsOf(layout, *shortcut) : 0);
}

at::Tensor AutoencoderKl::SelfAttention::operator()(const WeightView& w, const at::Tensor& x) const {
  const at::Tensor tokens =
      norm(w, x).permute({0, 2, 3, 1}).flatten(1, 2);  // [batch, h·w, channels], one head
  const at::Tensor attended =
      Attention(q(w, tokens).unsqueeze(2), k(w, tokens).unsqueeze(2), v(w, tokens).unsqueeze(2));
  return out(w, attended).unflatten(1, {x.size(2), x.size(3)}).permute({0, 3, 1, 2}).add_(x);
}

at::Tensor AutoencoderKl::Posterior::Sample(const at::Tensor& noise) const { return mean + std * noise; }

void AutoencoderKl::ListMiddle(std::vector<Pass::Stage>& stages, const Middle& middle, double places) {
  const auto add = [&](const Resnet& resnet) {
    stages.push_back({.run = [&resnet](const WeightView& w, const at::Tensor& x) { return resnet(w, x); },
                      .flops_per_place = resnet.Flops(*layout_),
                      .places = places});
  };
  add(middle.first);
  if (middle.attention) {
    const auto channels = static_cast<double>(config_.channels.back());
    const SelfAttention& attention = *middle.attention;
    stages.push_back(
        {.run = [&attention](const WeightView& w, const at::Tensor& x) { return attention(w, x); },
         .flops_per_place = 8 * channels * channels,
         .flops_per_two_places = 4 * channels,
         .places = places});
  }
  add(middle.second);
}

void AutoencoderKl::ListEncoder() {
  const auto add = [&](double flops, double places, auto run) {
    encode_stages_.push_back({.run = std::move(run), .flops_per_place = flops, .places = places});
  };
  double places = 1;
  add(FlopsOf(*layout_, encoder_.in), places,
      [this](const WeightView& w, const at::Tensor& x) { return encoder_.in(w, InOrder(x)); });
  for (const Level& level : encoder_.levels) {
    for (const Resnet& resnet : level.resnets) {
      add(resnet.Flops(*layout_), places,
          [&resnet](const WeightView& w, const at::Tensor& x) { return resnet(w, x); });
    }
    if (!level.resample) continue;
    places /= 4;
    // Half a pixel off centre: zeros go to the right and below only.
    add(FlopsOf(*layout_, *level.resample), places, [&level](const WeightView& w, const at::Tensor& x) {
      return (*level.resample)(w, at::constant_pad_nd(x, {0, 1, 0, 1}));
    });
  }
  ListMiddle(encode_stages_, encoder_.middle, places);
  add(FlopsOf(*layout_, encoder_.out), places, [this](const WeightView& w, const at::Tensor& x) {
    const at::Tensor h = encoder_.out(w, encoder_.norm_out.WithSilu(w, x));
    return (quant_conv_ ? (*quant_conv_)(w, h) : h).contiguous();
  });
}

void AutoencoderKl::ListDecoder() {
  const auto add = [&](double flops, double places, auto run) {
    decode_stages_.push_back({.run = std::move(run), .flops_per_place = flops, .places = places});
  };
  double places = 1;
  add(FlopsOf(*layout_, decoder_.in), places, [this](const WeightView& w, const at::Tensor& latents) {
    const at::Tensor x = InOrder(latents);
    return decoder_.in(w, post_quant_conv_ ? (*post_quant_conv_)(w, x) : x);
  });
  ListMiddle(decode_stages_, decoder_.middle, places);
  for (const Level& level : decoder_.levels) {
    for (const Resnet& resnet : level.resnets) {
      add(resnet.Flops(*layout_), places,
          [&resnet](const WeightView& w, const at::Tensor& x) { return resnet(w, x); });
    }
    if (!level.resample) continue;
    places *= 4;
    add(FlopsOf(*layout_, *level.resample), places, [&level](const WeightView& w, const at::Tensor& x) {
      return (*level.resample)(w, at::upsample_nearest2d(x, {x.size(2) * 2, x.size(3) * 2}));
    });
  }
  add(FlopsOf(*layout_, decoder_.out), places, [this](const WeightView& w, const at::Tensor& x) {
    return decoder_.out(w, decoder_.norm_out.WithSilu(w, x)).contiguous();
  });
}

bool AutoencoderKl::Pass::Slice(const WeightView& w, double flops) {
  if (!x_.defined()) x_ = tiles_.tile();
  const at::Tensor tile = tiles_.tile();
  const auto places = static_cast<double>(tile.size(2) * tile.size(3));
  bool first = true;
  for (; next_ < stages_.size(); ++next_) {
    const Stage& stage = stages_[next_];
    const double made = places * stage.places;
    const double more = made * (stage.flops_per_place + made * stage.flops_per_two_places);
    if (!std::exchange(first, false) && more > flops) return false;
    x_ = stage.run(w, x_);
    flops -= more;
  }
  tiles_.Add(std::exchange(x_, {}));
  next_ = 0;
  return tiles_.over();
}

AutoencoderKl::Pass AutoencoderKl::BeginEncode(const at::Tensor& picture, int64_t tile) const {
  return {encode_stages_, TileWalk(picture, tile, tile / config_.scale())};
}

AutoencoderKl::Pass AutoencoderKl::BeginDecode(const at::Tensor& latents, int64_t tile) const {
  return {decode_stages_, TileWalk(latents, tile / config_.scale(), tile)};
}

AutoencoderKl::Posterior AutoencoderKl::PosteriorOf(const at::Tensor& moments) {
  const std::vector<at::Tensor> parts = moments.chunk(2, 1);
  const at::Tensor log_variance = parts[1].clamp(kMinLogVariance, kMaxLogVariance);
  return {parts[0].contiguous(), log_variance.mul(0.5).exp_()};
}

AutoencoderKl::Posterior AutoencoderKl::Encode(const WeightView& w, const at::Tensor& picture,
                                               int64_t tile) const {
  Pass pass = BeginEncode(picture, tile);
  while (!pass.Slice(w)) {
  }
  return PosteriorOf(pass.Take());
}

at::Tensor AutoencoderKl::Decode(const WeightView& w, const at::Tensor& latents, int64_t tile) const {
  Pass pass = BeginDecode(latents, tile);
  while (!pass.Slice(w)) {
  }
  return pass.Take();
}

at::Tensor AutoencoderKl::OfChannels(const std::vector<float>& values, const at::Tensor& like) {
  return at::tensor(values).view({1, -1, 1, 1}).to(like.device(), like.scalar_type());
}

at::Tensor AutoencoderKl::ToModel(const at::Tensor& latents) const {
  if (config_.latents_std.empty()) return (latents - config_.shift_factor).mul_(config_.scaling_factor);
  return (latents - OfChannels(config_.latents_mean, latents) - config_.shift_factor)
      .mul_(config_.scaling_factor)
      .div_(OfChannels(config_.latents_std, latents));
}

at::Tensor AutoencoderKl::FromModel(const at::Tensor& latents) const {
  if (config_.latents_std.empty()) return (latents / config_.scaling_factor).add_(config_.shift_factor);
  return (latents * OfChannels(config_.latents_std, latents))
      .div_(config_.scaling_factor)
      .add_(OfChannels(config_.latents_mean, latents))
      .add_(config_.shift_factor);
}

// -------------------------------------------------------------------------------------------------- memory

// Goes through the forward passes as they are written above.
class AutoencoderKl::Estimate {
 public:
  Estimate(const AutoencoderKl& vae, const WeightUse& use) : vae_(vae), use_(use) {}

  // One whole picture or tile of height_ × width_ pixels; what came and what comes out is held in the end.
  void Encode(int64_t height, int64_t width) {
    height_ = height, width_ = width;
    live_.Hold(vae_.config_.in_channels * places());  // with channels last
    int64_t h = Conv(vae_.encoder_.in);
    for (const Level& level : vae_.encoder_.levels) {
      for (const Resnet& resnet : level.resnets) h = Replace(h, Run(resnet));
      if (!level.resample) continue;
      const int64_t padded = h / places() * (height_ + 1) * (width_ + 1);
      live_.Hold(padded);
      h = Replace(h + padded, Conv(*level.resample));
    }
    h = Replace(h, Run(vae_.encoder_.middle, h));
    live_.Hold(h);  // a norm
    const int64_t out = Conv(vae_.encoder_.out);
    live_.Hold(2 * out);  // as moments, and in order
    live_.Drop(3 * out + 2 * h);
  }
  void Decode(int64_t height, int64_t width) {
    const int64_t scale = vae_.config_.scale();
    height_ = height / scale, width_ = width / scale;
    live_.Hold(2 * vae_.config_.latent_channels * places());
    int64_t h = Conv(vae_.decoder_.in);
    h = Replace(h, Run(vae_.decoder_.middle, h));
    for (const Level& level : vae_.decoder_.levels) {
      for (const Resnet& resnet : level.resnets) h = Replace(h, Run(resnet));
      if (!level.resample) continue;
      height_ *= 2, width_ *= 2;
      const int64_t up = 4 * h;
      live_.Hold(up);
      h = Replace(h + up, Conv(*level.resample));
    }
    live_.Hold(h);  // a norm
    const int64_t out = Conv(vae_.decoder_.out);
    live_.Reach(out);
    live_.Drop(out + 2 * h);
  }
  LiveFloats& live() { return live_; }

 private:
  int64_t places() const { return height_ * width_; }
  int64_t Replace(int64_t old, int64_t floats) {
    live_.Drop(old);
    return floats;
  }

  // Holds the result, and returns its floats; so do those below.
  int64_t Conv(const Conv2d& conv) {
    const std::vector<int64_t>& shape = (*vae_.layout_)[conv.weight].shape;
    live_.Convolve({1, shape[1], shape[0], height_, width_, conv.stride}, conv.padding == 1 ? shape[2] : 0);
    height_ /= conv.stride, width_ /= conv.stride;
    const int64_t floats = shape[0] * places();
    live_.Reach(floats + use_.beside_rank * places());
    live_.Hold(floats);
    return floats;
  }
  int64_t Run(const Resnet& resnet) {
    const int64_t norm = (*vae_.layout_)[resnet.conv1.weight].shape[1] * places();
    live_.Hold(norm);
    const int64_t h = Conv(resnet.conv1);
    live_.Drop(norm);
    live_.Hold(h);  // the second norm
    live_.Drop(h);
    const int64_t result = Conv(resnet.conv2);
    live_.Drop(h);
    if (resnet.shortcut) live_.Drop(Conv(*resnet.shortcut));
    return result;
  }
  int64_t Run(const Middle& middle, int64_t h) {
    const int64_t first = Run(middle.first);
    if (middle.attention) {
      // Tokens, queries, keys, values, and what is attended; the result takes the place of what came.
      const int64_t n = places(), channels = h / n;
      live_.Reach(5 * h + AttentionScratch(n, n, channels));
    }
    return Replace(first, Run(middle.second));
  }

  const AutoencoderKl& vae_;
  const WeightUse use_;
  int64_t height_ = 0, width_ = 0;
  LiveFloats live_;
};

namespace {

constexpr int64_t kSlackBytes = 1 << 20;

// What InTiles holds beside the tile that is being made: two rows of tiles, and all that is finished; in the
// end that once more.
int64_t TilesFloats(int64_t width, int64_t height, int64_t tile, int64_t channels) {
  const auto stride = static_cast<int64_t>(static_cast<double>(tile) * (1 - kTileOverlap));
  const int64_t row = ((width + stride - 1) / stride + 1) * tile * std::min(tile, height);
  return (width * height + 2 * row) * channels;
}

}  // namespace

int64_t AutoencoderKl::EncodeBytes(int64_t width, int64_t height, int64_t tile, const WeightUse& use) const {
  Estimate estimate(*this, use);
  LiveFloats& live = estimate.live();
  const int64_t pixels = width * height, scale = config_.scale(), moments = 2 * config_.latent_channels;
  live.Hold(pixels);  // of 3 bytes
  live.Reach(2 * config_.in_channels * pixels);
  live.Hold(config_.in_channels * pixels);
  if (tile == 0) {
    estimate.Encode(height, width);
  } else {
    const int64_t beside = TilesFloats(width / scale, height / scale, tile / scale, moments);
    live.Hold(beside);
    estimate.Encode(std::min(tile, height), std::min(tile, width));
    live.Drop(beside);
  }
  live.Reach(4 * moments * (pixels / scale / scale));
  return live.PeakBytes(ConvertedFloats(*layout_, use), kSlackBytes);
}

int64_t AutoencoderKl::DecodeBytes(int64_t width, int64_t height, int64_t tile, const WeightUse& use) const {
  Estimate estimate(*this, use);
  LiveFloats& live = estimate.live();
  const int64_t pixels = width * height, channels = config_.out_channels;
  live.Hold(2 * config_.latent_channels * (pixels / config_.scale() / config_.scale()));
  if (tile == 0) {
    estimate.Decode(height, width);
  } else {
    const int64_t beside = TilesFloats(width, height, tile, channels);
    live.Hold(beside);
    estimate.Decode(std::min(tile, height), std::min(tile, width));
    live.Drop(beside);
    live.Reach(2 * channels * pixels + (beside - channels * pixels) / 2);
  }
  live.Reach(channels * pixels + 2 * pixels);  // and as bytes, in two orders
  return live.PeakBytes(ConvertedFloats(*layout_, use), kSlackBytes);
}

// ------------------------------------------------------------------------------------------- file layouts

namespace {

const KeyMap* OldAttentionNames() {
  static const KeyMap* map = [] {
    std::vector<KeyRule> rules;
    for (const char* side : {"encoder", "decoder"}) {
      const std::string base = absl::StrCat(side, ".mid_block.attentions.0.");
      rules.push_back({base + "query", {base + "to_q"}, KeyTransform::kSqueezeConv});
      rules.push_back({base + "key", {base + "to_k"}, KeyTransform::kSqueezeConv});
      rules.push_back({base + "value", {base + "to_v"}, KeyTransform::kSqueezeConv});
      rules.push_back({base + "proj_attn", {base + "to_out.0"}, KeyTransform::kSqueezeConv});
    }
    return new KeyMap(std::move(rules));
  }();
  return map;
}

std::vector<KeyRule> LdmRules(int64_t levels, int64_t layers) {
  std::vector<KeyRule> rules;
  auto add = [&](const std::string& native, const std::string& canonical,
                 KeyTransform transform = KeyTransform::kNone) {
    rules.push_back({native, {canonical}, transform});
  };
  auto add_resnet = [&](const std::string& native, const std::string& canonical) {
    for (const char* part : {".norm1", ".conv1", ".norm2", ".conv2"}) add(native + part, canonical + part);
    add(native + ".nin_shortcut", canonical + ".conv_shortcut");
  };
  for (int64_t i = 0; i < levels; ++i) {
    const std::string down = absl::StrCat("encoder.down.", i),
                      down_block = absl::StrCat("encoder.down_blocks.", i);
    for (int64_t j = 0; j < layers; ++j) {
      add_resnet(absl::StrCat(down, ".block.", j), absl::StrCat(down_block, ".resnets.", j));
    }
    add(down + ".downsample.conv", down_block + ".downsamplers.0.conv");
    // The decoder's levels are numbered from full resolution there, from the smallest here.
    const std::string up = absl::StrCat("decoder.up.", i);
    const std::string up_block = absl::StrCat("decoder.up_blocks.", levels - 1 - i);
    for (int64_t j = 0; j < layers + 1; ++j) {
      add_resnet(absl::StrCat(up, ".block.", j), absl::StrCat(up_block, ".resnets.", j));
    }
    add(up + ".upsample.conv", up_block + ".upsamplers.0.conv");
  }
  for (const std::string side : {"encoder", "decoder"}) {
    add_resnet(side + ".mid.block_1", side + ".mid_block.resnets.0");
    add_resnet(side + ".mid.block_2", side + ".mid_block.resnets.1");
    const std::string native = side + ".mid.attn_1.", canonical = side + ".mid_block.attentions.0.";
    add(native + "norm", canonical + "group_norm");
    add(native + "q", canonical + "to_q", KeyTransform::kSqueezeConv);
    add(native + "k", canonical + "to_k", KeyTransform::kSqueezeConv);
    add(native + "v", canonical + "to_v", KeyTransform::kSqueezeConv);
    add(native + "proj_out", canonical + "to_out.0", KeyTransform::kSqueezeConv);
    add(side + ".norm_out", side + ".conv_norm_out");
  }
  add("encoder.quant_conv", "quant_conv");
  add("decoder.post_quant_conv", "post_quant_conv");
  return rules;
}

const KeyMap* LdmNames(int64_t levels, int64_t layers) {
  static Mutex mu;
  static auto* maps = new std::map<std::pair<int64_t, int64_t>, const KeyMap*>();
  MutexLock lock(&mu);
  const KeyMap*& map = (*maps)[{levels, layers}];
  if (map == nullptr) map = new KeyMap(LdmRules(levels, layers));
  return map;
}

}  // namespace

VaeFileLayout DetectVaeFileLayout(const WeightFiles& files, const AutoencoderKlConfig& config) {
  const auto& tensors = files.tensors();
  for (const std::string prefix : {"", "first_stage_model.", "vae."}) {
    const auto has = [&](const char* name) { return tensors.count(prefix + name) != 0; };
    if (has("encoder.down.0.block.0.norm1.weight")) {
      return {LdmNames(static_cast<int64_t>(config.channels.size()), config.layers_per_block), prefix};
    }
    if (has("encoder.mid_block.attentions.0.query.weight")) return {OldAttentionNames(), prefix};
    if (has("encoder.down_blocks.0.resnets.0.norm1.weight")) return {nullptr, prefix};
  }
  return {};
}

bool HasVae(const WeightFiles& checkpoint) {
  const auto& tensors = checkpoint.tensors();
  return tensors.count("first_stage_model.decoder.conv_in.weight") != 0 ||
         tensors.count("vae.decoder.conv_in.weight") != 0;
}

}  // namespace latentd
