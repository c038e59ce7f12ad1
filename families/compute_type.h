// What networks compute in: apart from what weights are stored in, and by device. fp32 on CPUs, whose kernels
// are as exact as they are fast there; bf16 on GPUs, where fp32 takes twice the memory and many times the
// time, with the parts in fp32 that diffusers keeps so (sinusoids of times, rotary angles, T5's norms,
// softmax and norms as ATen does them, latents and all that samplers do). fp16 where a GPU has no bf16, but
// for VAEs and T5, whose activations leave its range.
//
// Pictures depend on it, so what conditioning and measurements are kept under has it, and reports name it.
// Pure functions; any thread.
#ifndef LATENTD_FAMILIES_COMPUTE_TYPE_H_
#define LATENTD_FAMILIES_COMPUTE_TYPE_H_

#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cache/device.h"

namespace latentd {

enum class ComputeType { kFp32, kBf16, kFp16 };

absl::string_view ComputeTypeName(ComputeType type);  // "fp32"
at::ScalarType ScalarTypeOf(ComputeType type);

// `setting`: of the config, "auto", "fp32", "bf16" or "fp16". Of a component that `leaves_fp16`
// (Component::leaves_fp16), fp16 comes to fp32.
ComputeType ComputeTypeFor(absl::string_view setting, const Device& device, bool leaves_fp16);

// Whose products of matrices networks use on a device: "cublas" on GPUs, else UsedHostGemm's.
absl::string_view GemmName(const Device& device);

// Whether devices can compute in what the config asks for. Errors: FAILED_PRECONDITION UNSUPPORTED_COMPUTE.
absl::Status CheckComputeSetting(absl::string_view setting, const Device& device);

// How computing on GPUs is set, for the process, so that equal requests give equal bytes: no TF32 in place of
// fp32, cuDNN's algorithms by rule and not by a race between them, those that add in one order; attention by
// the flash and memory-efficient kernels, not by cuDNN's. Once, before the first slice.
void SetTorchForGpus();

}  // namespace latentd

#endif  // LATENTD_FAMILIES_COMPUTE_TYPE_H_
