// The weights of one component in memory: immutable, named by the Slots of a ComponentLayout.
#ifndef LATENTD_CACHE_WEIGHTS_WEIGHT_SET_H_
#define LATENTD_CACHE_WEIGHTS_WEIGHT_SET_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "cache/resource.h"
#include "cache/weights/component_layout.h"

namespace latentd {

// How the numbers of a weight are stored. Code asks the weight; nobody passes a flag along.
enum class StorageForm {
  kPlain,   // `data` is the tensor, in fp32, fp16 or bf16
  kFloat8,  // `data` is the tensor in 8-bit floats (e4m3fn, e5m2), to be multiplied with `scale`
};

// Whether patches can be added to such a weight and stored as before. Where not, what can be computed beside
// it is.
inline bool HasDirectPath(StorageForm form) { return form == StorageForm::kPlain; }

// Kernels take another path below this alignment, which can change the last bits of a result. What computes
// keeps to it, whichever way a tensor got into memory; safetensors files promise 8 bytes only.
inline constexpr int64_t kTensorAlignment = 16;
inline bool IsComputeAligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kTensorAlignment == 0;
}

struct Weight {
  at::Tensor data;  // undefined where a set has not all weights of its layout
  StorageForm form = StorageForm::kPlain;
  double scale = 1;

  // The numbers that it stands for. REQUIRES: data is defined. A copy unless it is plain and of that type.
  at::Tensor To(at::ScalarType type) const;
};

// Immutable; read from any thread. Tensors may alias a file mapping, which they keep alive, and then lie
// where the file has them: see IsComputeAligned. A set can have a part of its layout's weights: what is on a
// device of a component that is streamed, or those that patches were merged into.
//
// As a Resource it moves in the blocks of its layout, and one more, the last, for what stays whatever its
// block: vectors, and tensors that several blocks share.
class WeightSet : public Resource {
 public:
  // Lets a WeightSet say whether the file behind it can still be trusted; see MappedFile.
  using Checker = std::function<absl::Status()>;

  // REQUIRES: one weight for each tensor of `layout`, of its shape or undefined.
  WeightSet(std::shared_ptr<const ComponentLayout> layout, std::vector<Weight> weights, Checker checker = {});

  // Weights that take the place of some of `base`'s: each moves with the block that the one it stands for
  // moves with. REQUIRES: one for each tensor of the layout, undefined for those that stay as they are.
  WeightSet(const WeightSet& base, std::vector<Weight> instead);

  const ComponentLayout& layout() const { return *layout_; }
  const Weight& operator[](Slot slot) const { return weights_[static_cast<size_t>(slot.index)]; }

  bool has(Slot slot) const { return (*this)[slot].data.defined(); }
  // True when every weight is in a form that patches can be added to.
  bool is_plain() const;

  int64_t bytes() const override { return bytes_; }
  std::vector<ResourceBlock> device_blocks() const override { return blocks_; }
  // The block of device_blocks() that a weight moves with.
  int32_t device_block(Slot slot) const { return block_of_[static_cast<size_t>(slot.index)]; }
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device& device, const std::vector<bool>& resident,
                                                         const Resource* have,
                                                         std::stop_token stop) const override;
  absl::Status Check() const override { return checker_ ? checker_() : absl::OkStatus(); }

 private:
  void CountBytes();

  std::shared_ptr<const ComponentLayout> layout_;
  std::vector<Weight> weights_;
  Checker checker_;
  std::vector<int32_t> block_of_;  // by slot
  std::vector<ResourceBlock> blocks_;
  int64_t bytes_ = 0;
};

// A tensor over memory of `device`, which it keeps alive.
at::Tensor TensorOn(Device& device, std::shared_ptr<void> memory, int64_t offset_bytes, at::IntArrayRef sizes,
                    at::ScalarType type);

// A copy of `tensor` in `device`'s memory. Accounting is the caller's.
absl::StatusOr<at::Tensor> CopyTensorTo(const at::Tensor& tensor, Device& device);

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_WEIGHT_SET_H_
