#include "families/sd/sd_keys.h"

#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "cache/base/mutex.h"

namespace latentd {
namespace {

struct Rename {
  const char *canonical, *native;
};
constexpr Rename kTopLevel[] = {
    {"time_embedding.linear_1", "time_embed.0"},
    {"time_embedding.linear_2", "time_embed.2"},
    {"time_embedding.cond_proj", "time_embed.cond_proj"},
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
  const size_t levels = config.levels.size();
  size_t input = 1;  // 0 is the first convolution
  for (size_t i = 0; i < levels; ++i) {
    const std::string down = absl::StrCat("down_blocks.", i);
    for (size_t j = 0; j < config.levels[i].down.size(); ++j, ++input) {
      parts[absl::StrCat(down, ".resnets.", j)] = absl::StrCat("input_blocks.", input, ".0");
      parts[absl::StrCat(down, ".attentions.", j)] = absl::StrCat("input_blocks.", input, ".1");
    }
    if (i + 1 < levels)
      parts[down + ".downsamplers.0.conv"] = absl::StrCat("input_blocks.", input++, ".0.op");
  }
  size_t output = 0;
  for (size_t i = 0; i < levels; ++i) {
    const std::string up = absl::StrCat("up_blocks.", i);
    const std::vector<int64_t>& layers = config.levels[levels - 1 - i].up;
    for (size_t j = 0; j < layers.size(); ++j, ++output) {
      parts[absl::StrCat(up, ".resnets.", j)] = absl::StrCat("output_blocks.", output, ".0");
      parts[absl::StrCat(up, ".attentions.", j)] = absl::StrCat("output_blocks.", output, ".1");
    }
    // Behind the level's last resnet, and its attention where there is one.
    parts[up + ".upsamplers.0.conv"] =
        absl::StrCat("output_blocks.", output - 1, layers.back() > 0 ? ".2" : ".1", ".conv");
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
  std::string text = absl::StrCat(config.added_dim > 0 ? "+" : "", config.guidance_dim > 0 ? "g" : "",
                                  config.middle.value_or(-1));
  for (const UNetConfig::Level& level : config.levels) {
    absl::StrAppend(&text, "/", absl::StrJoin(level.down, ","), "^", absl::StrJoin(level.up, ","), ".",
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

// Columns of the text that the network reads, of the first attention that says so; 0: none does.
int64_t ContextDim(const WeightFiles& files, absl::string_view prefix) {
  for (const auto& [name, entry] : files.tensors()) {
    if (absl::StartsWith(name, prefix) && absl::EndsWith(name, "transformer_blocks.0.attn2.to_k.weight") &&
        entry.info->shape.size() == 2) {
      return entry.info->shape[1];
    }
  }
  return 0;
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
      const bool whole = tensors.count(absl::StrCat(prefix, ldm ? "out.2.weight" : "conv_out.weight")) != 0 &&
                         tensors.count(absl::StrCat(
                             prefix, ldm ? "time_embed.0.weight" : "time_embedding.linear_1.weight")) != 0;
      if (in == tensors.end() || !whole || in->second.info->shape.size() != 4) continue;
      UNetFileLayout layout{.known = true, .ldm = ldm, .prefix = prefix};
      layout.in_channels = in->second.info->shape[1];
      layout.added_embedding =
          tensors.count(
              absl::StrCat(prefix, ldm ? "label_emb.0.0.weight" : "add_embedding.linear_1.weight")) != 0;
      layout.context_dim = ContextDim(files, prefix);
      return layout;
    }
  }
  return {};
}

}  // namespace latentd
