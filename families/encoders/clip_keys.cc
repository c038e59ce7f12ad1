#include "families/encoders/clip_keys.h"

#include "absl/strings/str_cat.h"

namespace latentd {

const KeyMap* TransformersClipKeys() {
  static const KeyMap* map = [] {
    std::vector<KeyRule> rules;
    for (const char* module :
         {"embeddings.token_embedding", "embeddings.position_embedding", "encoder.layers.{}.layer_norm1",
          "encoder.layers.{}.layer_norm2", "encoder.layers.{}.self_attn.q_proj",
          "encoder.layers.{}.self_attn.k_proj", "encoder.layers.{}.self_attn.v_proj",
          "encoder.layers.{}.self_attn.out_proj", "encoder.layers.{}.mlp.fc1", "encoder.layers.{}.mlp.fc2",
          "final_layer_norm"}) {
      rules.push_back({absl::StrCat("text_model.", module), {module}});
    }
    return new KeyMap(std::move(rules));
  }();
  return map;
}

const KeyMap* OpenClipKeys() {
  static const KeyMap* map = new KeyMap({
      {"token_embedding", {"embeddings.token_embedding"}},
      {"positional_embedding", {"embeddings.position_embedding"}},
      {"transformer.resblocks.{}.ln_1", {"encoder.layers.{}.layer_norm1"}},
      {"transformer.resblocks.{}.ln_2", {"encoder.layers.{}.layer_norm2"}},
      {"transformer.resblocks.{}.attn.in_proj",
       {"encoder.layers.{}.self_attn.q_proj", "encoder.layers.{}.self_attn.k_proj",
        "encoder.layers.{}.self_attn.v_proj"}},
      {"transformer.resblocks.{}.attn.out_proj", {"encoder.layers.{}.self_attn.out_proj"}},
      {"transformer.resblocks.{}.mlp.c_fc", {"encoder.layers.{}.mlp.fc1"}},
      {"transformer.resblocks.{}.mlp.c_proj", {"encoder.layers.{}.mlp.fc2"}},
      {"ln_final", {"final_layer_norm"}},
      {"text_projection", {"text_projection"}, KeyTransform::kTranspose},
  });
  return map;
}

ClipFileLayout DetectClipFileLayout(const WeightFiles& files, const std::string& prefix) {
  auto has = [&](const char* name) { return files.tensors().count(prefix + name) != 0; };
  ClipFileLayout layout;
  layout.prefix = prefix;
  layout.projection = has("text_projection.weight") || has("text_projection");
  layout.known = true;
  if (has("text_model.final_layer_norm.weight")) {
    layout.key_map = TransformersClipKeys();
  } else if (has("ln_final.weight")) {
    layout.key_map = OpenClipKeys();
  } else {
    layout.known = has("final_layer_norm.weight");
  }
  return layout;
}

}  // namespace latentd
