// What a patch file says of itself: the architecture that it seems to be for. From names and shapes alone.
//
// A guess, for listings and for messages: whether a file fits a model is found by matching it (LayerPatcher).
// Architectures share names (attn.to_q is in most), so that sizes and numbers of blocks decide in the end;
// where they cannot, the guess is the likelier one.
#ifndef LATENTD_PATCHER_PATCH_IDENTITY_H_
#define LATENTD_PATCHER_PATCH_IDENTITY_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "patcher/patch_keys.h"

namespace latentd {

// "FLUX.1", "FLUX.2", "SD1.5", "SD2", "SDXL", "SD3", "SD3.5", "Qwen-Image", "Z-Image", "Anima", "WAN 2.1",
// "WAN 2.2", "Krea 2"; empty when nothing tells.
std::string FamilyOf(const PatchKeys& keys, const NamedShapes& tensors);

// What a layer's name says that it is for: "text_encoder", "text_encoder_2", …; "denoiser" for all others.
std::string ComponentOf(absl::string_view layer);

struct PatchIdentity {
  std::string family, format;
  int64_t layers = 0;                          // those that are not supported included
  std::map<std::string, int64_t> components;   // layers of "denoiser", "text_encoder", "text_encoder_2", …
  std::map<std::string, int64_t> layer_types;  // LayerType, and types that are not supported
  std::map<int64_t, int64_t> ranks;            // layers by rank
  int64_t layers_with_alpha = 0;
  int64_t ignored = 0;
};

// Also of files that are refused for the types of their layers. Errors: those of PatchKeys::GroupAll.
absl::StatusOr<PatchIdentity> Identify(const NamedShapes& tensors);

}  // namespace latentd

#endif  // LATENTD_PATCHER_PATCH_IDENTITY_H_
