#include "patcher/host_gemm.h"

#include <atomic>
#include <cstdlib>

#include "ATen/ATen.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/strings/str_cat.h"
#include "cache/kernel_targets.h"

namespace latentd {
namespace {

bool IsAmd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

std::atomic<HostGemm>& Used() {
  static std::atomic<HostGemm> used = BestHostGemm();
  return used;
}

bool TakesOneDnn(const at::Tensor& a, const at::Tensor& b) {
  return UsedHostGemm() == HostGemm::kOneDnn && a.is_cpu() && b.is_cpu() && a.scalar_type() == at::kFloat &&
         b.scalar_type() == at::kFloat && a.numel() > 0 && b.numel() > 0;
}

// An operator of LibTorch's that has no function of its own in its headers.
at::Tensor OneDnnLinear(const at::Tensor& x, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias) {
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, c10::string_view,
                 c10::List<std::optional<at::Scalar>>, std::optional<c10::string_view>);
  static const auto linear =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Signature>();
  return linear.call(x.contiguous(), weight.contiguous(), bias, "none",
                     c10::List<std::optional<at::Scalar>>(), "");
}

}  // namespace

absl::string_view HostGemmName(HostGemm gemm) { return gemm == HostGemm::kMkl ? "mkl" : "onednn"; }

HostGemm BestHostGemm() {
  // For tests, which want to reach both.
  const char* variable = std::getenv("LATENTD_CPU_GEMM");
  if (const absl::string_view wanted = variable == nullptr ? "" : variable; !wanted.empty())
    return wanted == "onednn" ? HostGemm::kOneDnn : HostGemm::kMkl;
  return IsAmd() && BestInstructionSet() == InstructionSet::kAvx512 ? HostGemm::kOneDnn : HostGemm::kMkl;
}

void SetHostGemm(HostGemm gemm) { Used() = gemm; }
HostGemm UsedHostGemm() { return Used(); }

at::Tensor HostLinear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (TakesOneDnn(x, weight)) return OneDnnLinear(x, weight, bias);
  return bias ? at::linear(x, weight, *bias) : at::linear(x, weight);
}

void HostAddProduct(at::Tensor& y, const at::Tensor& a, const at::Tensor& b) {
  if (TakesOneDnn(a, b)) {
    y.add_(OneDnnLinear(a, b, std::nullopt));
  } else {
    y.addmm_(a, b.t());
  }
}

void HostProducts(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  if (!TakesOneDnn(a, b)) {
    at::bmm_out(out, a, b.transpose(1, 2));
    return;
  }
  for (int64_t i = 0; i < a.size(0); ++i) out[i].copy_(OneDnnLinear(a[i], b[i], std::nullopt));
}

}  // namespace latentd
