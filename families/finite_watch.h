// Whether numbers are finite, asked without waiting for a device more often than its results are read anyway.
// A picture of numbers that are not is black, or no picture; it must never pass for one.
#ifndef LATENTD_FAMILIES_FINITE_WATCH_H_
#define LATENTD_FAMILIES_FINITE_WATCH_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cache/base/error.h"

namespace latentd {

// A number on the tensor's device, true where all of `x` is finite. Does not wait for the device.
at::Tensor FiniteFlag(const at::Tensor& x);

// The same, waited for. True for tensors of whole numbers, and undefined ones.
bool IsFinite(const at::Tensor& x);

// FAILED_PRECONDITION NON_FINITE: what `phase` ("encode", "encode_image", "denoise", "decode") made is not
// finite. `where` says more: "step", "picture".
absl::Status NonFinite(absl::string_view phase, const ErrorDetails& where = {});

// Watches the latents of a run. One thread at a time.
class FiniteWatch {
 public:
  // NON_FINITE at once for a tensor in host memory; for others a flag is kept until Check. Steps count from
  // 1, pictures from 0.
  absl::Status Look(int64_t step, int64_t picture, const at::Tensor& latents);

  // NON_FINITE with the first step and picture that Look was given and that was not finite. Waits.
  absl::Status Check() const;

 private:
  struct Flag {
    int64_t step, picture;
    at::Tensor finite;
  };
  std::vector<Flag> flags_;  // of tensors on a device
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_FINITE_WATCH_H_
