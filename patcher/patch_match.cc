#include "patcher/patch_match.h"

#include <utility>

#include "cache/base/error.h"
#include "patcher/contribution.h"

namespace latentd {

absl::StatusOr<std::vector<MatchedLayer>> MatchComponent(const ModelPatch& patch, const std::string& name,
                                                         const PatchTarget& target) {
  std::vector<MatchedLayer> matched;
  for (size_t l = 0; l < patch.layers().size(); ++l) {
    const PatchLayer& layer = patch.layers()[l];
    std::vector<LayerPart> parts = target.resolver().Resolve(layer.name);
    if (parts.empty()) continue;
    RETURN_IF_ERROR(CheckShapes(name, layer, parts, target));
    matched.push_back({l, std::make_shared<const std::vector<LayerPart>>(std::move(parts))});
  }
  return matched;
}

}  // namespace latentd
