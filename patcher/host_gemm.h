// Products of matrices in fp32 in host memory, by the library that is the fastest one on this processor. ATen
// takes MKL's for all that it does, which uses AVX2 alone on processors that are not Intel's; oneDNN's, which
// is in LibTorch too, uses AVX-512 there, for twice the speed. Where MKL uses it itself there is nothing to
// be gained.
//
// The two round differently, so which one is used is a matter of the processor and of the config, never of a
// measurement: equal requests give equal bytes across restarts. Attention is ATen's, and so MKL's, in either
// case. Any thread, but for SetHostGemm.
#ifndef LATENTD_PATCHER_HOST_GEMM_H_
#define LATENTD_PATCHER_HOST_GEMM_H_

#include <optional>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"

namespace latentd {

enum class HostGemm { kMkl, kOneDnn };

absl::string_view HostGemmName(HostGemm gemm);  // "mkl", "onednn"

// The faster one here: oneDNN's on AMD's processors with AVX-512. What the environment variable
// LATENTD_CPU_GEMM says, where it is set.
HostGemm BestHostGemm();

// For the process; BestHostGemm until it is set. Before anything is computed.
void SetHostGemm(HostGemm gemm);
HostGemm UsedHostGemm();

// x·Wᵀ + b, as at::linear, of which it takes all that is not fp32 in host memory.
at::Tensor HostLinear(const at::Tensor& x, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias = std::nullopt);

// y += a·bᵀ, for y [m, n], a [m, k], b [n, k].
void HostAddProduct(at::Tensor& y, const at::Tensor& a, const at::Tensor& b);

// out[i] = a[i]·b[i]ᵀ, for out [count, m, n], a [count, m, k], b [count, n, k].
void HostProducts(at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

}  // namespace latentd

#endif  // LATENTD_PATCHER_HOST_GEMM_H_
