// One generation as a family sees it: parameters with presence, filled with defaults by Pipeline::Validate.
#ifndef LATENTD_FAMILIES_GENERATE_PARAMS_H_
#define LATENTD_FAMILIES_GENERATE_PARAMS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

namespace latentd {

// Field names in errors are those of latentd.v1.GenerateParams in proto/: "params.width".
struct GenerateParams {
  std::string prompt;
  std::optional<std::string> negative_prompt;
  std::optional<int64_t> width;   // pixels
  std::optional<int64_t> height;  // pixels
  std::optional<int64_t> steps;
  std::optional<double> guidance;        // embedded guidance scale, for models that are distilled with one
  std::optional<double> true_cfg_scale;  // classic classifier-free guidance; > 1 needs a negative prompt
  std::optional<std::string> sampler;    // "euler"
  std::optional<double> shift;           // overrides the model's timestep shift
  std::optional<int64_t> max_sequence_length;  // tokens of the long text encoder
  std::vector<uint64_t> seeds;                 // one picture each, at least one after Validate

  // img2img: uint8 [H, W, 3], any size; undefined for txt2img.
  at::Tensor init_image;
  std::optional<double> strength;  // (0, 1]: share of the schedule that is run on the init image

  // What a control model, or a control LoRA, draws after (edges, depth): uint8 [H, W, 3], any size.
  at::Tensor control_image;

  // Inputs of the denoiser's first layer where a LoRA grows it, else 0; kUnknownInputs as long as the LoRAs
  // were not read. Not the client's.
  static constexpr int64_t kUnknownInputs = -1;
  int64_t grown_inputs = 0;

  bool has_pictures() const { return init_image.defined() || control_image.defined(); }

  // Tests only: noise to use in place of the seeds', [N, C, H/8, W/8] fp32.
  at::Tensor noise;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_GENERATE_PARAMS_H_
