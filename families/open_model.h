// What families do the same way when they describe a model: what its folder says, its VAE, its settings.
// Any thread.
#ifndef LATENTD_FAMILIES_OPEN_MODEL_H_
#define LATENTD_FAMILIES_OPEN_MODEL_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "families/family.h"
#include "families/vae/autoencoder_kl.h"
#include "families/vae/picture_codec.h"

namespace latentd {

// FAILED_PRECONDITION UNSUPPORTED_MODEL.
absl::Status Unsupported(const std::string& what);

// The class that a folder's model_index.json names; empty where there is none.
std::string PipelineClass(const std::string& folder);

// Whether a mean and a standard deviation of each latent channel, where the config has them, are taken off
// and put back: of diffusers' pipelines, SDXL's does.
enum class LatentStatistics { kIgnored, kUsed };

// A VAE described by `config_folder`/config.json, with the weights of `files`, which may be those of a whole
// checkpoint.
absl::StatusOr<Component> DescribeVae(const std::string& config_folder,
                                      std::shared_ptr<const WeightFiles> files,
                                      std::shared_ptr<const AutoencoderKl>& vae,
                                      LatentStatistics statistics = LatentStatistics::kIgnored);

// What an administrator says of a model: a folder's latentd.json, a checkpoint's NAME.json. Where there is
// such a file, `defaults` and `preview` are changed by what it says. Errors: those of JsonConfig;
// UNSUPPORTED_MODEL for a preview of another number of channels.
std::string FolderSettings(const std::string& folder);
std::string CheckpointSettings(const std::string& file);
absl::Status ReadSettings(const std::string& path, int64_t latent_channels, ModelDefaults& defaults,
                          LatentPreview& preview);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_OPEN_MODEL_H_
