// Encoded prompts: what a denoiser is conditioned on. Always in host memory, wherever the encoder ran.
#ifndef LATENTD_FAMILIES_CONDITIONING_H_
#define LATENTD_FAMILIES_CONDITIONING_H_

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "cache/resource.h"

namespace latentd {

// Of one generation. Keys are the family's own ("t5", "pooled", "neg.t5", …).
using Conditioning = std::map<std::string, at::Tensor>;

inline int64_t ConditioningBytesOf(const Conditioning& conditioning) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : conditioning) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

// What one text encoder made of one request's prompts, as a record of the cache.
class ConditioningRecord : public Resource {
 public:
  explicit ConditioningRecord(Conditioning tensors)
      : tensors_(std::move(tensors)), bytes_(ConditioningBytesOf(tensors_)) {}

  const Conditioning& tensors() const { return tensors_; }
  int64_t bytes() const override { return bytes_; }

  // The denoiser takes it to its device itself: it is small, and read once.
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device&, const std::vector<bool>&, const Resource*,
                                                         std::stop_token) const override {
    return absl::UnimplementedError("conditioning stays in host memory");
  }

 private:
  const Conditioning tensors_;
  const int64_t bytes_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_CONDITIONING_H_
