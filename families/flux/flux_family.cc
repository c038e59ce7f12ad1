#include "families/flux/flux_family.h"

#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/encoders/clip_keys.h"
#include "families/flux/flux_keys.h"
#include "families/flux/flux_lora.h"
#include "families/flux/flux_pipeline.h"
#include "families/known_models.h"
#include "families/open_model.h"

namespace latentd {
namespace {

// What may stand before the names of a single-file transformer.
constexpr const char* kFilePrefixes[] = {"", "model.diffusion_model.", "diffusion_model.", "transformer."};

// ---------------------------------------------------------------------------------------------- detection

bool IsFluxClass(absl::string_view name) {
  return absl::StartsWith(name, "Flux") && !absl::StartsWith(name, "Flux2");
}

bool IsServedClass(absl::string_view name) {
  return name == "FluxPipeline" || name == "FluxImg2ImgPipeline" || name == "FluxInpaintPipeline" ||
         name == "FluxControlPipeline" || name == "FluxControlImg2ImgPipeline";
}

// Which names a transformer file has, if it is a FLUX.1 transformer at all.
struct TransformerFile {
  bool known = false;
  bool native = false;
  std::string prefix;
};

TransformerFile DetectTransformerFile(const WeightFiles& files) {
  for (const std::string prefix : kFilePrefixes) {
    auto has = [&](const char* name) { return files.tensors().count(prefix + name) != 0; };
    // The modulation per block tells FLUX.1 from FLUX.2 and Chroma.
    if (has("double_blocks.0.img_attn.qkv.weight") && has("double_blocks.0.img_mod.lin.weight")) {
      return {true, true, prefix};
    }
    if (has("transformer_blocks.0.attn.add_q_proj.weight") &&
        has("single_transformer_blocks.0.proj_mlp.weight") &&
        has("transformer_blocks.0.norm1.linear.weight")) {
      return {true, false, prefix};
    }
  }
  return {};
}

// --------------------------------------------------------------------------------------------- components

// `checkpoint`: the single file, which has the transformer and may have the rest; null: a folder.
using Checkpoint = std::shared_ptr<const WeightFiles>;

absl::StatusOr<Component> OpenTransformer(const Checkpoint& checkpoint, const std::string& base,
                                          FluxParts& parts) {
  Component component;
  component.name = "transformer";
  FluxConfig config;
  TransformerFile file;
  if (checkpoint == nullptr) {
    ASSIGN_OR_RETURN(config, FluxConfig::Load(base + "/transformer/config.json"));
    ASSIGN_OR_RETURN(component.files, WeightFiles::Open(base + "/transformer"));
    file = DetectTransformerFile(*component.files);
  } else {
    ASSIGN_OR_RETURN(const FluxConfig base_config, FluxConfig::Load(base + "/transformer/config.json"));
    component.files = checkpoint;
    file = DetectTransformerFile(*component.files);
    config = base_config;
    if (file.native) {
      ASSIGN_OR_RETURN(config, FluxConfig::Infer(*component.files, file.prefix, base_config));
    } else {
      config.guidance_embeds = component.files->tensors().count(
                                   file.prefix + "time_text_embed.guidance_embedder.linear_1.weight") != 0;
    }
  }
  if (file.known) component.prefix = file.prefix;
  if (file.native) component.key_map = FluxNativeKeys();
  parts.transformer = std::make_shared<const FluxTransformer>(config);
  component.layout = parts.transformer->layout();
  component.patch_target = FluxTransformerTarget(component.layout);
  return component;
}

// Where all-in-one files have the encoders, as ComfyUI and Forge write them.
constexpr const char* kClipPrefixes[] = {"text_encoders.clip_l.transformer.", "text_encoders.clip_l.",
                                         "text_encoder.", "cond_stage_model.transformer."};
constexpr const char* kT5Prefixes[] = {"text_encoders.t5xxl.transformer.", "text_encoders.t5xxl.",
                                       "text_encoder_2."};

absl::StatusOr<Component> OpenClip(const Checkpoint& checkpoint, const std::string& base, FluxParts& parts) {
  Component component;
  component.name = "text_encoder";
  ASSIGN_OR_RETURN(const ClipTextConfig config, ClipTextConfig::Load(base + "/text_encoder/config.json"));
  ClipFileLayout layout;
  if (checkpoint != nullptr) {
    for (const char* prefix : kClipPrefixes) {
      if (!layout.known) layout = DetectClipFileLayout(*checkpoint, prefix);
    }
  }
  if (layout.known) {
    component.files = checkpoint;
  } else {
    ASSIGN_OR_RETURN(component.files, WeightFiles::Open(base + "/text_encoder"));
    layout = DetectClipFileLayout(*component.files, "");
  }
  component.key_map = layout.key_map;
  component.prefix = layout.prefix;
  ASSIGN_OR_RETURN(parts.clip_tokenizer, ClipTokenizer::Load(base + "/tokenizer"));
  if (parts.clip_tokenizer->vocabulary_size() > config.vocabulary) {
    return Unsupported(absl::StrCat("tokenizer has ", parts.clip_tokenizer->vocabulary_size(),
                                    " tokens, text_encoder knows ", config.vocabulary));
  }
  parts.clip = std::make_shared<const ClipTextModel>(config);
  component.layout = parts.clip->layout();
  component.patch_target = FluxClipTarget(component.layout);
  return component;
}

absl::StatusOr<Component> OpenT5(const Checkpoint& checkpoint, const std::string& base, FluxParts& parts) {
  Component component;
  component.name = "text_encoder_2";
  component.leaves_fp16 = true;
  ASSIGN_OR_RETURN(const T5Config config, T5Config::Load(base + "/text_encoder_2/config.json"));
  if (checkpoint != nullptr) {
    for (const char* prefix : kT5Prefixes) {
      if (component.files != nullptr || checkpoint->tensors().count(absl::StrCat(
                                            prefix, "encoder.block.0.layer.0.SelfAttention.q.weight")) == 0) {
        continue;
      }
      component.files = checkpoint;
      component.prefix = prefix;
    }
  }
  if (component.files == nullptr) {
    ASSIGN_OR_RETURN(component.files, WeightFiles::Open(base + "/text_encoder_2"));
  }
  ASSIGN_OR_RETURN(parts.t5_tokenizer, T5Tokenizer::Load(base + "/tokenizer_2", config.vocabulary));
  parts.t5 = std::make_shared<const T5Encoder>(config);
  component.layout = parts.t5->layout();
  component.patch_target = FluxT5Target(component.layout);
  return component;
}

// -------------------------------------------------------------------------------------- defaults, preview

// Latent → RGB by least squares over pictures, as in ComfyUI's latent_formats: FLUX.1's own latent space.
constexpr float kFluxFactors[16][3] = {
    {-0.0346f, 0.0244f, 0.0681f},   {0.0034f, 0.0210f, 0.0687f},    {0.0275f, -0.0668f, -0.0433f},
    {-0.0174f, 0.0160f, 0.0617f},   {0.0859f, 0.0721f, 0.0329f},    {0.0004f, 0.0383f, 0.0115f},
    {0.0405f, 0.0861f, 0.0915f},    {-0.0236f, -0.0185f, -0.0259f}, {-0.0245f, 0.0250f, 0.1180f},
    {0.1008f, 0.0755f, -0.0421f},   {-0.0515f, 0.0201f, 0.0011f},   {0.0428f, -0.0012f, -0.0036f},
    {0.0817f, 0.0765f, 0.0749f},    {-0.1264f, -0.0522f, -0.1103f}, {-0.0280f, -0.0881f, -0.0499f},
    {-0.1262f, -0.0982f, -0.0778f},
};
constexpr float kFluxBias[3] = {-0.0329f, -0.0718f, -0.0851f};
// What diffusers' documentation draws with, of FLUX.1 Depth.
constexpr double kControlGuidance = 10;
constexpr double kFluxScaling = 0.3611, kFluxShift = 0.1159;

void SetPublishedPreview(FluxParts& parts) {
  const AutoencoderKlConfig& vae = parts.vae->config();
  if (vae.latent_channels == 16 && vae.scaling_factor == kFluxScaling && vae.shift_factor == kFluxShift) {
    parts.preview.factors = at::tensor(at::ArrayRef<float>(&kFluxFactors[0][0], 16 * 3)).view({16, 3});
    parts.preview.bias = at::tensor(at::ArrayRef<float>(kFluxBias, 3));
  }
}

// The parts come from different files: they must fit each other.
absl::Status CheckFit(const FluxParts& parts) {
  const FluxConfig& config = parts.transformer->config();
  if (parts.clip->config().dim != config.pooled_dim || parts.t5->config().dim != config.text_dim) {
    return Unsupported(absl::StrCat("text encoders give ", parts.clip->config().dim, " and ",
                                    parts.t5->config().dim, " channels, the transformer takes ",
                                    config.pooled_dim, " and ", config.text_dim));
  }
  if (parts.vae->config().latent_channels * 4 != config.out_channels) {
    return Unsupported(absl::StrCat("the VAE has ", parts.vae->config().latent_channels,
                                    " latent channels, the transformer gives ", config.out_channels / 4));
  }
  return absl::OkStatus();
}

}  // namespace

bool FluxFamily::Detect(const ModelFiles& files) const {
  if (!files.file.empty()) {
    auto weights = WeightFiles::Open(files.file);
    return weights.ok() && DetectTransformerFile(**weights).known;
  }
  return IsFluxClass(PipelineClass(files.folder));
}

absl::StatusOr<std::unique_ptr<Pipeline>> FluxFamily::Open(const ModelFiles& files) const {
  const bool single = !files.file.empty();
  const std::string base = single ? files.base_folder : files.folder;
  if (base.empty()) {
    return Unsupported(absl::StrCat(files.name,
                                    " is a transformer alone and needs a base model that lends it "
                                    "text encoders and VAE"));
  }
  const std::string name = PipelineClass(base);
  if (!IsServedClass(name)) {
    return Unsupported(AboutPipelineClass(name));
  }
  FluxParts parts;
  Checkpoint checkpoint;
  if (single) {
    ASSIGN_OR_RETURN(checkpoint, WeightFiles::Open(files.file));
  }
  ASSIGN_OR_RETURN(Component clip, OpenClip(checkpoint, base, parts));
  ASSIGN_OR_RETURN(Component t5, OpenT5(checkpoint, base, parts));
  ASSIGN_OR_RETURN(Component transformer, OpenTransformer(checkpoint, base, parts));
  Checkpoint vae_files = checkpoint;
  if (checkpoint == nullptr || !HasVae(*checkpoint)) {
    ASSIGN_OR_RETURN(vae_files, WeightFiles::Open(base + "/vae"));
  }
  ASSIGN_OR_RETURN(Component vae, DescribeVae(base + "/vae", std::move(vae_files), parts.vae));
  for (Component* component : {&clip, &t5, &transformer, &vae})
    parts.components.push_back(std::move(*component));
  ASSIGN_OR_RETURN(parts.schedule, FlowMatchConfig::Load(base + "/scheduler/scheduler_config.json"));
  RETURN_IF_ERROR(CheckFit(parts));

  const bool dev = parts.transformer->config().guidance_embeds;
  parts.variant = dev ? "dev" : "schnell";
  parts.defaults = dev ? ModelDefaults{.steps = 28, .guidance = 3.5, .max_sequence_length = 512}
                       : ModelDefaults{.steps = 4, .guidance = 0, .max_sequence_length = 256};
  if (parts.transformer->config().is_control()) {
    parts.variant += "-control";
    parts.defaults.guidance = dev ? kControlGuidance : 0;
  }
  SetPublishedPreview(parts);
  for (const std::string& settings :
       {FolderSettings(base), files.file.empty() ? std::string() : CheckpointSettings(files.file)}) {
    RETURN_IF_ERROR(
        ReadSettings(settings, parts.vae->config().latent_channels, parts.defaults, parts.preview));
  }
  return std::make_unique<FluxPipeline>(std::move(parts));
}

}  // namespace latentd
