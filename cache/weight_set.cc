#include "cache/weight_set.h"

#include <map>
#include <unordered_set>

#include "ATen/ATen.h"
#include "cache/device.h"
#include "cache/error.h"

namespace latentd {

WeightSet::WeightSet(std::shared_ptr<const ComponentLayout> layout, std::vector<Weight> weights, Checker checker)
    : layout_(std::move(layout)), weights_(std::move(weights)), checker_(std::move(checker)) {
  // Tied tensors share their memory and count once. Row ranges of one fused tensor differ in address.
  std::unordered_set<const void*> seen;
  for (const Weight& weight : weights_) {
    if (seen.insert(weight.data.const_data_ptr()).second) bytes_ += static_cast<int64_t>(weight.data.nbytes());
  }
}

absl::StatusOr<at::Tensor> CopyTensorTo(const at::Tensor& tensor, Device& device) {
  const at::Tensor from = tensor.contiguous();
  const auto bytes = static_cast<int64_t>(from.nbytes());
  ASSIGN_OR_RETURN(std::shared_ptr<void> memory, device.Allocate(bytes));
  RETURN_IF_ERROR(device.CopyIn(memory.get(), from.const_data_ptr(), bytes));
  void* data = memory.get();
  return at::from_blob(data, from.sizes(), [memory](void*) mutable { memory.reset(); }, from.options());
}

absl::StatusOr<std::shared_ptr<const Resource>> WeightSet::CopyTo(Device& device, std::stop_token stop) const {
  std::vector<Weight> copies;
  copies.reserve(weights_.size());
  std::map<const void*, at::Tensor> tied;
  for (const Weight& weight : weights_) {
    if (stop.stop_requested()) {
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while moving weights to a device");
    }
    at::Tensor& copy = tied[weight.data.const_data_ptr()];
    if (!copy.defined() || copy.sizes() != weight.data.sizes()) {
      ASSIGN_OR_RETURN(copy, CopyTensorTo(weight.data, device));
    }
    copies.push_back({copy, weight.form});
  }
  RETURN_IF_ERROR(Check());  // what was copied out of a mapping that was cut short meanwhile is no weight
  return std::make_shared<const WeightSet>(layout_, std::move(copies));
}

}  // namespace latentd
