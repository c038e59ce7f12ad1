#include "families/sd/unet_config.h"

#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "families/config/json_config.h"

namespace latentd {
namespace {

constexpr size_t kMaxLevels = 8;

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
                                    {"attention_type", "default"},
                                    {"mid_block_type", "UNetMidBlock2DCrossAttn"}}) {
    if (const std::string value = json.String(key, wanted); value != wanted) refuse(key, value);
  }
  for (const char* key :
       {"class_embed_type", "encoder_hid_dim", "encoder_hid_dim_type", "cross_attention_norm",
        "reverse_transformer_layers_per_block", "time_cond_proj_dim", "time_embedding_dim",
        "time_embedding_act_fn", "timestep_post_act", "num_class_embeds", "num_attention_heads"}) {
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

}  // namespace

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
  config.layers_per_block = json.Int("layers_per_block", 2, 1, 64);
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
  const std::vector<int64_t> layers = json.IntOrInts("transformer_layers_per_block", 1, count, 1, 64);
  RETURN_IF_ERROR(json.status());
  if (down.size() != count || up.size() != count) {
    refuse(absl::StrCat(count, " levels with ", down.size(), " and ", up.size(), " block types"));
    return json.status();
  }
  config.levels.clear();
  for (size_t i = 0; i < count; ++i) {
    const std::string& up_type = up[count - 1 - i];
    const Level level{channels[i], heads[i], layers[i], down[i] == "CrossAttnDownBlock2D",
                      up_type == "CrossAttnUpBlock2D"};
    if (!level.attention && down[i] != "DownBlock2D") refuse("block type " + down[i]);
    if (!level.up_attention && up_type != "UpBlock2D") refuse("block type " + up_type);
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
  config.levels = {{320, 5, 1, false, false}, {640, 10, 2, true, true}, {1280, 20, 10, true, true}};
  config.context_dim = 2048;
  config.linear_projection = true;
  config.added_dim = 2816;
  config.time_ids_dim = 256;
  return config;
}

UNetConfig UNetConfig::SdxlRefiner() {
  UNetConfig config;
  config.levels = {{384, 6, 4, false, false},
                   {768, 12, 4, true, true},
                   {1536, 24, 4, true, true},
                   {1536, 24, 4, false, false}};
  config.context_dim = 1280;
  config.linear_projection = true;
  config.added_dim = 2560;
  config.time_ids_dim = 256;
  return config;
}

}  // namespace latentd
