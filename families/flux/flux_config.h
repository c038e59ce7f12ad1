// The shape of a FLUX.1 transformer: from diffusers' config.json, or from the tensors of a native file.
#ifndef LATENTD_FAMILIES_FLUX_FLUX_CONFIG_H_
#define LATENTD_FAMILIES_FLUX_FLUX_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/weights/weight_files.h"

namespace latentd {

struct FluxConfig {
  int64_t in_channels = 64, out_channels = 64;  // of a token: 16 latent channels, 2×2 places
  int64_t double_blocks = 19, single_blocks = 38;
  int64_t heads = 24, head_dim = 128;
  int64_t text_dim = 4096;   // of the T5 embedding
  int64_t pooled_dim = 768;  // of the pooled CLIP embedding
  bool guidance_embeds = false;
  std::vector<int64_t> axes = {16, 56, 56};  // channels of a head per rotary axis; sum is head_dim

  // Control models take the latents of a picture beside those that they denoise.
  bool is_control() const { return in_channels == 2 * out_channels; }
  int64_t dim() const { return heads * head_dim; }
  int64_t mlp_dim() const { return 4 * dim(); }

  // Of transformer/config.json. Errors: those of JsonConfig; FAILED_PRECONDITION UNSUPPORTED_MODEL for
  // variants with other inputs (Fill, Control, Kontext) and shapes that do not fit together.
  static absl::StatusOr<FluxConfig> Load(const std::string& path);

  // Of a native (BFL) file, whose names all start with `prefix`. The rotary axes cannot be seen in the
  // weights: those of FLUX.1 where the head has 128 channels, else those of `base`. Errors:
  // UNSUPPORTED_MODEL.
  static absl::StatusOr<FluxConfig> Infer(const WeightFiles& files, const std::string& prefix,
                                          const FluxConfig& base);
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_FLUX_FLUX_CONFIG_H_
