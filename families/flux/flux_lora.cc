#include "families/flux/flux_lora.h"

#include <utility>

#include "families/flux/flux_keys.h"

namespace latentd {
namespace {

// Names that LoRA files alone use.
const KeyMap* FluxLoraKeys() {
  static const KeyMap* map = new KeyMap({
      // OneTrainer trains the parts of a fused layer apart and numbers them.
      {"double_blocks.{}.img_attn.qkv.0", {"transformer_blocks.{}.attn.to_q"}},
      {"double_blocks.{}.img_attn.qkv.1", {"transformer_blocks.{}.attn.to_k"}},
      {"double_blocks.{}.img_attn.qkv.2", {"transformer_blocks.{}.attn.to_v"}},
      {"double_blocks.{}.txt_attn.qkv.0", {"transformer_blocks.{}.attn.add_q_proj"}},
      {"double_blocks.{}.txt_attn.qkv.1", {"transformer_blocks.{}.attn.add_k_proj"}},
      {"double_blocks.{}.txt_attn.qkv.2", {"transformer_blocks.{}.attn.add_v_proj"}},
      {"single_blocks.{}.linear1.0", {"single_transformer_blocks.{}.attn.to_q"}},
      {"single_blocks.{}.linear1.1", {"single_transformer_blocks.{}.attn.to_k"}},
      {"single_blocks.{}.linear1.2", {"single_transformer_blocks.{}.attn.to_v"}},
      {"single_blocks.{}.linear1.3", {"single_transformer_blocks.{}.proj_mlp"}},
      {"img_in.proj", {"x_embedder"}},  // OMI's name

      // XLabs: 1 is the image's stream, 2 the text's.
      {"double_blocks.{}.processor.qkv_lora1",
       {"transformer_blocks.{}.attn.to_q", "transformer_blocks.{}.attn.to_k",
        "transformer_blocks.{}.attn.to_v"}},
      {"double_blocks.{}.processor.qkv_lora2",
       {"transformer_blocks.{}.attn.add_q_proj", "transformer_blocks.{}.attn.add_k_proj",
        "transformer_blocks.{}.attn.add_v_proj"}},
      {"double_blocks.{}.processor.proj_lora1", {"transformer_blocks.{}.attn.to_out.0"}},
      {"double_blocks.{}.processor.proj_lora2", {"transformer_blocks.{}.attn.to_add_out"}},
      // Of a single block, of which linear1's rows for the feed-forward are not trained.
      {"single_blocks.{}.processor.qkv_lora",
       {"single_transformer_blocks.{}.attn.to_q", "single_transformer_blocks.{}.attn.to_k",
        "single_transformer_blocks.{}.attn.to_v"}},
      {"single_blocks.{}.processor.proj_lora", {"single_transformer_blocks.{}.proj_out"}},
  });
  return map;
}

}  // namespace

PatchTarget FluxTransformerTarget(std::shared_ptr<const ComponentLayout> layout) {
  return {.component = "transformer",
          .layout = std::move(layout),
          .key_maps = {FluxNativeKeys(), FluxLoraKeys()},
          .dotted_prefixes = {"transformer.", "diffusion_model.", "base_model.model.",
                              "base_model.model.transformer.", "model.diffusion_model.", ""},
          .growable = {"x_embedder.weight"},
          .flat_prefixes = {"lora_unet_", "lora_transformer_", "lycoris_", "oft_unet_"}};
}

PatchTarget FluxClipTarget(std::shared_ptr<const ComponentLayout> layout) {
  return {.component = "text_encoder",
          .layout = std::move(layout),
          .key_maps = {},
          .dotted_prefixes = {"text_encoder.text_model.", "text_encoder.",
                              "text_encoders.clip_l.transformer.text_model.", "clip_l.text_model.", "clip_l.",
                              "text_model."},
          .flat_prefixes = {"lora_te1_text_model_", "lora_te_text_model_", "lora_te1_", "lora_te_"}};
}

PatchTarget FluxT5Target(std::shared_ptr<const ComponentLayout> layout) {
  return {.component = "text_encoder_2",
          .layout = std::move(layout),
          .key_maps = {},
          .dotted_prefixes = {"text_encoder_2.", "text_encoders.t5xxl.transformer.", "t5."},
          .flat_prefixes = {"lora_te2_", "lora_te3_"}};
}

}  // namespace latentd
