// A LoRA with what it leaves out, at the places where that is most: Δ = scale · (up · [mid ·] down + S).
//
// LyCORIS writes S as "sparse bias" when it extracts a LoRA from two models: bias_indices, bias_values and
// bias_size, of the difference as a matrix (lycoris 1.8, utils/__init__.py, extract_diff). It is a part of
// the weight's difference and not of the bias.
#ifndef LATENTD_PATCHER_LAYERS_SPARSE_LOW_RANK_H_
#define LATENTD_PATCHER_LAYERS_SPARSE_LOW_RANK_H_

#include "patcher/layers/low_rank.h"

namespace latentd {

struct SparseLowRank {
  LowRank low_rank;
  at::Tensor places;              // [2, n]: rows and columns, integers
  at::Tensor values;              // [n]
  int64_t rows = 0, columns = 0;  // of S

  template <class Visitor>
  void ForEachTensor(Visitor&& visit) {
    low_rank.ForEachTensor(visit);
    visit(places);
    visit(values);
  }
  absl::Status Check() const;
  Extent extent() const { return low_rank.extent(); }
  int64_t rank() const { return low_rank.rank(); }
  at::Tensor Delta(at::IntArrayRef shape, const at::Tensor& base) const;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_SPARSE_LOW_RANK_H_
