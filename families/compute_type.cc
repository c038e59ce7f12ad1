#include "families/compute_type.h"

#include "ATen/Context.h"
#include "ATen/Version.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "patcher/host_gemm.h"

namespace latentd {
namespace {

// Products of bf16 in one instruction; with AMX comes AVX512_BF16. LibTorch can be told to use less than
// there is (ATEN_CPU_CAPABILITY).
bool HostHasBf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0 && absl::StartsWith(at::get_cpu_capability(), "AVX512");
#else
  return false;
#endif
}

}  // namespace

absl::string_view ComputeTypeName(ComputeType type) {
  switch (type) {
    case ComputeType::kFp32:
      return "fp32";
    case ComputeType::kBf16:
      return "bf16";
    case ComputeType::kFp16:
      return "fp16";
  }
  return "";
}

at::ScalarType ScalarTypeOf(ComputeType type) {
  switch (type) {
    case ComputeType::kFp32:
      return at::kFloat;
    case ComputeType::kBf16:
      return at::kBFloat16;
    case ComputeType::kFp16:
      return at::kHalf;
  }
  return at::kFloat;
}

ComputeType ComputeTypeFor(absl::string_view setting, const Device& device, bool leaves_fp16) {
  ComputeType type = ComputeType::kFp32;
  if (setting == "bf16") type = ComputeType::kBf16;
  if (setting == "fp16") type = ComputeType::kFp16;
  if (setting == "auto" && device.kind() == DeviceKind::kCuda) {
    type = device.computes_bf16() ? ComputeType::kBf16 : ComputeType::kFp16;
  }
  if (type == ComputeType::kFp16 && leaves_fp16) return ComputeType::kFp32;
  return type;
}

absl::Status CheckComputeSetting(absl::string_view setting, const Device& device) {
  const bool host = device.kind() != DeviceKind::kCuda;
  std::string why;
  if (setting == "fp16" && host) why = "CPUs have no fast fp16; use bf16 or fp32";
  if (setting == "bf16" && host && !HostHasBf16()) why = "this CPU has no AVX512_BF16; use fp32";
  if (setting == "bf16" && !host && !device.computes_bf16()) why = "this GPU has no bf16; use fp16 or auto";
  if (why.empty()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_COMPUTE",
                   absl::StrCat("compute = ", setting, " on ", device.name(), ": ", why),
                   {{"device", device.name()}, {"compute", std::string(setting)}});
}

absl::string_view GemmName(const Device& device) {
  return device.kind() == DeviceKind::kCuda ? "cublas" : HostGemmName(UsedHostGemm());
}

void SetTorchForGpus() {
  at::Context& context = at::globalContext();
  context.setAllowTF32CuBLAS(false);
  context.setAllowTF32CuDNN(false);
  context.setBenchmarkCuDNN(false);
  context.setDeterministicCuDNN(true);
  context.setAllowFP16ReductionCuBLAS(false);
  context.setAllowBF16ReductionCuBLAS(false);
  context.setSDPUseCuDNN(false);
  context.setSDPUseFlash(true);
  context.setSDPUseMemEfficient(true);
  context.setSDPUseMath(true);
}

}  // namespace latentd
