#include "cache/weights/weight_set.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "cache/device.h"

namespace latentd {
namespace {

// Kernels for vectors are many and small, and who computes keeps vectors in its own type anyhow.
bool MovesWithItsBlock(const at::Tensor& tensor) { return tensor.dim() >= 2; }

}  // namespace

at::Tensor Weight::To(at::ScalarType type) const {
  if (form == StorageForm::kPlain) return data.to(type);
  const at::Tensor numbers = data.to(at::kFloat);
  return (scale == 1 ? numbers : numbers * scale).to(type);
}

bool WeightSet::is_plain() const {
  return std::all_of(weights_.begin(), weights_.end(), [](const Weight& w) { return HasDirectPath(w.form); });
}

WeightSet::WeightSet(std::shared_ptr<const ComponentLayout> layout, std::vector<Weight> weights,
                     Checker checker)
    : layout_(std::move(layout)), weights_(std::move(weights)), checker_(std::move(checker)) {
  // Tied tensors move with what stays, when their blocks differ.
  const auto always = static_cast<int32_t>(layout_->blocks().size());
  std::unordered_map<const void*, int32_t> block_of_memory;
  block_of_.resize(weights_.size());
  for (size_t i = 0; i < weights_.size(); ++i) {
    const at::Tensor& data = weights_[i].data;
    block_of_[i] = layout_->tensors()[i].block;
    if (!data.defined()) continue;
    if (!MovesWithItsBlock(data)) block_of_[i] = always;
    const auto [it, is_new] = block_of_memory.emplace(data.const_data_ptr(), block_of_[i]);
    if (it->second != block_of_[i]) it->second = always;
  }
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i].data.defined()) block_of_[i] = block_of_memory[weights_[i].data.const_data_ptr()];
  }
  CountBytes();
}

WeightSet::WeightSet(const WeightSet& base, std::vector<Weight> instead)
    : layout_(base.layout_), weights_(std::move(instead)), block_of_(base.block_of_) {
  CountBytes();
}

void WeightSet::CountBytes() {
  for (const ComponentLayout::Block& block : layout_->blocks()) blocks_.push_back({0, block.stays});
  blocks_.push_back({0, true});
  // Tied tensors share their memory and count once. Row ranges of one fused tensor differ in address.
  std::unordered_set<const void*> seen;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const at::Tensor& data = weights_[i].data;
    if (!data.defined() || !seen.insert(data.const_data_ptr()).second) continue;
    const auto bytes = static_cast<int64_t>(data.nbytes());
    bytes_ += bytes;
    blocks_[static_cast<size_t>(block_of_[i])].bytes += PaddedBytes(bytes);
  }
}

at::Tensor TensorOn(Device& device, std::shared_ptr<void> memory, int64_t offset_bytes, at::IntArrayRef sizes,
                    at::ScalarType type) {
  void* data = static_cast<char*>(memory.get()) + offset_bytes;
  const at::Device place = device.kind() == DeviceKind::kCuda
                               ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device.index()))
                               : at::Device(at::kCPU);
  return at::from_blob(
      data, sizes, [memory = std::move(memory)](void*) mutable { memory.reset(); },
      at::TensorOptions().dtype(type).device(place), place);
}

absl::StatusOr<at::Tensor> CopyTensorTo(const at::Tensor& tensor, Device& device) {
  const at::Tensor from = tensor.contiguous();
  const auto bytes = static_cast<int64_t>(from.nbytes());
  ASSIGN_OR_RETURN(std::shared_ptr<void> memory, device.Allocate(bytes));
  RETURN_IF_ERROR(device.CopyIn(memory.get(), from.const_data_ptr(), bytes));
  return TensorOn(device, std::move(memory), 0, from.sizes(), from.scalar_type());
}

absl::StatusOr<std::shared_ptr<const Resource>> WeightSet::CopyTo(Device& device,
                                                                  const std::vector<bool>& resident,
                                                                  const Resource* have,
                                                                  std::stop_token stop) const {
  const auto* before = static_cast<const WeightSet*>(have);
  std::vector<Weight> copies(weights_.size());
  std::map<const void*, at::Tensor> tied;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const Weight& weight = weights_[i];
    copies[i].form = weight.form;
    copies[i].scale = weight.scale;
    if (!weight.data.defined()) continue;
    if (!resident.empty() && !resident[static_cast<size_t>(block_of_[i])]) continue;
    if (before != nullptr && before->weights_[i].data.defined()) {
      copies[i].data = before->weights_[i].data;
      continue;
    }
    if (stop.stop_requested()) {
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED",
                       "cancelled while moving weights to a device");
    }
    at::Tensor& copy = tied[weight.data.const_data_ptr()];
    if (!copy.defined() || copy.sizes() != weight.data.sizes()) {
      ASSIGN_OR_RETURN(copy, CopyTensorTo(weight.data, device));
    }
    copies[i].data = copy;
  }
  RETURN_IF_ERROR(Check());  // what was copied out of a mapping that was cut short meanwhile is no weight
  return std::make_shared<const WeightSet>(layout_, std::move(copies));
}

}  // namespace latentd
