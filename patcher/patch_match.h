// What a patch's layers are in the components of a model. Resolved once, by whoever holds the patch, and used
// by every phase and plan; names are not looked at again.
#ifndef LATENTD_PATCHER_PATCH_MATCH_H_
#define LATENTD_PATCHER_PATCH_MATCH_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "patcher/layer_resolver.h"
#include "patcher/model_patch.h"
#include "patcher/patch_target.h"

namespace latentd {

struct MatchedLayer {
  size_t layer = 0;                                     // of ModelPatch::layers()
  std::shared_ptr<const std::vector<LayerPart>> parts;  // of it, at least one
};

// The layers that a component has, in the order of the file. `name` is the patch's, for errors:
// FAILED_PRECONDITION LORA_MISMATCH with the layer whose shape does not fit.
absl::StatusOr<std::vector<MatchedLayer>> MatchComponent(const ModelPatch& patch, const std::string& name,
                                                         const PatchTarget& target);

// Immutable; by component. Good for a patch's copies on other devices, too.
using PatchMatch = std::map<std::string, std::vector<MatchedLayer>>;

}  // namespace latentd

#endif  // LATENTD_PATCHER_PATCH_MATCH_H_
