#include "families/sd/unet_config.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/config/json_config.h"

namespace latentd {
namespace {

constexpr size_t kMaxLevels = 8;
constexpr int64_t kMaxLayers = 64;
constexpr char kMiddleWithAttention[] = "UNetMidBlock2DCrossAttn";

// Settings that change the network, and the values under which they change nothing.
void RefuseVariants(JsonConfig& json) {
  auto refuse = [&](absl::string_view key, const std::string& value) {
    json.Fail(MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                        absl::StrCat(json.label(), ": ", key, " ", value, " is not supported"),
                        {{"file", json.label()}, {"what", std::string(key)}}));
  };
  for (const auto& [key, wanted] : {std::pair{"act_fn", "silu"},
                                    {"resnet_time_scale_shift", "default"},
                                    {"time_embedding_type", "positional"},
                                    {"attention_type", "default"}}) {
    if (const std::string value = json.String(key, wanted); value != wanted) refuse(key, value);
  }
  for (const char* key : {"class_embed_type", "encoder_hid_dim", "encoder_hid_dim_type",
                          "cross_attention_norm", "time_embedding_dim", "time_embedding_act_fn",
                          "timestep_post_act", "num_class_embeds", "num_attention_heads"}) {
    if (json.Has(key)) refuse(key, "in a UNet");
  }
  for (const char* key :
       {"center_input_sample", "dual_cross_attention", "only_cross_attention", "class_embeddings_concat",
        "resnet_skip_time_act", "mid_block_only_cross_attention"}) {
    if (json.Bool(key, false)) refuse(key, "true");
  }
  if (!json.Bool("flip_sin_to_cos", true)) refuse("flip_sin_to_cos", "false");
  json.Int("freq_shift", 0, 0, 0);
  json.Int("downsample_padding", 1, 1, 1);
  json.Int("conv_in_kernel", 3, 3, 3);
  json.Int("conv_out_kernel", 3, 3, 3);
  json.Double("mid_block_scale_factor", 1, 1, 1);
  json.Double("resnet_out_scale_factor", 1, 1, 1);
}

// A setting that has an entry for each level: one number for all, or a list, whose entries are one number for
// all of a level's resnets or a list of one for each.
std::vector<std::vector<int64_t>> LayersOf(JsonConfig& json, absl::string_view key,
                                           const std::vector<int64_t>& resnets) {
  std::vector<std::vector<int64_t>> layers = json.IntOrNestedInts(key, 1, resnets.size(), 1, kMaxLayers);
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].size() == 1) layers[i].resize(static_cast<size_t>(resnets[i]), layers[i].front());
    if (layers[i].size() == static_cast<size_t>(resnets[i])) continue;
    json.Fail(MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                        absl::StrCat(json.label(), ": ", key, " has ", layers[i].size(),
                                     " entries for a level of ", resnets[i], " resnets"),
                        {{"file", json.label()}, {"what", std::string(key)}}));
    layers[i].resize(static_cast<size_t>(resnets[i]), 1);
  }
  return layers;
}

}  // namespace

UNetConfig::Level UNetConfig::Level::Of(int64_t channels, int64_t heads, int64_t resnets,
                                        int64_t transformer_layers, bool attention, bool up_attention) {
  const auto count = static_cast<size_t>(resnets);
  return {channels, heads, std::vector<int64_t>(count, attention ? transformer_layers : 0),
          std::vector<int64_t>(count + 1, up_attention ? transformer_layers : 0)};
}

int64_t UNetConfig::time_ids(int64_t pooled_dim) const {
  const int64_t rest = added_dim - pooled_dim;
  return time_ids_dim > 0 && rest >= 0 && rest % time_ids_dim == 0 ? rest / time_ids_dim : -1;
}

absl::StatusOr<UNetConfig> UNetConfig::Load(const std::string& path) {
  ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path));
  RefuseVariants(json);
  auto refuse = [&](const std::string& what) {
    json.Fail(MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                        absl::StrCat(json.label(), ": ", what), {{"file", json.label()}, {"what", what}}));
  };
  UNetConfig config;
  config.in_channels = json.Int("in_channels", 4, 1, 1 << 10);
  config.out_channels = json.Int("out_channels", 4, 1, 1 << 10);
  config.context_dim = json.Int("cross_attention_dim", 1280, 1, 1 << 16);
  config.groups = json.Int("norm_num_groups", 32, 1, 1 << 14);
  config.norm_eps = json.Double("norm_eps", 1e-5, 0, 1);
  config.sample_size = json.Int("sample_size", 64, 1, 1 << 10);
  config.linear_projection = json.Bool("use_linear_projection", false);

  const std::vector<int64_t> channels = json.Ints("block_out_channels", {320, 640, 1280, 1280}, 1, 1 << 14);
  const size_t count = channels.size();
  if (count < 1 || count > kMaxLevels) {
    refuse(absl::StrCat(count, " levels"));
    return json.status();
  }
  const std::vector<std::string> down =
      json.Strings("down_block_types",
                   {"CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"});
  const std::vector<std::string> up = json.Strings(
      "up_block_types", {"UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"});
  // Published configs call the number of heads by this name.
  const std::vector<int64_t> heads = json.IntOrInts("attention_head_dim", 8, count, 1, 1024);
  const std::vector<int64_t> resnets = json.IntOrInts("layers_per_block", 2, count, 1, kMaxLayers);
  RETURN_IF_ERROR(json.status());
  if (down.size() != count || up.size() != count) {
    refuse(absl::StrCat(count, " levels with ", down.size(), " and ", up.size(), " block types"));
    return json.status();
  }
  const std::vector<std::vector<int64_t>> layers = LayersOf(json, "transformer_layers_per_block", resnets);
  // Resnets of each level on the way up, in whose order they are listed there.
  std::vector<int64_t> up_resnets(resnets.rbegin(), resnets.rend());
  for (int64_t& number : up_resnets) ++number;
  std::vector<std::vector<int64_t>> up_layers;
  if (json.Has("reverse_transformer_layers_per_block")) {
    up_layers = LayersOf(json, "reverse_transformer_layers_per_block", up_resnets);
  } else {
    for (size_t i = 0; i < count; ++i) {
      const std::vector<int64_t>& of = layers[count - 1 - i];
      if (std::set<int64_t>(of.begin(), of.end()).size() > 1) {
        refuse(
            "transformer_layers_per_block differs within a level, and reverse_transformer_layers_per_block "
            "is not given");
      }
      up_layers.emplace_back(static_cast<size_t>(up_resnets[i]), of.front());
    }
  }
  const std::string middle =
      json.IsNull("mid_block_type") ? "" : json.String("mid_block_type", kMiddleWithAttention);
  if (middle == kMiddleWithAttention) {
    config.middle = layers.back().front();
  } else if (middle == "UNetMidBlock2D") {
    config.middle = 0;
  } else if (middle.empty()) {
    config.middle.reset();
  } else {
    refuse("mid_block_type " + middle);
  }
  config.guidance_dim = json.Int("time_cond_proj_dim", 0, 0, 1 << 14);
  RETURN_IF_ERROR(json.status());
  config.levels.clear();
  for (size_t i = 0; i < count; ++i) {
    const std::string& up_type = up[count - 1 - i];
    const bool attention = down[i] == "CrossAttnDownBlock2D", up_attention = up_type == "CrossAttnUpBlock2D";
    if (!attention && down[i] != "DownBlock2D") refuse("block type " + down[i]);
    if (!up_attention && up_type != "UpBlock2D") refuse("block type " + up_type);
    Level level{channels[i], heads[i], layers[i], up_layers[count - 1 - i]};
    if (!attention) std::fill(level.down.begin(), level.down.end(), 0);
    if (!up_attention) std::fill(level.up.begin(), level.up.end(), 0);
    if (level.channels % config.groups != 0 || level.channels % level.heads != 0) {
      refuse(absl::StrCat(level.channels, " channels in ", config.groups, " groups and ", level.heads,
                          " heads"));
    }
    config.levels.push_back(level);
  }
  const std::string added = json.String("addition_embed_type", "");
  if (added == "text_time") {
    config.added_dim = json.Int("projection_class_embeddings_input_dim", 0, 1, 1 << 16);
    config.time_ids_dim = json.Int("addition_time_embed_dim", 0, 2, 1 << 14);
    if (config.added_dim == 0 || config.time_ids_dim == 0 || config.time_ids_dim % 2 != 0) {
      refuse("addition_embed_type text_time without its sizes");
    }
  } else if (!added.empty()) {
    refuse("addition_embed_type " + added);
  }
  RETURN_IF_ERROR(json.status());
  return config;
}

UNetConfig UNetConfig::Sd15() { return UNetConfig(); }

UNetConfig UNetConfig::SdxlBase() {
  UNetConfig config;
  config.levels = {Level::Of(320, 5, 2, 0), Level::Of(640, 10, 2, 2), Level::Of(1280, 20, 2, 10)};
  config.middle = 10;
  config.context_dim = 2048;
  config.linear_projection = true;
  config.added_dim = 2816;
  config.time_ids_dim = 256;
  return config;
}

UNetConfig UNetConfig::SdxlRefiner() {
  UNetConfig config;
  config.levels = {Level::Of(384, 6, 2, 0), Level::Of(768, 12, 2, 4), Level::Of(1536, 24, 2, 4),
                   Level::Of(1536, 24, 2, 0)};
  config.middle = 4;
  config.context_dim = 1280;
  config.linear_projection = true;
  config.added_dim = 2560;
  config.time_ids_dim = 256;
  return config;
}

}  // namespace latentd
