#include "families/open_model.h"

#include <filesystem>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/config/json_config.h"

namespace latentd {
namespace {

at::Tensor ToTensor(const std::vector<double>& numbers, std::vector<int64_t> shape) {
  return at::tensor(numbers, at::kDouble).to(at::kFloat).view(shape);
}

}  // namespace

absl::Status Unsupported(const std::string& what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL", what, {{"what", what}});
}

std::string PipelineClass(const std::string& folder) {
  absl::StatusOr<JsonConfig> json = JsonConfig::Load(folder + "/model_index.json");
  return json.ok() ? json->String("_class_name", "") : "";
}

absl::StatusOr<Component> DescribeVae(const std::string& config_folder,
                                      std::shared_ptr<const WeightFiles> files,
                                      std::shared_ptr<const AutoencoderKl>& vae,
                                      LatentStatistics statistics) {
  Component component;
  component.name = "vae";
  component.leaves_fp16 = true;
  ASSIGN_OR_RETURN(AutoencoderKlConfig config, AutoencoderKlConfig::Load(config_folder + "/config.json"));
  if (statistics == LatentStatistics::kIgnored) {
    config.latents_mean.clear();
    config.latents_std.clear();
  }
  const VaeFileLayout layout = DetectVaeFileLayout(*files, config);
  component.files = std::move(files);
  component.key_map = layout.key_map;
  component.prefix = layout.prefix;
  vae = std::make_shared<const AutoencoderKl>(config);
  component.layout = vae->layout();
  return component;
}

std::string FolderSettings(const std::string& folder) { return folder + "/latentd.json"; }

std::string CheckpointSettings(const std::string& file) {
  return std::filesystem::path(file).replace_extension(".json").string();
}

absl::Status ReadSettings(const std::string& path, int64_t latent_channels, ModelDefaults& defaults,
                          LatentPreview& preview) {
  if (std::error_code ec; !std::filesystem::exists(path, ec)) return absl::OkStatus();
  ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path));
  JsonConfig own = json.Object("defaults");
  ModelDefaults& d = defaults;
  d.width = own.Int("width", d.width, 1, 1 << 16);
  d.height = own.Int("height", d.height, 1, 1 << 16);
  d.steps = own.Int("steps", d.steps, 1, 1000);
  d.guidance = own.Double("guidance", d.guidance, 0, 100);
  d.true_cfg_scale = own.Double("true_cfg_scale", d.true_cfg_scale, 1, 100);
  d.strength = own.Double("strength", d.strength, 1e-6, 1);
  d.max_sequence_length = own.Int("max_sequence_length", d.max_sequence_length, 1, 512);
  d.sampler = own.String("sampler", d.sampler);
  JsonConfig rgb = json.Object("latent_rgb");
  const std::vector<double> factors = rgb.Doubles("factors"), bias = rgb.Doubles("bias");
  if (!factors.empty()) {
    if (static_cast<int64_t>(factors.size()) != latent_channels * 3 || (!bias.empty() && bias.size() != 3)) {
      rgb.Fail(Unsupported(absl::StrCat(rgb.label(), ": factors or bias have another number of entries")));
    } else {
      preview.factors = ToTensor(factors, {latent_channels, 3});
      preview.bias = bias.empty() ? at::zeros({3}) : ToTensor(bias, {3});
    }
  }
  RETURN_IF_ERROR(json.status());
  RETURN_IF_ERROR(own.status());
  return rgb.status();
}

}  // namespace latentd
