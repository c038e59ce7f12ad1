// Element-wise passes that ATen has no single operator for, over plain fp32 arrays in host memory.
//
// Each is compiled for several instruction sets; the best one that the processor has is chosen once. Rows
// are independent of each other, so a caller may share them out to threads without changing a bit.
#ifndef LATENTD_FAMILIES_NN_KERNELS_H_
#define LATENTD_FAMILIES_NN_KERNELS_H_

#include <cstdint>

namespace latentd {

// Elements below which a second thread costs more than it saves.
inline constexpr int64_t kKernelGrain = 32768;

// y[i] = x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³))), to 2e-7 of |x|. x and y may be one array.
// Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
void GeluTanhKernel(const float* x, float* y, int64_t n);

// For each of tokens × heads vectors of `dim`: x · rsqrt(mean(x²) + eps) · weight, then turned in pairs by
// the token's angles. rope: [tokens, dim / 2] pairs (cos, sin). x and y: [tokens, heads, dim]; may be one
// array. REQUIRES: dim is even.
void NormRopeKernel(const float* x, const float* weight, const float* rope, float* y, int64_t tokens,
                    int64_t heads, int64_t dim, float eps);

// y = a · b/2·(1 + erf(b/√2)) for rows [a | b] of x [rows, 2·dim], to 3e-7 of |a·b|. y: [rows, dim]; not x.
// Shazeer 2020, "GLU Variants Improve Transformer".
void GatedGeluKernel(const float* x, float* y, int64_t rows, int64_t dim);

// Per channel, the sum over places and that of squares: x [places, channels] → [channels] each. In fp32: take
// no more than some hundreds of places at a time.
void ChannelSumsKernel(const float* x, int64_t places, int64_t channels, float* sums, float* squares);

// y = x · scale + shift per channel, and SiLU of that with `silu`. x and y: [places, channels]; may be one
// array.
void ScaleShiftKernel(const float* x, const float* scale, const float* shift, float* y, int64_t places,
                      int64_t channels, bool silu);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_NN_KERNELS_H_
