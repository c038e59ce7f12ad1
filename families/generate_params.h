// One generation as a family sees it: parameters with presence, filled with defaults by Pipeline::Validate.
#ifndef LATENTD_FAMILIES_GENERATE_PARAMS_H_
#define LATENTD_FAMILIES_GENERATE_PARAMS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "families/request_fields.h"

namespace latentd {

class TextEmbedding;  // families/encoders/text_embedding.h

// A textual inversion that the prompts name.
struct PromptEmbedding {
  std::string name;    // as it is served
  std::string id;      // stands for the file as it is
  int64_t tokens = 0;  // that it takes in a prompt
};

// A picture that goes in: uint8 [H, W, 3] of any size, in host memory.
struct MediaInput {
  MediaRole role = MediaRole::kInit;
  at::Tensor pixels;
  std::string field;  // what errors call it: "params.init_image", "params.inputs[1]"
};

// Field names in errors are those of latentd.v1.GenerateParams in proto/: "params.width".
struct GenerateParams : RequestScalars {
  std::vector<uint64_t> seeds;  // one picture each, at least one after Validate

  // In the order of the request; how many of which role a model takes is for Pipeline::uses to say.
  std::vector<MediaInput> inputs;
  // In place of an init image: [N or 1, C, H/8, W/8] fp32.
  at::Tensor init_latents;

  // Inputs of the denoiser's first layer where a LoRA grows it, else 0; kUnknownInputs as long as the LoRAs
  // were not read. Not the client's.
  static constexpr int64_t kUnknownInputs = -1;
  int64_t grown_inputs = 0;

  // What the prompts name, and by which names ("cat" and "pets/cat" may be one). Not the client's.
  std::vector<PromptEmbedding> embeddings;
  std::map<std::string, size_t, std::less<>> embedding_names;  // → index into embeddings

  // The first one of a role; undefined without one.
  const at::Tensor& picture(MediaRole role) const {
    static const at::Tensor none;
    for (const MediaInput& input : inputs) {
      if (input.role == role) return input.pixels;
    }
    return none;
  }
  bool has(MediaRole role) const { return picture(role).defined(); }
  // In place of one of that role; undefined pixels take it away.
  void SetPicture(MediaRole role, at::Tensor pixels) {
    std::erase_if(inputs, [&](const MediaInput& input) { return input.role == role; });
    if (!pixels.defined()) return;
    inputs.push_back({role, std::move(pixels), "params." + std::string(MediaRoleName(role)) + "_image"});
  }

  // Whether there is something that the model reads as a picture; a mask is not.
  bool has_pictures() const { return has(MediaRole::kInit) || has(MediaRole::kControl); }

  // Tests only: noise to use in place of the seeds', [N, C, H/8, W/8] fp32.
  at::Tensor noise;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_GENERATE_PARAMS_H_
