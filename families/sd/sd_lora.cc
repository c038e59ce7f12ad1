#include "families/sd/sd_lora.h"

#include <utility>

#include "families/encoders/clip_keys.h"
#include "families/sd/sd_keys.h"

namespace latentd {
namespace {

// Names that LoRA files alone use.
const KeyMap* ClipLoraKeys() {
  static const KeyMap* map = new KeyMap({
      // Old diffusers, which adds to the attention rather than to its layers.
      {"encoder.layers.{}.self_attn.to_q_lora", {"encoder.layers.{}.self_attn.q_proj"}},
      {"encoder.layers.{}.self_attn.to_k_lora", {"encoder.layers.{}.self_attn.k_proj"}},
      {"encoder.layers.{}.self_attn.to_v_lora", {"encoder.layers.{}.self_attn.v_proj"}},
      {"encoder.layers.{}.self_attn.to_out_lora", {"encoder.layers.{}.self_attn.out_proj"}},
  });
  return map;
}

}  // namespace

PatchTarget UNetTarget(const UNet2DCondition& unet) {
  return {.component = "unet",
          .layout = unet.layout(),
          .key_maps = {LdmUNetKeys(unet), ProcessorUNetKeys(unet)},
          .dotted_prefixes = {"unet.", "base_model.model.", "base_model.model.unet.",
                              "model.diffusion_model.", "diffusion_model.", ""},
          .flat_prefixes = {"lora_unet_", "lycoris_unet_", "lycoris_", "oft_unet_"}};
}

PatchTarget ClipLTarget(std::shared_ptr<const ComponentLayout> layout) {
  return {.component = "text_encoder",
          .layout = std::move(layout),
          .key_maps = {ClipLoraKeys()},
          .dotted_prefixes = {"text_encoder.text_model.", "text_encoder.",
                              "text_encoders.clip_l.transformer.text_model.",
                              "clip_l.transformer.text_model.", "cond_stage_model.transformer.text_model."},
          .flat_prefixes = {"lora_te1_text_model_", "lora_te_text_model_", "lora_te1_", "lora_te_",
                            "lycoris_te1_text_model_", "lycoris_te_text_model_", "lycoris_text_model_",
                            "oft_te1_text_model_", "oft_te_text_model_"}};
}

PatchTarget ClipGTarget(std::shared_ptr<const ComponentLayout> layout) {
  return {
      .component = "text_encoder_2",
      .layout = std::move(layout),
      .key_maps = {OpenClipKeys(), ClipLoraKeys()},
      .dotted_prefixes = {"text_encoder_2.text_model.", "text_encoder_2.",
                          "text_encoders.clip_g.transformer.text_model.", "clip_g.transformer.text_model."},
      .flat_prefixes = {"lora_te2_text_model_", "lora_te2_", "lycoris_te2_text_model_",
                        "oft_te2_text_model_"}};
}

}  // namespace latentd
