// The patches of one session on one component, ready for a WeightView.
//
// An overlay owns its specs, and with them the lock handles of the patches in it: as long as it lives, none
// of its LoRAs can be evicted. Its end is a pointer going away; base weights were never touched.
#ifndef LATENTD_PATCHER_OVERLAY_H_
#define LATENTD_PATCHER_OVERLAY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "cache/memory_budget.h"
#include "cache/model_cache.h"
#include "cache/weights/component_layout.h"
#include "cache/weights/weight_set.h"
#include "patcher/block_weights.h"
#include "patcher/model_patch.h"
#include "patcher/patch_match.h"

namespace latentd {

// One patch to apply. The handle is empty only for a patch that is not in the cache; then `patch` alone
// keeps it alive, and the overlay pays for it. `patch` is on the device that the overlay is for.
struct PatchSpec {
  std::string name;  // what the client calls it; the canonical order of specs is by name
  std::shared_ptr<const ModelPatch> patch;
  double weight = 1;
  BlockWeights blocks = {};  // factors on the weight
  std::shared_ptr<const PatchMatch> match =
      nullptr;  // LayerPatcher::Match's; null: matched when it is applied
  LockHandle handle;
  DeviceLock residency;  // set by LockPatch(); keeps `patch` where it is
};

// A low-rank product computed beside a linear layer, y += (x · downᵀ) · upᵀ, or beside a convolution: `down`
// is then one of its size, stride and padding with `rank` results, and `up` takes those place by place.
// Several patches of a layer are concatenated along the rank, with weight and scale multiplied into `up` in
// fp32.
struct Sidecar {
  at::Tensor down;  // [rank, in], [rank, in, kh, kw], compute type
  at::Tensor up;    // [out, rank], compute type
};

class Overlay {
 public:
  // By slot of the component's layout. Empty vectors when nothing of the kind is there.
  const Sidecar* sidecar(Slot slot) const {
    return sidecars_.empty() ? nullptr : sidecars_[static_cast<size_t>(slot.index)].get();
  }
  const at::Tensor* merged(Slot slot) const { return Find(merged_.get(), slot); }
  // The same in host memory; where a block is streamed, this is what is copied in place of the base's.
  const at::Tensor* merged_on_host(Slot slot) const { return Find(merged_on_host_.get(), slot); }

  // Bytes that the overlay itself has promised; merged weights that are a record of the cache are not in it.
  int64_t bytes() const { return reservation_.bytes() + beside_.bytes(); }

 private:
  friend class LayerPatcher;
  static const at::Tensor* Find(const WeightSet* weights, Slot slot) {
    return weights != nullptr && weights->has(slot) ? &(*weights)[slot].data : nullptr;
  }

  // What tensors need is before them: it ends after them.
  std::vector<PatchSpec> specs_;
  Reservation reservation_;       // of merged weights that are not in a record, on the device's budget
  Reservation beside_;            // of sidecars, on the device's budget
  Reservation uncached_patches_;  // of patches without a handle, in host memory
  LockHandle merged_record_;
  DeviceLock merged_residency_;
  std::shared_ptr<const WeightSet> merged_on_host_, merged_;
  std::vector<std::unique_ptr<Sidecar>> sidecars_;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_OVERLAY_H_
