// The tensors of one component: names and shapes, in the order in which its forward pass uses them, grouped
// in blocks. Made from a config alone, before any file is opened; so a full-size model can be described
// without its weights.
//
// The network code adds its tensors while it is being described and keeps the Slots:
//
//   ComponentLayout layout;
//   layout.BeginBlock("transformer_blocks.0");
//   Slot w = layout.Add("transformer_blocks.0.attn.to_q.weight", {3072, 3072});
//
// Not thread-safe while being filled; immutable and shared afterwards.
#ifndef LATENTD_CACHE_WEIGHTS_COMPONENT_LAYOUT_H_
#define LATENTD_CACHE_WEIGHTS_COMPONENT_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace latentd {

// Position of a tensor in a ComponentLayout. A default-made Slot stands for an absent tensor (no bias).
struct Slot {
  int32_t index = -1;
  explicit operator bool() const { return index >= 0; }
};

struct TensorDecl {
  std::string name;            // canonical name: that of diffusers / transformers
  std::vector<int64_t> shape;  // as stored
  int32_t block = 0;           // unit of streaming; ascending in the order of use
};

class ComponentLayout {
 public:
  // Tensors added from here on belong to a new block. One that stays is needed on a device at all times; the
  // others may be copied there as the forward pass comes to them (all but their vectors, which are small).
  enum class Residency { kStreams, kStays };
  void BeginBlock(absl::string_view name, Residency residency = Residency::kStreams) {
    blocks_.push_back({std::string(name), residency == Residency::kStays});
  }

  // REQUIRES: no tensor of that name was added before.
  Slot Add(absl::string_view name, std::vector<int64_t> shape);

  // The slot of a name; an empty Slot when there is none.
  Slot Find(absl::string_view name) const;

  const TensorDecl& operator[](Slot slot) const { return tensors_[static_cast<size_t>(slot.index)]; }
  const std::vector<TensorDecl>& tensors() const { return tensors_; }
  struct Block {
    std::string name;
    bool stays;
  };
  const std::vector<Block>& blocks() const { return blocks_; }
  int64_t parameter_count() const;

 private:
  std::vector<TensorDecl> tensors_;
  std::vector<Block> blocks_;
  absl::flat_hash_map<std::string, int32_t> index_;
};

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_COMPONENT_LAYOUT_H_
