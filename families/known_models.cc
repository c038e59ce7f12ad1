#include "families/known_models.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace latentd {
namespace {

constexpr char kServed[] = "FLUX.1, SD 1.5 and SDXL are";

struct Class {
  absl::string_view part;  // of a pipeline class' name
  absl::string_view instead;
};
// What comes first counts.
constexpr Class kClasses[] = {
    {"FluxFill", "inpaint with FLUX.1 dev and a mask"},
    {"FluxControlNet", "use its FluxPipeline, or a control model such as FLUX.1 Depth"},
    {"FluxControlInpaint", "use the same model as FluxControlPipeline"},
    {"FluxKontext", "use FLUX.1 dev with an init image"},
    {"FluxPriorRedux", "use FLUX.1 dev"},
    {"Flux2", "use FLUX.1"},
    {"ControlNet", "use its base model alone"},
    {"Adapter", "use its base model alone"},
    {"InstructPix2Pix", "use its base model with an init image"},
    {"Depth2Img", "use SD 1.5 with an init image"},
    {"Upscale", "use SDXL's refiner, or an init image of the wanted size"},
    {"LatentConsistencyModel", "use its base model with a LoRA of LCM and the sampler lcm"},
    {"StableDiffusion3", "use SDXL or FLUX.1"},
    {"KolorsP", "use SDXL"},
};

struct Mark {
  absl::string_view name;  // of a tensor, or what it ends with after any prefix
  absl::string_view what;
};
constexpr Mark kMarks[] = {
    {"joint_blocks.0.context_block.attn.qkv.weight",
     "Stable Diffusion 3, which is not served; use SDXL or FLUX.1"},
    {"double_stream_modulation_img.lin.weight", "FLUX.2, which is not served; use FLUX.1"},
    {"distilled_guidance_layer.norms.0.scale", "Chroma, which is not served; use FLUX.1"},
    {"blocks.0.cross_attn.norm_k.weight", "a Wan video model, which is not served"},
    {"txt_norm.weight", "Qwen-Image, which is not served; use FLUX.1"},
    {"cap_embedder.1.weight", "Lumina 2 or Z-Image, which is not served; use FLUX.1"},
    {"mlp_t5.0.weight", "Hunyuan-DiT, which is not served; use SDXL"},
    {"controlnet_cond_embedding.conv_in.weight", "a ControlNet, which is not served"},
    {"input_hint_block.0.weight", "a ControlNet, which is not served"},
    {"image_proj.proj.weight", "an IP-Adapter, which is not served"},
    {"emb_params", "a textual inversion; it belongs under embedding_roots"},
    {"encoder.block.0.layer.0.SelfAttention.k.weight",
     "a T5 text encoder alone; it belongs in the folder text_encoder_2 of a model"},
    {"text_model.embeddings.token_embedding.weight",
     "a CLIP text encoder alone; it belongs in the folder text_encoder of a model"},
    {"decoder.conv_in.weight", "a VAE alone; it belongs in the folder vae of a model"},
};

}  // namespace

std::string AboutPipelineClass(absl::string_view name) {
  if (name.empty()) return "a folder without model_index.json is not supported";
  const auto row = std::find_if(std::begin(kClasses), std::end(kClasses),
                                [&](const Class& c) { return absl::StrContains(name, c.part); });
  if (row == std::end(kClasses)) return absl::StrCat(name, " is not supported; ", kServed);
  return absl::StrCat(name, " is not supported; ", row->instead);
}

std::string AboutFile(const WeightFiles& files) {
  const auto& tensors = files.tensors();
  const auto has = [&](absl::string_view name) {
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const auto& tensor) { return absl::EndsWith(tensor.first, name); });
  };
  if (std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
        return absl::StrContains(tensor.first, ".lora_down.") || absl::StrContains(tensor.first, ".lora_A.");
      })) {
    return "it is a LoRA, which belongs under lora_roots";
  }
  for (const Mark& mark : kMarks) {
    if (has(mark.name)) return absl::StrCat("it is ", mark.what);
  }
  return "";
}

}  // namespace latentd
