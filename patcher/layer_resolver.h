// Finds the tensors that a LoRA layer's name means in one component.
#ifndef LATENTD_PATCHER_LAYER_RESOLVER_H_
#define LATENTD_PATCHER_LAYER_RESOLVER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "patcher/patch_target.h"

namespace latentd {

// A share of a LoRA layer: rows [row_begin, row_begin + rows) of it, for one whole weight.
struct LayerPart {
  Slot weight;
  int64_t row_begin = 0;
  int64_t rows = 0;
  bool swap_halves = false;  // the layer's rows come as [a | b], the weight's are [b | a]
};

// Names with dots are looked up as paths, in the canonical layout and through the key maps. Flattened names
// cannot be turned back by replacing underscores; they are compared with the flattened names of all modules
// that the component has. Immutable after construction; keeps nothing of the target but its layout.
class LayerResolver {
 public:
  explicit LayerResolver(const PatchTarget& target);

  // Empty when the layer does not belong to this component.
  std::vector<LayerPart> Resolve(absl::string_view layer_name) const;

 private:
  std::vector<LayerPart> ResolvePath(absl::string_view path) const;

  std::shared_ptr<const ComponentLayout> layout_;
  std::vector<const KeyMap*> key_maps_;
  std::vector<std::string> dotted_prefixes_, flat_prefixes_;  // longest first
  absl::flat_hash_map<std::string, std::string> flat_;        // flattened module → module path
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYER_RESOLVER_H_
