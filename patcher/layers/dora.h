// DoRA: W' = magnitude ∘ (W + Δ) / ‖W + Δ‖, Δ of a LoRA, LoHa or LoKr. Difference: W' − W.
//
// Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", equation 5. The shape of the magnitude says
// what the norm is over: [1, in] one norm per input column, over all rows (`dora_scale` of OneTrainer and
// LyCORIS; [1, in, 1, 1] of a convolution, over its kernel too); [out, 1] or [out] one per row (`dora_scale`
// of LyCORIS with wd_on_out; `lora_magnitude_vector` of peft, which MakeLayer brings into that shape).
//
// A norm per column is over all rows of the layer as the file has it. Where the file's layer is a fused
// matrix and the model's weights are its parts, the parts are put together first (contribution.cc).
#ifndef LATENTD_PATCHER_LAYERS_DORA_H_
#define LATENTD_PATCHER_LAYERS_DORA_H_

#include <variant>

#include "patcher/layers/hadamard.h"
#include "patcher/layers/kronecker.h"
#include "patcher/layers/low_rank.h"

namespace latentd {

struct Dora {
  std::variant<LowRank, Hadamard, Kronecker> inner;
  at::Tensor magnitude;

  template <class Visitor>
  void ForEachTensor(Visitor&& visit) {
    std::visit([&](auto& layer) { layer.ForEachTensor(visit); }, inner);
    visit(magnitude);
  }
  bool per_column() const { return magnitude.dim() >= 2 && magnitude.size(0) == 1 && magnitude.numel() > 1; }
  absl::Status Check() const;
  Extent extent() const;
  int64_t rank() const {
    return std::visit([](const auto& layer) { return layer.rank(); }, inner);
  }
  at::Tensor Delta(at::IntArrayRef shape, const at::Tensor& base) const;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_DORA_H_
