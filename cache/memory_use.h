// What bytes of memory are for.
#ifndef LATENTD_CACHE_MEMORY_USE_H_
#define LATENTD_CACHE_MEMORY_USE_H_

#include <cstddef>

#include "absl/strings/string_view.h"

namespace latentd {

// Of the first four, records of the cache are made; the rest belongs to running work.
enum class MemoryUse {
  kWeights,       // components of models
  kPatches,       // parsed LoRAs and textual inversions
  kMerged,        // weights with patches merged into them, and what patches add beside weights
  kConditioning,  // encoded prompts
  kStaging,       // buffers of copies to a device: rings, pinned memory
  kWorking,       // activations
  kImages,        // pictures on their way in and out
};
inline constexpr size_t kMemoryUses = 7;
absl::string_view MemoryUseName(MemoryUse use);  // "weights", "patches", …

}  // namespace latentd

#endif  // LATENTD_CACHE_MEMORY_USE_H_
