// What a Stable Diffusion UNet is made of, as its config.json says it.
#ifndef LATENTD_FAMILIES_SD_UNET_CONFIG_H_
#define LATENTD_FAMILIES_SD_UNET_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace latentd {

// Columns of the text that Stable Diffusion 2 reads, which no other one reads.
inline constexpr int64_t kSd2ContextDim = 1024;

// The defaults are those of SD 1.5.
struct UNetConfig {
  // One per resolution, from full size down.
  struct Level {
    int64_t channels = 0;
    int64_t heads = 8;
    // For each resnet on the way down, how many transformer blocks the attention behind it has; 0: there is
    // none.
    std::vector<int64_t> down;
    std::vector<int64_t> up;  // the same on the way up, which has one resnet more

    // `resnets` on the way down, each with `transformer_layers` behind it, where that way has attention.
    static Level Of(int64_t channels, int64_t heads, int64_t resnets, int64_t transformer_layers,
                    bool attention = true, bool up_attention = true);
  };
  int64_t in_channels = 4, out_channels = 4;
  std::vector<Level> levels = {Level::Of(320, 8, 2, 1), Level::Of(640, 8, 2, 1), Level::Of(1280, 8, 2, 1),
                               Level::Of(1280, 8, 2, 0)};
  // Between the way down and the way up: nothing; one resnet (0); or an attention with so many transformer
  // blocks between two resnets.
  std::optional<int64_t> middle = 1;
  int64_t context_dim = 768;  // of the text
  int64_t groups = 32;
  double norm_eps = 1e-5;
  int64_t sample_size = 64;        // latents' side that the model was trained on; no more than a default
  bool linear_projection = false;  // into and out of an attention: linear layers, or 1×1 convolutions

  // Latent consistency models: columns of an embedding of the guidance, which is added to that of the time;
  // no unwanted prompt is computed. 0: there is nothing of the kind.
  int64_t guidance_dim = 0;

  // SDXL: a pooled text, and numbers about the picture, each as a sinusoid of `time_ids_dim`, are added to
  // the time embedding. 0: there is nothing of the kind.
  int64_t added_dim = 0;     // pooled text and all sinusoids side by side
  int64_t time_ids_dim = 0;  // of one number

  int64_t time_dim() const { return 4 * levels.front().channels; }
  // How many numbers are told about the picture, for a pooled text of `pooled_dim`; −1 if that cannot be.
  int64_t time_ids(int64_t pooled_dim) const;

  // Of a config.json. Errors: those of JsonConfig; UNSUPPORTED_MODEL for blocks and embeddings that no
  // Stable Diffusion has.
  static absl::StatusOr<UNetConfig> Load(const std::string& path);

  // The published models.
  static UNetConfig Sd15();
  static UNetConfig SdxlBase();
  static UNetConfig SdxlRefiner();
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_UNET_CONFIG_H_
