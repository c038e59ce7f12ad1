#include "patcher/patch_identity.h"

#include <algorithm>
#include <optional>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_replace.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

struct Component {
  absl::string_view prefix, name;
};
// What stands before the layers of text encoders; all else is the denoiser's.
constexpr Component kComponents[] = {
    {"lora_te1_", "text_encoder"},
    {"lora_te2_", "text_encoder_2"},
    {"lora_te3_", "text_encoder_3"},
    {"lora_te_", "text_encoder"},
    {"text_encoder_2.", "text_encoder_2"},
    {"text_encoder_3.", "text_encoder_3"},
    {"text_encoder.", "text_encoder"},
    {"text_encoder:", "text_encoder"},
    {"clip_l.", "text_encoder"},
    {"clip_g.", "text_encoder_2"},
    {"t5.", "text_encoder_2"},
};

// The layer without its values; nothing when its tensors do not fit each other.
std::optional<PatchLayer> Describe(const std::string& name, const LayerKeys& keys,
                                   const NamedShapes& tensors) {
  auto layer = MakeLayer(name, keys, tensors, [&](const std::string& key) -> absl::StatusOr<at::Tensor> {
    const std::vector<int64_t>& shape = tensors.at(key);
    int64_t numbers = 1;
    for (int64_t extent : shape) numbers *= extent;
    if (numbers == 1) return at::ones(shape);
    return at::empty(shape, at::TensorOptions().device(at::kMeta));
  });
  return layer.ok() ? std::make_optional(*std::move(layer)) : std::nullopt;
}

// The denoiser's layers, with underscores for dots, as the rows of the table look at them.
class Names {
 public:
  Names(const PatchKeys& keys, const NamedShapes& tensors) : keys_(keys), tensors_(tensors) {
    for (const auto& [name, layer] : keys.layers) {
      if (ComponentOf(name) == "denoiser") flat_.emplace(absl::StrReplaceAll(name, {{".", "_"}}), name);
    }
  }

  bool Has(absl::string_view text) const {
    return std::any_of(flat_.begin(), flat_.end(),
                       [&](const auto& n) { return absl::StrContains(n.first, text); });
  }
  bool HasAny(std::initializer_list<absl::string_view> texts) const {
    return std::any_of(texts.begin(), texts.end(), [&](absl::string_view text) { return Has(text); });
  }

  // Largest number N in "<text>N" ("transformer_blocks_"), −1 without one.
  int64_t LastIndex(absl::string_view text) const {
    int64_t last = -1;
    for (const auto& [flat, raw] : flat_) {
      const absl::string_view name = flat;
      for (size_t at = name.find(text); at != absl::string_view::npos; at = name.find(text, at + 1)) {
        const absl::string_view rest = name.substr(at + text.size());
        int64_t index = 0;
        if (absl::SimpleAtoi(rest.substr(0, rest.find('_')), &index)) last = std::max(last, index);
      }
    }
    return last;
  }

  // Of the first layer whose name has that end; −1 where a layer does not say.
  Extent SizeOf(absl::string_view end) const {
    for (const auto& [name, raw] : flat_) {
      if (!absl::EndsWith(name, end)) continue;
      const auto layer = Describe(raw, keys_.layers.at(raw), tensors_);
      if (!layer) continue;
      Extent extent = layer->extent();
      if (extent.columns < 0) extent.columns = extent.inputs;
      return extent;
    }
    return {};
  }

 private:
  const PatchKeys& keys_;
  const NamedShapes& tensors_;
  std::map<std::string, std::string> flat_;
};

// FLUX in the native layout: FLUX.2 has wider feed-forwards, or another width.
bool IsFlux2(const Names& names) {
  const Extent linear1 = names.SizeOf("_linear1"), mlp = names.SizeOf("img_mlp_0"),
               qkv = names.SizeOf("img_attn_qkv");
  return (linear1.rows > 0 && linear1.rows == 9 * linear1.columns) ||
         (mlp.rows > 0 && mlp.rows == 6 * mlp.columns) || (qkv.columns > 0 && qkv.columns != 3072);
}

bool IsUnet(const Names& names) {
  return names.HasAny(
      {"down_blocks_", "up_blocks_", "mid_block_", "input_blocks_", "output_blocks_", "middle_block_"});
}

// Transformer blocks without FLUX's single ones: by width, and by number of blocks where widths agree.
int64_t Width(const Names& names) {
  for (absl::string_view end : {"attn_to_q", "attn_to_out_0", "x_block_attn_qkv"}) {
    if (const int64_t columns = names.SizeOf(end).columns; columns > 0) return columns;
  }
  return -1;
}

struct Row {
  absl::string_view family;
  bool (*fits)(const Names&);
};
// The first row that fits.
constexpr Row kFamilies[] = {
    {"Krea 2",
     [](const Names& n) {
       return n.HasAny({"txtfusion", "text_fusion"}) || (n.Has("attn_wq") && n.Has("attn_gate"));
     }},
    {"FLUX.2",
     [](const Names& n) {
       return n.HasAny({"attn_to_qkv_mlp_proj", "double_stream_modulation", "ff_linear_in"});
     }},
    {"FLUX.2",
     [](const Names& n) {
       return n.HasAny({"double_blocks_", "single_blocks_"}) && IsFlux2(n);
     }},
    {"FLUX.1",
     [](const Names& n) {
       return n.HasAny({"double_blocks_", "single_blocks_", "single_transformer_blocks_"});
     }},
    {"SD3.5", [](const Names& n) { return n.Has("joint_blocks_") && Width(n) == 2432; }},
    {"SD3", [](const Names& n) { return n.Has("joint_blocks_"); }},
    {"Z-Image",
     [](const Names& n) {
       return n.HasAny({"noise_refiner_", "context_refiner_"}) ||
              (n.Has("layers_") && n.HasAny({"attention_to_", "attention_qkv"}));
     }},
    {"Anima",
     [](const Names& n) {
       return n.HasAny({"self_attn_q_proj", "mlp_layer1", "adaln_modulation_", "llm_adapter"});
     }},
    // 14B text-to-video of 2.1 has the very layers of 2.2's experts; files for those are many more.
    {"WAN 2.1",
     [](const Names& n) {
       return n.HasAny({"cross_attn_k_img", "attn2_add_k_proj"});
     }},
    {"WAN 2.1",
     [](const Names& n) {
       return n.HasAny({"self_attn_q", "ffn_0", "ffn_net_0"}) && n.Has("blocks_") &&
              (n.SizeOf("self_attn_q").columns == 1536 || n.SizeOf("attn1_to_q").columns == 1536);
     }},
    {"WAN 2.2",
     [](const Names& n) {
       return n.HasAny({"self_attn_q", "ffn_0", "ffn_net_0"}) && n.Has("blocks_");
     }},
    // A UNet's blocks at one place are one or two in SD1 and SD2, up to ten in SDXL.
    {"SDXL",
     [](const Names& n) {
       return IsUnet(n) &&
              (n.HasAny({"input_blocks_", "output_blocks_"}) || n.LastIndex("_transformer_blocks_") >= 2 ||
               n.SizeOf("attn2_to_k").columns == 2048);
     }},
    {"SD2", [](const Names& n) { return IsUnet(n) && n.SizeOf("attn2_to_k").columns == 1024; }},
    {"SD1.5",
     [](const Names& n) {
       return IsUnet(n) && (n.HasAny({"down_blocks_0_attentions_", "up_blocks_3_attentions_"}) ||
                            n.SizeOf("attn2_to_k").columns == 768);
     }},
    {"Qwen-Image",
     [](const Names& n) {
       return n.HasAny({"img_mod_1", "txt_mod_1", "img_mlp_net_", "txt_mlp_net_"});
     }},
    {"SD3", [](const Names& n) { return n.Has("transformer_blocks_") && Width(n) == 1536; }},
    {"SD3.5", [](const Names& n) { return n.Has("transformer_blocks_") && Width(n) == 2432; }},
    {"Qwen-Image",
     [](const Names& n) { return n.LastIndex("transformer_blocks_") >= 38 && Width(n) == 3072; }},
    {"FLUX.1", [](const Names& n) { return n.Has("transformer_blocks_") && Width(n) == 3072; }},
    {"FLUX.2",
     [](const Names& n) { return n.Has("transformer_blocks_") && (Width(n) == 4096 || Width(n) == 6144); }},
};

// Names by index have no modules; the width of what a text encoder gives to the UNet tells.
std::string FamilyByIndex(const std::vector<std::string>& keys, const NamedShapes& tensors) {
  for (const std::string& key : keys) {
    const std::vector<int64_t>& shape = tensors.at(key);
    if (absl::StartsWith(key, "unet:") && absl::EndsWith(key, ":down") && shape.size() == 2) {
      if (shape[1] == 2048) return "SDXL";
      if (shape[1] == 1024) return "SD2";
      if (shape[1] == 768) return "SD1.5";
    }
  }
  return "";
}

}  // namespace

std::string ComponentOf(absl::string_view layer) {
  for (const Component& c : kComponents) {
    if (absl::StartsWith(layer, c.prefix)) return std::string(c.name);
  }
  return "denoiser";
}

std::string FamilyOf(const PatchKeys& keys, const NamedShapes& tensors) {
  if (const auto it = keys.unsupported.find("LoRA by index"); it != keys.unsupported.end()) {
    return FamilyByIndex(it->second, tensors);
  }
  const Names names(keys, tensors);
  for (const Row& row : kFamilies) {
    if (row.fits(names)) return std::string(row.family);
  }
  return "";
}

absl::StatusOr<PatchIdentity> Identify(const NamedShapes& tensors) {
  ASSIGN_OR_RETURN(const PatchKeys keys, PatchKeys::GroupAll(tensors));
  PatchIdentity identity;
  identity.family = FamilyOf(keys, tensors);
  identity.format = keys.Format();
  identity.layers = static_cast<int64_t>(keys.layers.size());
  identity.ignored = keys.ignored;
  for (const auto& [name, layer] : keys.layers) {
    ++identity.components[ComponentOf(name)];
    ++identity.layer_types[LayerType(layer, tensors)];
    identity.layers_with_alpha += layer.has(PatchKey::kAlpha) ? 1 : 0;
    const auto described = Describe(name, layer, tensors);
    if (described && described->rank() > 0) ++identity.ranks[described->rank()];
  }
  for (const auto& [type, names] : keys.unsupported) {
    if (type == "unknown") continue;
    // A name by index is one half of a pair.
    const int64_t per_layer = type == "LoRA by index" ? 2 : 1;
    const auto layers = static_cast<int64_t>(names.size()) / per_layer;
    identity.layers += layers;
    identity.layer_types[type] += layers;
    std::map<std::string, int64_t> tensors_of;
    for (const std::string& name : names) ++tensors_of[ComponentOf(name)];
    for (const auto& [component, count] : tensors_of) identity.components[component] += count / per_layer;
  }
  return identity;
}

}  // namespace latentd
