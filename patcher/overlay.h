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
#include "cache/component_layout.h"
#include "cache/memory_budget.h"
#include "cache/model_cache.h"
#include "patcher/model_patch.h"

namespace latentd {

// One patch to apply. The handle is empty only for a patch that is not in the cache; then `patch` alone
// keeps it alive. `patch` is on the device that the overlay is for.
struct PatchSpec {
  std::string name;  // what the client calls it; the canonical order of specs is by name
  std::shared_ptr<const ModelPatch> patch;
  double weight = 1;
  LockHandle handle;
  DeviceLock residency;  // set by LockPatch(); keeps `patch` where it is
};

// A low-rank product computed beside a linear layer: y += (x · downᵀ) · upᵀ. Several patches of a layer are
// concatenated along the rank, with weight and scale multiplied into `up` in fp32.
struct Sidecar {
  at::Tensor down;  // [rank, in], compute type
  at::Tensor up;    // [out, rank], compute type
};

class Overlay {
 public:
  // By slot of the component's layout. Empty vectors when nothing of the kind is there.
  const Sidecar* sidecar(Slot slot) const {
    return sidecars_.empty() ? nullptr : sidecars_[static_cast<size_t>(slot.index)].get();
  }
  const at::Tensor* merged(Slot slot) const {
    if (merged_.empty()) return nullptr;
    const at::Tensor& t = merged_[static_cast<size_t>(slot.index)];
    return t.defined() ? &t : nullptr;
  }
  int64_t bytes() const { return bytes_; }

 private:
  friend class LayerPatcher;
  std::vector<PatchSpec> specs_;
  std::vector<std::unique_ptr<Sidecar>> sidecars_;
  std::vector<at::Tensor> merged_;
  Reservation reservation_;  // of bytes_, on the device's budget
  int64_t bytes_ = 0;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_OVERLAY_H_
