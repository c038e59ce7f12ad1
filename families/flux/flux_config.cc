#include "families/flux/flux_config.h"

#include <numeric>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/config/json_config.h"

namespace latentd {
namespace {

constexpr int64_t kTokenChannels = 64;
constexpr int64_t kPublishedHeadDim = 128;

absl::Status Unsupported(const std::string& what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                   absl::StrCat("FLUX.1 transformer: ", what), {{"what", what}});
}

absl::Status Check(const FluxConfig& config) {
  const bool known = config.in_channels == kTokenChannels || config.in_channels == 2 * kTokenChannels;
  if (!known || config.out_channels != kTokenChannels) {
    return Unsupported(
        absl::StrCat(config.in_channels, " input and ", config.out_channels,
                     " output channels; text-to-image models (64) and control models (128) are "
                     "supported, not Fill or Redux"));
  }
  const int64_t sum = std::accumulate(config.axes.begin(), config.axes.end(), int64_t{0});
  bool even = config.axes.size() == 3;
  for (int64_t axis : config.axes) even = even && axis % 2 == 0;
  if (!even || sum != config.head_dim) {
    return Unsupported(absl::StrCat("rotary axes do not share out a head of ", config.head_dim, " channels"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FluxConfig> FluxConfig::Load(const std::string& path) {
  ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path));
  FluxConfig config;
  config.in_channels = json.Int("in_channels", 64, 1, 1 << 16);
  config.out_channels = json.Int("out_channels", config.in_channels, 1, 1 << 16);
  config.double_blocks = json.Int("num_layers", 19, 0, 1000);
  config.single_blocks = json.Int("num_single_layers", 38, 0, 1000);
  config.heads = json.Int("num_attention_heads", 24, 1, 1024);
  config.head_dim = json.Int("attention_head_dim", 128, 2, 4096);
  config.text_dim = json.Int("joint_attention_dim", 4096, 1, 1 << 16);
  config.pooled_dim = json.Int("pooled_projection_dim", 768, 1, 1 << 16);
  config.guidance_embeds = json.Bool("guidance_embeds", false);
  config.axes = json.Ints("axes_dims_rope", {16, 56, 56}, 2, 4096);
  json.Int("patch_size", 1, 1, 1);
  RETURN_IF_ERROR(json.status());
  RETURN_IF_ERROR(Check(config));
  return config;
}

absl::StatusOr<FluxConfig> FluxConfig::Infer(const WeightFiles& files, const std::string& prefix,
                                             const FluxConfig& base) {
  const auto& tensors = files.tensors();
  absl::Status status;
  // Extent `axis` of a tensor; an error where the tensor is not there.
  auto extent = [&](const std::string& name, size_t axis) -> int64_t {
    auto it = tensors.find(prefix + name);
    if (it == tensors.end() || it->second.info->shape.size() <= axis) {
      if (status.ok()) status = Unsupported("the file has no tensor " + name);
      return 0;
    }
    return it->second.info->shape[axis];
  };
  auto has = [&](const std::string& name) { return tensors.count(prefix + name) != 0; };
  auto count = [&](const std::string& blocks, const std::string& tensor) {
    int64_t n = 0;
    while (has(absl::StrCat(blocks, ".", n, ".", tensor))) ++n;
    return n;
  };

  FluxConfig config;
  const int64_t dim = extent("img_in.weight", 0);
  config.in_channels = extent("img_in.weight", 1);
  config.out_channels = extent("final_layer.linear.weight", 0);
  config.text_dim = extent("txt_in.weight", 1);
  config.pooled_dim = extent("vector_in.in_layer.weight", 1);
  config.head_dim = extent("double_blocks.0.img_attn.norm.query_norm.scale", 0);
  const int64_t mlp_dim = extent("double_blocks.0.img_mlp.0.weight", 0);
  config.double_blocks = count("double_blocks", "img_attn.qkv.weight");
  config.single_blocks = count("single_blocks", "linear1.weight");
  config.guidance_embeds = has("guidance_in.in_layer.weight");
  RETURN_IF_ERROR(status);
  if (config.head_dim < 2 || dim % config.head_dim != 0) {
    return Unsupported(
        absl::StrCat("width ", dim, " is no multiple of the head's ", config.head_dim, " channels"));
  }
  config.heads = dim / config.head_dim;
  if (mlp_dim != config.mlp_dim())
    return Unsupported(absl::StrCat("an MLP of ", mlp_dim, " on a width of ", dim));
  if (config.head_dim != kPublishedHeadDim) config.axes = base.axes;
  RETURN_IF_ERROR(Check(config));
  return config;
}

}  // namespace latentd
