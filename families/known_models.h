// Models that are known and not served: what they are, and what to use instead.
#ifndef LATENTD_FAMILIES_KNOWN_MODELS_H_
#define LATENTD_FAMILIES_KNOWN_MODELS_H_

#include <string>

#include "absl/strings/string_view.h"
#include "cache/weights/weight_files.h"

namespace latentd {

// A sentence about the pipeline class of a model_index.json that no family serves.
std::string AboutPipelineClass(absl::string_view name);

// What a single file seems to be, by its tensors' names, and what to do with it; empty: nothing that is
// known.
std::string AboutFile(const WeightFiles& files);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_KNOWN_MODELS_H_
