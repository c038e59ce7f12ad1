#include "families/sd/sd_open.h"

#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cache/base/error.h"
#include "families/config/json_config.h"
#include "families/encoders/clip_keys.h"
#include "families/known_models.h"
#include "families/open_model.h"
#include "families/sd/sd_keys.h"
#include "families/sd/sd_lora.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

constexpr char kXl[] = "StableDiffusionXL", kSd[] = "StableDiffusion", kSd3[] = "StableDiffusion3";
constexpr char kLatentConsistency[] = "LatentConsistencyModel";

// Where checkpoints have their text encoders.
constexpr const char* kClipLPrefixes[] = {"cond_stage_model.transformer.", "cond_stage_model.model.",
                                          "conditioner.embedders.0.transformer.",
                                          "text_encoders.clip_l.transformer."};
constexpr const char* kClipGPrefixes[] = {"conditioner.embedders.1.model.", "conditioner.embedders.0.model.",
                                          "text_encoders.clip_g.transformer."};

bool Has(const WeightFiles& files, const std::string& name) { return files.tensors().count(name) != 0; }

// What is not read, by the class of its folder.
absl::Status CheckTask(const std::string& name) {
  for (const char* known :
       {"StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline",
        "StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline",
        "LatentConsistencyModelPipeline", "LatentConsistencyModelImg2ImgPipeline"}) {
    if (name == known) return absl::OkStatus();
  }
  return Unsupported(AboutPipelineClass(name));
}

// What is not read, by the first convolution.
absl::Status CheckNetwork(const UNetConfig& config) {
  if (config.in_channels == 4 || config.in_channels == 9) return absl::OkStatus();
  return Unsupported(absl::StrCat("a UNet that takes ", config.in_channels, " channels (",
                                  config.in_channels == 8   ? "InstructPix2Pix"
                                  : config.in_channels == 5 ? "depth"
                                  : config.in_channels == 7 ? "upscaling"
                                                            : "an unknown task",
                                  ") is not supported"));
}

absl::StatusOr<Component> DescribeUNet(const std::shared_ptr<const WeightFiles>& checkpoint,
                                       const std::string& base, SdParts& parts) {
  Component component;
  component.name = "unet";
  ASSIGN_OR_RETURN(UNetConfig config, UNetConfig::Load(base + "/unet/config.json"));
  component.files = checkpoint;
  if (checkpoint == nullptr) {
    ASSIGN_OR_RETURN(component.files, WeightFiles::Open(base + "/unet"));
  }
  const UNetFileLayout file = DetectUNetFileLayout(*component.files);
  if (checkpoint != nullptr) {
    // The folder may be of the same architecture without, or with, a mask.
    config.in_channels = file.in_channels;
    if (file.context_dim != config.context_dim || file.added_embedding != (config.added_dim > 0)) {
      return Unsupported(absl::StrCat("the file's UNet takes text of ", file.context_dim,
                                      " channels, that of its base ", config.context_dim,
                                      ": they are of different models"));
    }
  }
  RETURN_IF_ERROR(CheckNetwork(config));
  parts.unet = std::make_shared<const UNet2DCondition>(config);
  if (file.known) component.prefix = file.prefix;
  if (file.ldm) component.key_map = LdmUNetKeys(*parts.unet);
  component.layout = parts.unet->layout();
  component.patch_target = UNetTarget(*parts.unet);
  return component;
}

// Where the weights of an encoder are: in the checkpoint, or in the folder.
absl::StatusOr<std::pair<std::shared_ptr<const WeightFiles>, ClipFileLayout>> FindClip(
    const std::shared_ptr<const WeightFiles>& checkpoint, const std::string& folder, bool g) {
  if (checkpoint != nullptr) {
    const absl::Span<const char* const> prefixes = g ? absl::MakeConstSpan(kClipGPrefixes) : kClipLPrefixes;
    for (const char* prefix : prefixes) {
      const ClipFileLayout layout = DetectClipFileLayout(*checkpoint, prefix);
      if (layout.known) return std::pair{checkpoint, layout};
    }
  }
  ASSIGN_OR_RETURN(auto files, WeightFiles::Open(folder));
  const ClipFileLayout layout = DetectClipFileLayout(*files, "");
  return std::pair{std::move(files), layout};
}

absl::StatusOr<Component> DescribeClip(const std::shared_ptr<const WeightFiles>& checkpoint,
                                       const std::string& base, bool g, SdParts& parts) {
  const std::string number = g ? "_2" : "";
  Component component;
  component.name = "text_encoder" + number;
  const std::string folder = absl::StrCat(base, "/", component.name);
  ASSIGN_OR_RETURN(const ClipTextConfig config,
                   ClipTextConfig::Load(folder + "/config.json", /*with_projection=*/g));
  ASSIGN_OR_RETURN(auto found, FindClip(checkpoint, folder, g));
  component.files = std::move(found.first);
  component.key_map = found.second.key_map;
  component.prefix = found.second.prefix;
  ASSIGN_OR_RETURN(std::shared_ptr<const ClipTokenizer> tokenizer,
                   ClipTokenizer::Load(absl::StrCat(base, "/tokenizer", number)));
  if (tokenizer->vocabulary_size() > config.vocabulary) {
    return Unsupported(absl::StrCat("tokenizer", number, " has ", tokenizer->vocabulary_size(), " tokens, ",
                                    component.name, " knows ", config.vocabulary));
  }
  if (tokenizer->model_max_length() > config.positions) {
    return Unsupported(absl::StrCat("tokenizer", number, " makes ", tokenizer->model_max_length(),
                                    " tokens, ", component.name, " reads ", config.positions));
  }
  auto model = std::make_shared<const ClipTextModel>(config);
  component.layout = model->layout();
  component.patch_target = g ? ClipGTarget(component.layout) : ClipLTarget(component.layout);
  parts.encoders.push_back({component.name, std::move(model), std::move(tokenizer)});
  return component;
}

absl::StatusOr<Component> DescribeVaeOf(const std::shared_ptr<const WeightFiles>& checkpoint,
                                        const std::string& base, SdKind kind, SdParts& parts) {
  std::shared_ptr<const WeightFiles> files = checkpoint;
  if (checkpoint == nullptr || !HasVae(*checkpoint)) {
    ASSIGN_OR_RETURN(files, WeightFiles::Open(base + "/vae"));
  }
  return DescribeVae(base + "/vae", std::move(files), parts.vae,
                     kind == SdKind::kSdxl ? LatentStatistics::kUsed : LatentStatistics::kIgnored);
}

constexpr char kPlayground[] = "edm_mean", kCosXl[] = "edm_vpred.sigma_max";

// A checkpoint whose marks say that it was trained as EDM's models are is drawn with a scheduler of theirs.
absl::Status CheckEdm(const WeightFiles& checkpoint, const SchedulerConfig& scheduler) {
  const bool velocity = Has(checkpoint, kCosXl);
  if (!velocity && !Has(checkpoint, kPlayground)) return absl::OkStatus();
  const Prediction wanted = velocity ? Prediction::kVelocity : Prediction::kEpsilon;
  const SamplerSettings& own = scheduler.own();
  if (own.solver.edm && own.schedule->config().prediction == wanted) return absl::OkStatus();
  return Unsupported(absl::StrCat(
      "the file's ", velocity ? kCosXl : kPlayground, " says that it is an EDM model",
      velocity ? " of velocity" : "",
      ", and the scheduler that its base lends it is of another kind; give it a base whose scheduler is "
      "EDMEulerScheduler or EDMDPMSolverMultistepScheduler",
      velocity ? " with prediction_type v_prediction" : ""));
}

// The second word of ["diffusers", "EulerDiscreteScheduler"].
std::string SchedulerClassOf(const std::string& folder) {
  absl::StatusOr<JsonConfig> json = JsonConfig::Load(folder + "/model_index.json");
  if (!json.ok()) return "";
  const std::vector<std::string> names = json->Strings("scheduler", {});
  return json->status().ok() && names.size() == 2 ? names[1] : "";
}

}  // namespace

absl::StatusOr<std::shared_ptr<const SchedulerConfig>> ReadScheduler(
    const std::shared_ptr<const WeightFiles>& checkpoint, const std::string& base, SdKind kind,
    bool trailing) {
  SchedulerSource source;
  source.trailing = trailing;
  source.path = base + "/scheduler/scheduler_config.json";
  source.class_name = SchedulerClassOf(base);
  source.sd1 = kind == SdKind::kSd15 && !absl::StartsWith(PipelineClass(base), kLatentConsistency);
  if (checkpoint != nullptr) {
    // Trainers leave empty tensors of these names behind.
    source.velocity = Has(*checkpoint, "v_pred");
    source.zero_terminal_snr = source.velocity && Has(*checkpoint, "ztsnr");
  }
  ASSIGN_OR_RETURN(auto scheduler, SchedulerConfig::Load(source));
  if (checkpoint != nullptr) RETURN_IF_ERROR(CheckEdm(*checkpoint, *scheduler));
  return scheduler;
}

namespace {

// The parts come from different files: they must fit each other.
absl::Status CheckFit(const SdParts& parts) {
  const UNetConfig& unet = parts.unet->config();
  int64_t text = 0;
  for (const SdEncoder& encoder : parts.encoders) text += encoder.model->config().dim;
  if (text != unet.context_dim) {
    return Unsupported(
        absl::StrCat("text encoders give ", text, " channels, the UNet takes ", unet.context_dim));
  }
  const int64_t latent = parts.vae->config().latent_channels;
  if (unet.out_channels != latent || (unet.in_channels != latent && unet.in_channels != 2 * latent + 1)) {
    return Unsupported(
        absl::StrCat("the VAE has ", latent, " latent channels, the UNet gives ", unet.out_channels));
  }
  return absl::OkStatus();
}

}  // namespace

const std::string& BaseFolder(const ModelFiles& files) {
  return files.file.empty() ? files.folder : files.base_folder;
}

SdKind DetectSdKind(const ModelFiles& files) {
  if (!files.file.empty()) {
    const auto weights = WeightFiles::Open(files.file);
    if (!weights.ok()) return SdKind::kNone;
    const UNetFileLayout layout = DetectUNetFileLayout(**weights);
    if (!layout.known) return SdKind::kNone;
    // Stable Diffusion 2's unCLIP has an added embedding, too, of a picture.
    return layout.added_embedding && layout.context_dim != kSd2ContextDim ? SdKind::kSdxl : SdKind::kSd15;
  }
  const std::string name = PipelineClass(files.folder);
  if (absl::StartsWith(name, kXl)) return SdKind::kSdxl;
  if (absl::StartsWith(name, kLatentConsistency)) return SdKind::kSd15;
  return absl::StartsWith(name, kSd) && !absl::StartsWith(name, kSd3) ? SdKind::kSd15 : SdKind::kNone;
}

namespace {

void SetVariant(const std::string& variant, SdParts& parts) {
  if (parts.variant == "base") parts.variant = variant;
}

// Consistency models have a scheduler of their own or embed the guidance. SDXL Turbo and SD Turbo end their
// timesteps at the last one of training, which no other model that predicts noise does with Euler's methods.
void SetDefaultsByConfig(double embedded_guidance, SdParts& parts) {
  const bool embeds = parts.unet->config().guidance_dim > 0;
  const std::string& sampler = parts.defaults.sampler;
  if (embeds || sampler == "lcm" || sampler == "tcd") {
    parts.defaults.steps = 4;
    parts.defaults.guidance = embeds ? embedded_guidance : 1;
    return SetVariant("lcm", parts);
  }
  const NoiseScheduleConfig& noise = parts.scheduler->own().schedule->config();
  if ((sampler == "euler" || sampler == "euler_a") && noise.spacing == TimestepSpacing::kTrailing &&
      noise.prediction == Prediction::kEpsilon && !noise.zero_terminal_snr) {
    parts.defaults.steps = 4;
    parts.defaults.guidance = 0;
    SetVariant("turbo", parts);
  }
}

void SetDefaultsByName(const Distilled& distilled, SdParts& parts) {
  parts.defaults.steps = distilled.steps;
  // One that embeds the guidance needs some, whatever its name.
  if (parts.unet->config().guidance_dim == 0) parts.defaults.guidance = 1;
  if (!distilled.sampler.empty()) parts.defaults.sampler = distilled.sampler;
  SetVariant(distilled.variant, parts);
}

}  // namespace

absl::Status SetModelDefaults(const ModelFiles& files, double embedded_guidance, SdParts& parts) {
  const int64_t channels = parts.vae->config().latent_channels;
  if (!parts.distilled) SetDefaultsByConfig(embedded_guidance, parts);
  RETURN_IF_ERROR(ReadSettings(FolderSettings(BaseFolder(files)), channels, parts.defaults, parts.preview));
  if (parts.distilled) SetDefaultsByName(*parts.distilled, parts);
  if (files.file.empty()) return absl::OkStatus();
  return ReadSettings(CheckpointSettings(files.file), channels, parts.defaults, parts.preview);
}

absl::StatusOr<SdParts> OpenSdModel(const ModelFiles& files, SdKind kind) {
  SdParts parts;
  std::shared_ptr<const WeightFiles> checkpoint;
  if (!files.file.empty()) {
    ASSIGN_OR_RETURN(checkpoint, WeightFiles::Open(files.file));
    parts.distilled = FindDistilled(checkpoint->metadata(), files.file);
  }
  const std::string& base = BaseFolder(files);
  if (base.empty()) {
    return Unsupported(absl::StrCat(files.name,
                                    " is a checkpoint in one file and needs a base model that lends it "
                                    "tokenizers, settings and a noise schedule"));
  }
  RETURN_IF_ERROR(CheckTask(PipelineClass(base)));

  ASSIGN_OR_RETURN(Component unet, DescribeUNet(checkpoint, base, parts));
  for (const bool g : {false, true}) {
    // The refiner has no first one.
    if (!fs::exists(absl::StrCat(base, "/text_encoder", g ? "_2" : "", "/config.json")) &&
        (kind == SdKind::kSdxl ? !g : g)) {
      continue;
    }
    ASSIGN_OR_RETURN(Component encoder, DescribeClip(checkpoint, base, g, parts));
    parts.components.push_back(std::move(encoder));
  }
  ASSIGN_OR_RETURN(Component vae, DescribeVaeOf(checkpoint, base, kind, parts));
  parts.components.push_back(std::move(unet));
  parts.components.push_back(std::move(vae));
  ASSIGN_OR_RETURN(parts.scheduler,
                   ReadScheduler(checkpoint, base, kind, parts.distilled && parts.distilled->trailing));
  RETURN_IF_ERROR(CheckFit(parts));
  parts.variant = parts.unet->config().in_channels == parts.unet->config().out_channels ? "base" : "inpaint";
  parts.defaults.sampler = parts.scheduler->sampler();
  return parts;
}

}  // namespace latentd
