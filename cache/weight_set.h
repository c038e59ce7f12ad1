// The weights of one component in memory: immutable, named by the Slots of a ComponentLayout.
#ifndef LATENTD_CACHE_WEIGHT_SET_H_
#define LATENTD_CACHE_WEIGHT_SET_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "cache/component_layout.h"
#include "cache/resource.h"

namespace latentd {

// How the numbers of a weight are stored. Code asks the weight; nobody passes a flag along.
enum class StorageForm {
  kPlain,  // `data` is the tensor, in fp32, fp16 or bf16
};

// Kernels take another path below this alignment, which can change the last bits of a result. What computes
// keeps to it, whichever way a tensor got into memory; safetensors files promise 8 bytes only.
inline constexpr int64_t kTensorAlignment = 16;
inline bool IsComputeAligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kTensorAlignment == 0;
}

struct Weight {
  at::Tensor data;
  StorageForm form = StorageForm::kPlain;
};

// Immutable; read from any thread. Tensors may alias a file mapping, which they keep alive, and then lie
// where the file has them: see IsComputeAligned.
class WeightSet : public Resource {
 public:
  // Lets a WeightSet say whether the file behind it can still be trusted; see MappedFile.
  using Checker = std::function<absl::Status()>;

  // REQUIRES: one weight for each tensor of `layout`, of its shape.
  WeightSet(std::shared_ptr<const ComponentLayout> layout, std::vector<Weight> weights, Checker checker = {});

  const ComponentLayout& layout() const { return *layout_; }
  const std::shared_ptr<const ComponentLayout>& shared_layout() const { return layout_; }
  const Weight& operator[](Slot slot) const { return weights_[static_cast<size_t>(slot.index)]; }

  int64_t bytes() const override { return bytes_; }
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device& device, std::stop_token stop) const override;
  absl::Status Check() const override { return checker_ ? checker_() : absl::OkStatus(); }

 private:
  std::shared_ptr<const ComponentLayout> layout_;
  std::vector<Weight> weights_;
  Checker checker_;
  int64_t bytes_ = 0;
};

// A copy of `tensor` in `device`'s memory. Accounting is the caller's.
absl::StatusOr<at::Tensor> CopyTensorTo(const at::Tensor& tensor, Device& device);

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHT_SET_H_
