// Table-driven translation of another layout's module names into canonical (diffusers) ones.
//
// One row says: this native module is these canonical modules, stacked by rows in that order. "{}" stands
// for a block number. Weight files and LoRA files go through the same table.
//
//   {"double_blocks.{}.img_attn.qkv", {"transformer_blocks.{}.attn.to_q", "….to_k", "….to_v"}}
//   {"final_layer.adaLN_modulation.1", {"norm_out.linear"}, KeyTransform::kSwapHalves}
//
// Immutable after construction; thread-safe.
#ifndef LATENTD_CACHE_WEIGHTS_KEY_MAP_H_
#define LATENTD_CACHE_WEIGHTS_KEY_MAP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/weights/component_layout.h"

namespace latentd {

enum class KeyTransform {
  kNone,
  kSwapHalves,   // rows are [a | b] in the native file and [b | a] in the canonical layout
  kSqueezeConv,  // [out, in, 1, 1] in the native file, [out, in] in the canonical layout
  kTranspose,    // [in, out] in the native file
};

struct KeyRule {
  std::string native;                  // module path, no ".weight"
  std::vector<std::string> canonical;  // parts by rows
  KeyTransform transform = KeyTransform::kNone;
};

// A share of a native module: rows [row_begin, row_begin + rows) of it are the canonical module, whole.
struct KeyPart {
  std::string canonical;
  int64_t row_begin = 0;
  int64_t rows = 0;
  KeyTransform transform = KeyTransform::kNone;
};

class KeyMap {
 public:
  explicit KeyMap(std::vector<KeyRule> rules);

  // The canonical parts of a native module, with rows from `layout`'s shapes; empty when no row matches or
  // the layout has none of the parts.
  std::vector<KeyPart> Resolve(absl::string_view native_module, const ComponentLayout& layout) const;

  // All that Resolve depends on, as a text.
  std::string ToString() const;

  // All native module paths that exist for `layout` (for each block number). Used to undo flattened names.
  std::vector<std::string> NativeModules(const ComponentLayout& layout) const;

 private:
  std::vector<KeyRule> rules_;
  absl::flat_hash_map<std::string, size_t> by_native_;  // native path with "{}" → rule
};

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_KEY_MAP_H_
