// The tensor names of a patch file, put together by layer. From names and shapes alone: no values, no model.
#ifndef LATENTD_PATCHER_PATCH_KEYS_H_
#define LATENTD_PATCHER_PATCH_KEYS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "patcher/layers/patch_layer.h"

namespace latentd {

// A file's tensors.
using NamedShapes = std::map<std::string, std::vector<int64_t>>;

// What a tensor is to its layer; named after the suffixes. The tensors of one formula stand together:
// FormulasOf() takes ranges.
enum class PatchKey {
  kDown,
  kUp,
  kMid,
  kAlpha,
  kDoraScale,
  kMagnitude,
  kUpBias,
  kSparseIndices,
  kSparseValues,
  kSparseSize,
  kDiff,
  kDiffBias,
  kNormWeight,
  kNormBias,
  kScale,
  kHadaW1A,
  kHadaW1B,
  kHadaW2A,
  kHadaW2B,
  kHadaT1,
  kHadaT2,
  kLokrW1,
  kLokrW1A,
  kLokrW1B,
  kLokrW2,
  kLokrW2A,
  kLokrW2B,
  kLokrT2,
  kIa3Weight,
  kOnInput,
  kGloraA1,
  kGloraA2,
  kGloraB1,
  kGloraB2,
  kOftBlocks,
  kRescale,
};

// A layer's tensors: key of the file by what it is.
struct LayerKeys {
  std::map<PatchKey, std::string> by_kind;
  std::map<int64_t, std::string> numbered_blocks;  // "oft_blocks.N"
  bool has(PatchKey kind) const { return by_kind.count(kind) != 0; }
};

struct PatchKeys {
  std::map<std::string, LayerKeys> layers;  // by name
  int64_t ignored = 0;                      // tensors of embeddings, which belong to no layer
  std::set<std::string> embeddings;         // textual inversions that the file brings with it, by name
  bool peft_suffix = false;                 // lora_A/lora_B
  std::map<std::string, std::vector<std::string>>
      unsupported;  // type → keys of tensors that are not understood

  // Errors: INVALID_ARGUMENT INVALID_LORA (too many tensors, a tensor twice).
  static absl::StatusOr<PatchKeys> GroupAll(const NamedShapes& tensors);

  // The same for a file that is to be used: all of it is understood. Errors also: INVALID_LORA (no layer);
  // UNIMPLEMENTED UNSUPPORTED_LORA with the type and sample keys.
  static absl::StatusOr<PatchKeys> Group(const NamedShapes& tensors);

  // How the file names its layers: "diffusers/PEFT", "kohya", … Empty without layers.
  std::string Format() const;
};

// "LoRA", "LoCon", "LoCon-Tucker", "LoHa", "LoKr", "full diff", "norm", "set scale", "IA3", "GLoRA", "OFT",
// "BOFT", each of the low-rank ones with "+sparse", "+DoRA", "+bias" (its own) or "+bias diff"; "bias diff
// only". Empty for an alpha alone.
std::string LayerType(const LayerKeys& keys, const NamedShapes& tensors);

// Makes a layer of its tensors and checks it. `read` gives a tensor by its key in the file. Errors:
// INVALID_ARGUMENT INVALID_LORA with the layer; those of `read`.
absl::StatusOr<PatchLayer> MakeLayer(
    const std::string& name, const LayerKeys& keys, const NamedShapes& tensors,
    const std::function<absl::StatusOr<at::Tensor>(const std::string&)>& read);

// INVALID_ARGUMENT INVALID_LORA about a layer.
absl::Status InvalidLayer(absl::string_view layer, absl::string_view what);

}  // namespace latentd

#endif  // LATENTD_PATCHER_PATCH_KEYS_H_
