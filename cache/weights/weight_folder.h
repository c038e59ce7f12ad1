// Which of a folder's files are a component's weights.
#ifndef LATENTD_CACHE_WEIGHTS_WEIGHT_FOLDER_H_
#define LATENTD_CACHE_WEIGHTS_WEIGHT_FOLDER_H_

#include <string>

#include "absl/status/statusor.h"

namespace latentd {

// The path of the one .safetensors file, or of the index of its shards, that diffusers and transformers take
// from `folder`, which also has variants (".fp16", ".non_ema"), files of other formats, and what people put
// there:
//
//   the name that the library writes goes before any other   model.safetensors,
//   diffusion_pytorch_model.safetensors no variant goes before a variant, "non_ema" comes last   both
//   spellings: X.fp16.safetensors.index.json,
//                                                            X.safetensors.index.fp16.json
//   shards go before a whole file in diffusers' folders, after it in those of transformers
//
// Where no file is called so, a single one is taken whatever its name. Errors: NOT_FOUND FILE_NOT_FOUND;
// FAILED_PRECONDITION UNSAFE_FILE where there are pickles alone, UNSUPPORTED_MODEL for several files of other
// names, by name; RESOURCE_EXHAUSTED OUT_OF_DESCRIPTORS.
absl::StatusOr<std::string> PickWeightFile(const std::string& folder);

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_WEIGHT_FOLDER_H_
