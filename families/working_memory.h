// What estimates of working memory have in common among families.
#ifndef LATENTD_FAMILIES_WORKING_MEMORY_H_
#define LATENTD_FAMILIES_WORKING_MEMORY_H_

#include <string>

#include "families/family.h"
#include "families/nn/live_floats.h"

namespace latentd {

// How a phase on a component of `pipeline` uses its weights: as their file has them, and with the patches
// that `options` tell of. REQUIRES: the pipeline has such a component.
WeightUse UseOf(const Pipeline& pipeline, const std::string& component, const PhaseOptions& options);

// The types that a component's matrices are stored in, "F32" or "BF16,F8_E4M3"; empty without files.
std::string StorageTypes(const Component& component);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_WORKING_MEMORY_H_
