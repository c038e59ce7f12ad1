#include "families/nn/kernels.h"

#include <bit>
#include <cmath>

// The loops are written once, as always-inlined functions, and compiled once for each instruction set
// inside a wrapper that has the set as an attribute. This file is built with -O3 and leave to reorder sums
// (see CMakeLists.txt), without which the compiler would not use vectors.

#define LATENTD_INLINE __attribute__((always_inline)) inline

namespace latentd {
namespace {

// e^x: x = n·ln 2 + r, a polynomial for e^r, n into the exponent. Coefficients: Cephes, expf. 1 ulp or so.
LATENTD_INLINE float Exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float scaled = x * 1.44269504088896341f;
  const auto n = static_cast<int32_t>(scaled + (scaled < 0 ? -0.5f : 0.5f));
  const auto whole = static_cast<float>(n);
  const float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>((n + 127) << 23);
}

LATENTD_INLINE void Gelu(const float* x, float* y, int64_t n) {
  // 1 + tanh(u) = 2 / (1 + e^(−2u)).
  constexpr float kMinusTwoRoot = -2.0f * 0.7978845608028654f;
  for (int64_t i = 0; i < n; ++i) {
    const float v = x[i];
    const float u = kMinusTwoRoot * (v + 0.044715f * v * v * v);
    y[i] = v / (1.0f + Exp(u));
  }
}

LATENTD_INLINE void NormRope(const float* x, const float* weight, const float* rope, float* y, int64_t tokens,
                             int64_t heads, int64_t dim, float eps) {
  for (int64_t t = 0; t < tokens; ++t, rope += dim) {
    for (int64_t h = 0; h < heads; ++h, x += dim, y += dim) {
      float sum = 0;
      for (int64_t i = 0; i < dim; ++i) sum += x[i] * x[i];
      const float scale = 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
      for (int64_t i = 0; i < dim; i += 2) {
        const float a = x[i] * scale * weight[i], b = x[i + 1] * scale * weight[i + 1];
        y[i] = a * rope[i] - b * rope[i + 1];
        y[i + 1] = a * rope[i + 1] + b * rope[i];
      }
    }
  }
}

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

#if defined(__x86_64__)
#define LATENTD_AVX2 __attribute__((target("avx2,fma")))
#ifdef __clang__
#define LATENTD_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma")))
#else
#define LATENTD_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#endif

InstructionSet Best() {
  static const InstructionSet best = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      return InstructionSet::kAvx512;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? InstructionSet::kAvx2
                                                                           : InstructionSet::kBaseline;
  }();
  return best;
}
#else
#define LATENTD_AVX2
#define LATENTD_AVX512

InstructionSet Best() { return InstructionSet::kBaseline; }
#endif

LATENTD_AVX2 void GeluAvx2(const float* x, float* y, int64_t n) { Gelu(x, y, n); }
LATENTD_AVX512 void GeluAvx512(const float* x, float* y, int64_t n) { Gelu(x, y, n); }

LATENTD_AVX2 void NormRopeAvx2(const float* x, const float* weight, const float* rope, float* y,
                               int64_t tokens, int64_t heads, int64_t dim, float eps) {
  NormRope(x, weight, rope, y, tokens, heads, dim, eps);
}
LATENTD_AVX512 void NormRopeAvx512(const float* x, const float* weight, const float* rope, float* y,
                                   int64_t tokens, int64_t heads, int64_t dim, float eps) {
  NormRope(x, weight, rope, y, tokens, heads, dim, eps);
}

}  // namespace

void GeluTanhKernel(const float* x, float* y, int64_t n) {
  switch (Best()) {
    case InstructionSet::kAvx512:
      return GeluAvx512(x, y, n);
    case InstructionSet::kAvx2:
      return GeluAvx2(x, y, n);
    case InstructionSet::kBaseline:
      return Gelu(x, y, n);
  }
}

void NormRopeKernel(const float* x, const float* weight, const float* rope, float* y, int64_t tokens,
                    int64_t heads, int64_t dim, float eps) {
  switch (Best()) {
    case InstructionSet::kAvx512:
      return NormRopeAvx512(x, weight, rope, y, tokens, heads, dim, eps);
    case InstructionSet::kAvx2:
      return NormRopeAvx2(x, weight, rope, y, tokens, heads, dim, eps);
    case InstructionSet::kBaseline:
      return NormRope(x, weight, rope, y, tokens, heads, dim, eps);
  }
}

}  // namespace latentd
