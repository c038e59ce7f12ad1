// One generation as a family sees it: parameters with presence, filled with defaults by Pipeline::Validate.
#ifndef LATENTD_FAMILIES_GENERATE_PARAMS_H_
#define LATENTD_FAMILIES_GENERATE_PARAMS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

namespace latentd {

struct PixelSize {
  int64_t width = 0, height = 0;
};
struct PixelPoint {
  int64_t left = 0, top = 0;
};
// The picture is denoised in tiles that overlap, each as the model was trained for. In pixels.
struct DenoiseTiles {
  int64_t width = 1024, height = 1024, overlap = 32;
};

class TextEmbedding;  // families/encoders/text_embedding.h

// A textual inversion that the prompts name.
struct PromptEmbedding {
  std::string name;    // as it is served
  std::string id;      // stands for the file as it is
  int64_t tokens = 0;  // that it takes in a prompt
  // While prompts are encoded; whoever sets it holds the record. Null before and after, and in a plan.
  std::shared_ptr<const TextEmbedding> vectors;
};

// Field names in errors are those of latentd.v1.GenerateParams in proto/: "params.width".
struct GenerateParams {
  std::string prompt;
  std::optional<std::string> negative_prompt;
  std::optional<int64_t> width;   // pixels
  std::optional<int64_t> height;  // pixels
  std::optional<int64_t> steps;
  // Embedded guidance scale, for models that are distilled with one. SD families: classifier-free guidance;
  // above 1 there is a second pass with the negative prompt.
  std::optional<double> guidance;
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

  // The rest is known to SD families alone; others refuse it.

  // For the second text encoder, where it should read another text.
  std::optional<std::string> prompt_2, negative_prompt_2;
  // How weights are written in prompts (families/prompt/prompt.h): "plain" (not at all, and what is longer
  // than the encoder reads is cut off), "compel", "a1111".
  std::optional<std::string> prompt_syntax;
  // Layers of CLIP to leave out at its end, beyond those that the model leaves out. Of the wanted prompt
  // alone, as in diffusers.
  std::optional<int64_t> clip_skip;

  std::optional<std::string> schedule;     // how noise levels are spaced: "karras", …
  std::optional<double> eta;               // share of noise that DDIM and TCD add, [0, 1]
  std::optional<double> guidance_rescale;  // [0, 1]: how much of the guided deviation is brought back
  // Guidance by step, the first of which is the first that is run; the last one stands for those that follow.
  std::vector<double> guidance_list;

  // Hand-over between two models, (0, 1): the first denoises up to `denoising_end`, the second goes on from
  // `denoising_start` with the first one's latents and adds no noise.
  std::optional<double> denoising_start, denoising_end;
  at::Tensor init_latents;  // [N or 1, C, H/8, W/8] fp32: in place of an init image

  // Inpainting: uint8 [H, W, 3], any size; what is white is repainted, what is black stays the init image.
  at::Tensor mask_image;
  // Grey is repainted in the last steps only: the darker, the later. Otherwise grey is black or white.
  std::optional<bool> gradient_mask;
  // What the mask leaves is that of the init image, after the picture is decoded.
  bool paste_back = false;

  // SDXL: what the model is told about the picture. Sizes are its own where absent, the crop is (0, 0).
  std::optional<PixelSize> original_size, target_size;
  std::optional<PixelPoint> crop;
  // SDXL refiner; 6 and 2.5.
  std::optional<double> aesthetic_score, negative_aesthetic_score;

  // For pictures larger than the model was trained for; absent: the whole picture at once.
  std::optional<DenoiseTiles> tiles;

  // Inputs of the denoiser's first layer where a LoRA grows it, else 0; kUnknownInputs as long as the LoRAs
  // were not read. Not the client's.
  static constexpr int64_t kUnknownInputs = -1;
  int64_t grown_inputs = 0;

  // What the prompts name, and by which names ("cat" and "pets/cat" may be one). Not the client's.
  std::vector<PromptEmbedding> embeddings;
  std::map<std::string, size_t, std::less<>> embedding_names;  // → index into embeddings

  bool has_pictures() const { return init_image.defined() || control_image.defined(); }

  // Tests only: noise to use in place of the seeds', [N, C, H/8, W/8] fp32.
  at::Tensor noise;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_GENERATE_PARAMS_H_
