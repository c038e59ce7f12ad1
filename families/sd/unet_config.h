// What a Stable Diffusion UNet is made of, as its config.json says it.
#ifndef LATENTD_FAMILIES_SD_UNET_CONFIG_H_
#define LATENTD_FAMILIES_SD_UNET_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace latentd {

// The defaults are those of SD 1.5.
struct UNetConfig {
  // One per resolution, from full size down. A level's up half has what its down half has, in reverse.
  struct Level {
    int64_t channels = 0;
    int64_t heads = 8;
    int64_t transformer_layers = 1;  // in each attention; meaningless in a level without
    bool attention = false;          // cross-attention after every resnet
    bool up_attention = false;
  };
  int64_t in_channels = 4, out_channels = 4;
  std::vector<Level> levels = {
      {320, 8, 1, true, true}, {640, 8, 1, true, true}, {1280, 8, 1, true, true}, {1280, 8, 1, false, false}};
  int64_t layers_per_block = 2;  // resnets of a level on the way down; one more on the way up
  int64_t context_dim = 768;     // of the text
  int64_t groups = 32;
  double norm_eps = 1e-5;
  int64_t sample_size = 64;        // latents' side that the model was trained on; no more than a default
  bool linear_projection = false;  // into and out of an attention: linear layers, or 1×1 convolutions

  // SDXL: a pooled text, and numbers about the picture, each as a sinusoid of `time_ids_dim`, are added to
  // the time embedding. 0: there is nothing of the kind.
  int64_t added_dim = 0;     // pooled text and all sinusoids side by side
  int64_t time_ids_dim = 0;  // of one number

  int64_t time_dim() const { return 4 * levels.front().channels; }
  // How many numbers are told about the picture, for a pooled text of `pooled_dim`; −1 if that cannot be.
  int64_t time_ids(int64_t pooled_dim) const;

  // Of a config.json. Errors: those of JsonConfig; UNSUPPORTED_MODEL for blocks and embeddings that neither
  // SD 1.5 nor SDXL has.
  static absl::StatusOr<UNetConfig> Load(const std::string& path);

  // The published models.
  static UNetConfig Sd15();
  static UNetConfig SdxlBase();
  static UNetConfig SdxlRefiner();
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_UNET_CONFIG_H_
