// What network code reads its weights through: immutable base weights plus the overlay of a session.
//
// The network asks for a tensor or for a linear layer by Slot; whether that is the base weight, a merged
// copy, or the base with low-rank patches computed beside it, is the view's business. Nothing ever writes
// to a base tensor.
//
// A view borrows: base, overlay and stream must outlive it. One thread at a time (it owns scratch buffers).
// Where blocks are streamed, a tensor is good until one of another block is asked for.
#ifndef LATENTD_PATCHER_WEIGHT_VIEW_H_
#define LATENTD_PATCHER_WEIGHT_VIEW_H_

#include <cstdint>
#include <stop_token>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "cache/weights/weight_set.h"

namespace latentd {

class Overlay;
struct Sidecar;
class WeightStream;

class WeightView {
 public:
  // `overlay` may be null: the base alone. `compute` is the type that the network computes in, apart from
  // the type that weights are stored in: fp32 on a CPU. `stream` brings what `base` has not; null when it has
  // everything.
  WeightView(const WeightSet& base, const Overlay* overlay, at::ScalarType compute = at::kFloat,
             WeightStream* stream = nullptr);

  // From now on, asking for a weight while a stop is requested throws StatusError
  // (cache/weights/weight_stream.h) with CANCELLED: there is no other way out of a network's formulas, and a
  // network asks many times in each of its blocks. Whoever runs a slice catches it (GuardTensorCode).
  void StopWith(std::stop_token stop) { stop_ = std::move(stop); }

  at::ScalarType compute_type() const { return compute_; }

  // Where the base's weights are, and so what is computed with them: `x` of Linear, and all that network code
  // makes itself, must be there. Host memory for a base without any.
  at::Device device() const { return device_; }

  // The tensor in the compute type, aligned. Vectors are converted once per view, larger ones at each call.
  // REQUIRES: slot is not empty.
  at::Tensor operator()(Slot slot) const;

  // The same, good until the next call of this or of Linear: a weight of another type is converted into
  // memory that the view keeps.
  const at::Tensor& ComputeWeight(Slot slot) const;

  // Memory of at least `count` numbers of the compute type, on device(), for what one call of a kernel writes
  // down on its way; good until the next call. Kept for the view's lifetime: fresh pages for each call cost
  // time.
  at::Tensor Workspace(int64_t count) const;

  // The tensor as stored, merged where the overlay says so; for what asks for its shape.
  const at::Tensor& Stored(Slot slot) const;

  // Rows of a table in the compute type: `ids` int64 [...] → [..., columns]. Converts only what it takes.
  at::Tensor Rows(Slot slot, const at::Tensor& ids) const;

  // What the overlay computes beside a weight, for layers that are not linear: null for nothing.
  const Sidecar* Beside(Slot slot) const;

  // y = x·Wᵀ + b, plus what the overlay computes beside it. x: [..., in], in the compute type, on device().
  // `bias` may be an empty Slot. The result is in the compute type.
  at::Tensor Linear(Slot weight, Slot bias, const at::Tensor& x) const;

 private:
  const at::Tensor& Find(Slot slot) const;
  // Writes a weight's numbers in the compute type. `stored` is what Stored(slot) gives.
  void Convert(Slot slot, const at::Tensor& stored, at::Tensor& out) const;
  // True for what kernels can take as it is: of the compute type, and aligned.
  bool Usable(const at::Tensor& stored) const {
    return stored.scalar_type() == compute_ && IsComputeAligned(stored);
  }

  const WeightSet& base_;
  const Overlay* overlay_;
  at::ScalarType compute_;
  at::Device device_ = at::kCPU;
  WeightStream* const stream_;
  std::vector<at::Tensor> vectors_;  // by slot: vectors in the compute type, else undefined
  mutable at::Tensor scratch_;       // a weight on its way from storage to compute type
  mutable at::Tensor shaped_;
  mutable at::Tensor workspace_;
  std::stop_token stop_;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_WEIGHT_VIEW_H_
