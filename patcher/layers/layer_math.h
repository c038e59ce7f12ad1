// What all layer types have in common.
//
// A layer type is a plain struct of a file's tensors with the same few members (see LowRank): a visitor of
// its tensors, a check of its own shapes, what weights it fits, and its difference. A linear weight is [out,
// in], that of a convolution [out, in, kh, kw]; formulas see both as matrices [out, in · kh · kw], so a
// convolution is a matter of shapes.
//
// Differences are at user weight 1, and the user's weight scales them linearly, whatever the type:
//   W' = W + Σ_patches weight · Δ,  Δ = W'(1) − W.
// Where a type is not linear in itself, others differ for weights that are not 1: peft scales only the
// low-rank part of a DoRA and keeps its magnitudes; LyCORIS scales (magnitude / norm − 1) of the whole sum,
// and leaves OFT's rescale in full force. Linear means that weight 0 is the base model and that A + B is B +
// A for all types.
#ifndef LATENTD_PATCHER_LAYERS_LAYER_MATH_H_
#define LATENTD_PATCHER_LAYERS_LAYER_MATH_H_

#include <cstdint>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "c10/util/ArrayRef.h"

namespace latentd {

// No real patch comes near it; what does is an attack or a broken file.
inline constexpr int64_t kMaxRank = 1 << 14;

// The weights that a layer fits. -1 = any.
struct Extent {
  int64_t rows = -1;
  int64_t columns = -1;  // numbers in a row: in · kh · kw
  int64_t inputs = -1;   // in alone
};

// [rows, …] as an fp32 matrix [rows, numbers in a row].
inline at::Tensor Matrix(const at::Tensor& t) { return t.reshape({t.size(0), -1}).to(at::kFloat); }

inline int64_t Columns(const at::Tensor& t) {
  int64_t columns = 1;
  for (int64_t d = 1; d < t.dim(); ++d) columns *= t.size(d);
  return columns;
}

// A matrix, or the kernel of a convolution.
inline bool IsWeight(const at::Tensor& t) {
  return t.defined() && t.dim() >= 2 && t.dim() <= 5 && t.numel() > 0;
}

inline absl::Status BadLayer(absl::string_view what) { return absl::InvalidArgumentError(what); }

inline absl::Status CheckRank(int64_t rank) {
  if (rank >= 1 && rank <= kMaxRank) return absl::OkStatus();
  return BadLayer(absl::StrCat("rank ", rank, " is out of range"));
}

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYERS_LAYER_MATH_H_
