#include "patcher/weight_view.h"

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "cache/weights/weight_stream.h"
#include "patcher/host_gemm.h"
#include "patcher/overlay.h"

namespace latentd {

WeightView::WeightView(const WeightSet& base, const Overlay* overlay, at::ScalarType compute,
                       WeightStream* stream)
    : base_(base), overlay_(overlay), compute_(compute), stream_(stream) {
  const auto& decls = base.layout().tensors();
  for (size_t i = 0; i < decls.size(); ++i) {
    const at::Tensor& resident = base[Slot{static_cast<int32_t>(i)}].data;
    if (!resident.defined()) continue;
    device_ = resident.device();
    break;
  }
  vectors_.resize(decls.size());
  for (size_t i = 0; i < decls.size(); ++i) {
    if (decls[i].shape.size() != 1) continue;
    const at::Tensor& stored = Find(Slot{static_cast<int32_t>(i)});
    if (Usable(stored)) continue;
    vectors_[i] = at::empty(stored.sizes(), stored.options().dtype(compute_));
    Convert(Slot{static_cast<int32_t>(i)}, stored, vectors_[i]);
  }
}

const at::Tensor& WeightView::Stored(Slot slot) const {
  if (absl::Status status = MaybeFail(FaultPoint::kWeight, "a weight"); !status.ok())
    throw StatusError(status);
  if (stop_.stop_requested()) {
    throw StatusError(MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled between two weights"));
  }
  return Find(slot);
}

const at::Tensor& WeightView::Find(Slot slot) const {
  if (overlay_ != nullptr) {
    if (const at::Tensor* merged = overlay_->merged(slot)) return *merged;
  }
  const at::Tensor& resident = base_[slot].data;
  return resident.defined() || stream_ == nullptr ? resident : stream_->Get(slot);
}

at::Tensor WeightView::operator()(Slot slot) const {
  const at::Tensor& converted = vectors_[static_cast<size_t>(slot.index)];
  if (converted.defined()) return converted;
  const at::Tensor& stored = Stored(slot);
  if (Usable(stored)) return stored;
  at::Tensor converted_now = at::empty(stored.sizes(), stored.options().dtype(compute_));
  Convert(slot, stored, converted_now);
  return converted_now;
}

void WeightView::Convert(Slot slot, const at::Tensor& stored, at::Tensor& out) const {
  out.copy_(stored);
  if (at::isFloat8Type(stored.scalar_type()) && base_[slot].scale != 1) out.mul_(base_[slot].scale);
}

at::Tensor WeightView::Rows(Slot slot, const at::Tensor& ids) const {
  const at::Tensor& stored = Stored(slot);
  const at::Tensor where = ids.to(stored.device());
  if (!at::isFloat8Type(stored.scalar_type())) return at::embedding(stored, where).to(compute_);
  // Bytes are moved, and then read as what they are.
  at::Tensor bytes = stored.view(at::kByte).index_select(0, where.flatten());
  at::Tensor rows = at::empty(bytes.sizes(), bytes.options().dtype(compute_));
  Convert(slot, bytes.view(stored.scalar_type()), rows);
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(stored.size(1));
  return rows.view(shape);
}

const at::Tensor& WeightView::ComputeWeight(Slot slot) const {
  const at::Tensor& stored = Stored(slot);
  if (Usable(stored)) return stored;
  // One buffer for all weights: fresh pages for each would cost more than the conversion.
  if (!scratch_.defined() || scratch_.numel() < stored.numel()) {
    scratch_ = at::empty({stored.numel()}, stored.options().dtype(compute_));
  }
  shaped_ = scratch_.narrow(0, 0, stored.numel()).view(stored.sizes());
  Convert(slot, stored, shaped_);
  return shaped_;
}

at::Tensor WeightView::Workspace(int64_t count) const {
  if (!workspace_.defined() || workspace_.numel() < count) {
    workspace_ = at::Tensor();  // not both at a time
    workspace_ = at::empty({count}, at::TensorOptions(compute_).device(device_));
  }
  return workspace_;
}

const Sidecar* WeightView::Beside(Slot slot) const {
  return overlay_ == nullptr ? nullptr : overlay_->sidecar(slot);
}

at::Tensor WeightView::Linear(Slot weight, Slot bias, const at::Tensor& x) const {
  const std::optional<at::Tensor> added = bias ? std::make_optional((*this)(bias)) : std::nullopt;
  at::Tensor y = HostLinear(x, ComputeWeight(weight), added);
  if (const Sidecar* sidecar = Beside(weight)) {
    at::Tensor rows = y.view({-1, y.size(-1)});
    HostAddProduct(rows, HostLinear(x, sidecar->down).view({-1, sidecar->down.size(0)}), sidecar->up);
  }
  return y;
}

}  // namespace latentd
