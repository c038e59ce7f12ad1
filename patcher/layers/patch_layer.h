// One layer of a patch file: the formula for its weight, and a difference of its bias.
#ifndef LATENTD_PATCHER_LAYERS_PATCH_LAYER_H_
#define LATENTD_PATCHER_LAYERS_PATCH_LAYER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <variant>

#include "patcher/layers/boft.h"
#include "patcher/layers/difference.h"
#include "patcher/layers/dora.h"
#include "patcher/layers/glora.h"
#include "patcher/layers/hadamard.h"
#include "patcher/layers/ia3.h"
#include "patcher/layers/kronecker.h"
#include "patcher/layers/low_rank.h"
#include "patcher/layers/oft.h"
#include "patcher/layers/replacement.h"
#include "patcher/layers/sparse_low_rank.h"

namespace latentd {

// std::monostate: the layer changes a bias alone.
using LayerMath = std::variant<std::monostate, LowRank, SparseLowRank, Hadamard, Kronecker, Difference,
                               Replacement, Dora, Ia3, Glora, Oft, Boft>;

struct PatchLayer {
  std::string name;  // module path as in the file, suffix taken off
  std::string type;  // "LoRA", "LoKr", …; see PatchKeys
  LayerMath math;
  at::Tensor bias;  // difference, at bias_scale; or undefined
  // Of the bias of the up part; that of a difference is as it stands, whatever the layer's alpha.
  bool bias_of_up = false;
  double bias_scale = 1;
  bool has_alpha = false;

  bool has_weight() const { return !std::holds_alternative<std::monostate>(math); }
  // Not null for what can be computed beside a linear layer or a convolution: plain low-rank products.
  const LowRank* low_rank() const;
  int64_t rank() const;
  bool has_scale() const;  // a formula with a factor of alpha
  bool is_kronecker() const;
  // Sets that factor, and with it that of an up part's bias. Formulas without one stay as they are.
  void SetScale(double scale);
  // Does the difference depend on the weight that it is for?
  bool depends_on_base() const;
  Extent extent() const;
  absl::Status Check() const;

  void ForEachTensor(const std::function<void(at::Tensor&)>& visit);
  int64_t bytes() const;

  // Difference of the weight at user weight 1, [rows, columns], fp32. `shape` is that of the weight (for a
  // fused layer: of its parts on top of each other), `base` its fp32 value; it may be undefined when nothing
  // depends on it. REQUIRES: has_weight(); Check() is OK; the shape fits extent().
  at::Tensor Delta(at::IntArrayRef shape, const at::Tensor& base) const;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_PATCH_LAYER_H_
