#include "families/flux/flux_keys.h"

namespace latentd {

const KeyMap* FluxNativeKeys() {
  static const KeyMap* map = new KeyMap({
      {"img_in", {"x_embedder"}},
      {"txt_in", {"context_embedder"}},
      {"time_in.in_layer", {"time_text_embed.timestep_embedder.linear_1"}},
      {"time_in.out_layer", {"time_text_embed.timestep_embedder.linear_2"}},
      {"vector_in.in_layer", {"time_text_embed.text_embedder.linear_1"}},
      {"vector_in.out_layer", {"time_text_embed.text_embedder.linear_2"}},
      {"guidance_in.in_layer", {"time_text_embed.guidance_embedder.linear_1"}},
      {"guidance_in.out_layer", {"time_text_embed.guidance_embedder.linear_2"}},

      {"double_blocks.{}.img_mod.lin", {"transformer_blocks.{}.norm1.linear"}},
      {"double_blocks.{}.txt_mod.lin", {"transformer_blocks.{}.norm1_context.linear"}},
      {"double_blocks.{}.img_attn.qkv",
       {"transformer_blocks.{}.attn.to_q", "transformer_blocks.{}.attn.to_k",
        "transformer_blocks.{}.attn.to_v"}},
      {"double_blocks.{}.txt_attn.qkv",
       {"transformer_blocks.{}.attn.add_q_proj", "transformer_blocks.{}.attn.add_k_proj",
        "transformer_blocks.{}.attn.add_v_proj"}},
      {"double_blocks.{}.img_attn.norm.query_norm", {"transformer_blocks.{}.attn.norm_q"}},
      {"double_blocks.{}.img_attn.norm.key_norm", {"transformer_blocks.{}.attn.norm_k"}},
      {"double_blocks.{}.txt_attn.norm.query_norm", {"transformer_blocks.{}.attn.norm_added_q"}},
      {"double_blocks.{}.txt_attn.norm.key_norm", {"transformer_blocks.{}.attn.norm_added_k"}},
      {"double_blocks.{}.img_attn.proj", {"transformer_blocks.{}.attn.to_out.0"}},
      {"double_blocks.{}.txt_attn.proj", {"transformer_blocks.{}.attn.to_add_out"}},
      {"double_blocks.{}.img_mlp.0", {"transformer_blocks.{}.ff.net.0.proj"}},
      {"double_blocks.{}.img_mlp.2", {"transformer_blocks.{}.ff.net.2"}},
      {"double_blocks.{}.txt_mlp.0", {"transformer_blocks.{}.ff_context.net.0.proj"}},
      {"double_blocks.{}.txt_mlp.2", {"transformer_blocks.{}.ff_context.net.2"}},

      {"single_blocks.{}.modulation.lin", {"single_transformer_blocks.{}.norm.linear"}},
      {"single_blocks.{}.linear1",
       {"single_transformer_blocks.{}.attn.to_q", "single_transformer_blocks.{}.attn.to_k",
        "single_transformer_blocks.{}.attn.to_v", "single_transformer_blocks.{}.proj_mlp"}},
      {"single_blocks.{}.linear2", {"single_transformer_blocks.{}.proj_out"}},
      {"single_blocks.{}.norm.query_norm", {"single_transformer_blocks.{}.attn.norm_q"}},
      {"single_blocks.{}.norm.key_norm", {"single_transformer_blocks.{}.attn.norm_k"}},

      {"final_layer.linear", {"proj_out"}},
      // (shift, scale) there, (scale, shift) here.
      {"final_layer.adaLN_modulation.1", {"norm_out.linear"}, KeyTransform::kSwapHalves},
  });
  return map;
}

}  // namespace latentd
