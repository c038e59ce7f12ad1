#include "families/sd/sd_keys.h"

#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "cache/mutex.h"

namespace latentd {
namespace {

struct Rename {
  const char *canonical, *native;
};
constexpr Rename kTopLevel[] = {
    {"time_embedding.linear_1", "time_embed.0"},
    {"time_embedding.linear_2", "time_embed.2"},
    {"add_embedding.linear_1", "label_emb.0.0"},
    {"add_embedding.linear_2", "label_emb.0.2"},
    {"conv_in", "input_blocks.0.0"},
    {"conv_norm_out", "out.0"},
    {"conv_out", "out.2"},
};
constexpr Rename kInResnet[] = {
    {"norm1", "in_layers.0"},  {"conv1", "in_layers.2"},  {"time_emb_proj", "emb_layers.1"},
    {"norm2", "out_layers.0"}, {"conv2", "out_layers.3"}, {"conv_shortcut", "skip_connection"},
};

// Canonical parts and what they are there. An attention's inner names are the same in both.
std::map<std::string, std::string> LdmParts(const UNetConfig& config) {
  std::map<std::string, std::string> parts;
  const auto levels = static_cast<int64_t>(config.levels.size());
  const int64_t stages =
      config.layers_per_block + 1;  // of a level, with what changes the size as one of them
  for (int64_t i = 0; i < levels; ++i) {
    const std::string down = absl::StrCat("down_blocks.", i), up = absl::StrCat("up_blocks.", i);
    for (int64_t j = 0; j < stages; ++j) {
      const std::string in = absl::StrCat("input_blocks.", 1 + i * stages + j);
      const std::string out = absl::StrCat("output_blocks.", i * stages + j);
      if (j < config.layers_per_block) {
        parts[absl::StrCat(down, ".resnets.", j)] = in + ".0";
        parts[absl::StrCat(down, ".attentions.", j)] = in + ".1";
      } else {
        parts[down + ".downsamplers.0.conv"] = in + ".0.op";
        // Behind the level's last resnet, and its attention where there is one.
        const bool attention = config.levels[static_cast<size_t>(levels - 1 - i)].up_attention;
        parts[up + ".upsamplers.0.conv"] = absl::StrCat(out, attention ? ".2" : ".1", ".conv");
      }
      parts[absl::StrCat(up, ".resnets.", j)] = out + ".0";
      parts[absl::StrCat(up, ".attentions.", j)] = out + ".1";
    }
  }
  parts["mid_block.resnets.0"] = "middle_block.0";
  parts["mid_block.attentions.0"] = "middle_block.1";
  parts["mid_block.resnets.1"] = "middle_block.2";
  return parts;
}

std::string LdmName(const std::map<std::string, std::string>& parts, absl::string_view module) {
  for (const Rename& row : kTopLevel) {
    if (module == row.canonical) return row.native;
  }
  for (const auto& [canonical, native] : parts) {
    absl::string_view rest = module;
    if (!absl::ConsumePrefix(&rest, canonical)) continue;
    if (rest.empty()) return native;
    if (!absl::ConsumePrefix(&rest, ".")) continue;
    if (!absl::StrContains(canonical, ".resnets.")) return absl::StrCat(native, ".", rest);
    for (const Rename& row : kInResnet) {
      if (rest == row.canonical) return absl::StrCat(native, ".", row.native);
    }
  }
  return "";
}

// The modules of a layout, once each.
std::set<std::string> Modules(const ComponentLayout& layout) {
  std::set<std::string> modules;
  for (const TensorDecl& tensor : layout.tensors())
    modules.insert(tensor.name.substr(0, tensor.name.rfind('.')));
  return modules;
}

// All that the modules' names depend on.
std::string Structure(const UNetConfig& config) {
  std::string text = absl::StrCat(config.layers_per_block, config.added_dim > 0 ? "+" : "");
  for (const UNetConfig::Level& level : config.levels) {
    absl::StrAppend(&text, "/", level.attention, level.up_attention, ".", level.transformer_layers, ".",
                    level.channels);
  }
  return text;
}

const KeyMap* Cached(const std::string& key, const std::function<std::vector<KeyRule>()>& make) {
  static Mutex mu;
  static auto* maps = new std::map<std::string, const KeyMap*>();
  MutexLock lock(&mu);
  const KeyMap*& map = (*maps)[key];
  if (map == nullptr) map = new KeyMap(make());
  return map;
}

}  // namespace

const KeyMap* LdmUNetKeys(const UNet2DCondition& unet) {
  return Cached("ldm " + Structure(unet.config()), [&] {
    const std::map<std::string, std::string> parts = LdmParts(unet.config());
    std::vector<KeyRule> rules;
    for (const std::string& module : Modules(*unet.layout()))
      rules.push_back({LdmName(parts, module), {module}});
    return rules;
  });
}

const KeyMap* ProcessorUNetKeys(const UNet2DCondition& unet) {
  return Cached("processor " + Structure(unet.config()), [&] {
    std::vector<KeyRule> rules;
    for (const std::string& module : Modules(*unet.layout())) {
      for (const char* attention : {".attn1.", ".attn2."}) {
        const size_t at = module.find(attention);
        if (at == std::string::npos) continue;
        const size_t end = at + 7;
        const absl::string_view layer = absl::StripSuffix(absl::string_view(module).substr(end), ".0");
        rules.push_back({absl::StrCat(module.substr(0, end), "processor.", layer, "_lora"), {module}});
      }
    }
    return rules;
  });
}

UNetFileLayout DetectUNetFileLayout(const WeightFiles& files) {
  const auto& tensors = files.tensors();
  for (const char* prefix : {"model.diffusion_model.", "diffusion_model.", "unet.", "model.", ""}) {
    for (const bool ldm : {true, false}) {
      const auto in = tensors.find(absl::StrCat(prefix, ldm ? "input_blocks.0.0.weight" : "conv_in.weight"));
      // The first convolution of a VAE or a ControlNet is called that, too.
      const bool whole =
          tensors.count(absl::StrCat(prefix, ldm ? "out.2.weight" : "conv_out.weight")) != 0 &&
          tensors.count(absl::StrCat(prefix, ldm ? "middle_block.0.in_layers.0.weight"
                                                 : "mid_block.resnets.0.time_emb_proj.weight")) != 0;
      if (in == tensors.end() || !whole || in->second.info->shape.size() != 4) continue;
      UNetFileLayout layout{.known = true, .ldm = ldm, .prefix = prefix};
      layout.in_channels = in->second.info->shape[1];
      layout.added_embedding =
          tensors.count(
              absl::StrCat(prefix, ldm ? "label_emb.0.0.weight" : "add_embedding.linear_1.weight")) != 0;
      const std::string first_attention =
          absl::StrCat(prefix, ldm ? "middle_block.1." : "mid_block.attentions.0.",
                       "transformer_blocks.0.attn2.to_k.weight");
      if (const auto k = tensors.find(first_attention);
          k != tensors.end() && k->second.info->shape.size() == 2) {
        layout.context_dim = k->second.info->shape[1];
      }
      return layout;
    }
  }
  return {};
}

}  // namespace latentd
