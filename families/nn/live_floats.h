// What formulas hold at a time, for estimates of their memory: whoever estimates goes through the tensors as
// the code makes them and lets go of them.
#ifndef LATENTD_FAMILIES_NN_LIVE_FLOATS_H_
#define LATENTD_FAMILIES_NN_LIVE_FLOATS_H_

#include <algorithm>
#include <cstdint>

#include "cache/weights/component_layout.h"
#include "families/nn/host_conv.h"

namespace latentd {

// How a phase's weights are used, as far as that takes memory beside them.
struct WeightUse {
  bool converted = false;   // larger weights are converted, one at a time, into the type that is computed in
  int64_t beside_rank = 0;  // of the widest patch that is computed beside a weight
};

class LiveFloats {
 public:
  void Hold(int64_t floats) { Reach(floats), live_ += floats; }
  void Drop(int64_t floats) { live_ -= floats; }
  // For a moment, beside what is held.
  void Reach(int64_t floats) { peak_ = std::max(peak_, live_ + floats); }

  // A convolution's own memory, before its result is held. Of our kernels it is a workspace, which is kept
  // for the next one. The library copies what comes and what comes out into an order of its own, with some
  // sizes and not with others. `side`: of the kernel; 0: one that is not ours whatever its shape.
  void Convolve(const HostConvShape& shape, int64_t side) {
    const HostConvWay way = side == 3 ? ChooseHostConv(shape) : HostConvWay::kLibrary;
    workspace_ = std::max(workspace_, HostConvWorkspace(way, shape));
    if (way != HostConvWay::kLibrary || side == 1) return;
    const int64_t results = shape.height / shape.stride * (shape.width / shape.stride);
    Reach(shape.batch * (shape.in * shape.height * shape.width + 2 * shape.out * results));
  }

  // With what is kept all the time, in bytes; what is too small to be looked at stands in `slack`.
  int64_t PeakBytes(int64_t kept, int64_t slack) const {
    return static_cast<int64_t>(kMargin * static_cast<double>(peak_ + workspace_ + kept) * sizeof(float)) +
           slack;
  }

 private:
  static constexpr double kMargin = 1.05;
  int64_t live_ = 0, peak_ = 0, workspace_ = 0;
};

// Of the largest weight that is converted; tables, of which rows are taken, stand in blocks before
// `first_block`.
int64_t ConvertedFloats(const ComponentLayout& layout, const WeightUse& use, int32_t first_block = 0);

// Scores that an attention in host memory has at a time, in all threads.
int64_t AttentionScratch(int64_t queries, int64_t keys, int64_t head_dim);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_NN_LIVE_FLOATS_H_
