#include "families/nn/kernels.h"

#include <cmath>

#include "cache/kernel_targets.h"

// This file is built with -O3 and leave to reorder sums (see CMakeLists.txt), without which the compiler
// would not use vectors.

namespace latentd {
namespace {

LATENTD_INLINE void Gelu(const float* x, float* y, int64_t n) {
  // 1 + tanh(u) = 2 / (1 + e^(−2u)).
  constexpr float kMinusTwoRoot = -2.0f * 0.7978845608028654f;
  for (int64_t i = 0; i < n; ++i) {
    const float v = x[i];
    const float u = kMinusTwoRoot * (v + 0.044715f * v * v * v);
    y[i] = v / (1.0f + KernelExp(u));
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

// x · Φ(x), with an erf that is right to 1.5e-7: Abramowitz and Stegun 1964, 7.1.26.
LATENTD_INLINE float GeluErf(float x) {
  const float z = 0.70710678118654752f * (x < 0 ? -x : x);
  const float t = 1.0f / (1.0f + 0.3275911f * z);
  const float p =
      ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  const float tail = 0.5f * p * KernelExp(-z * z);  // of the normal distribution beyond |x|
  return x * (x < 0 ? tail : 1.0f - tail);
}

LATENTD_INLINE void GatedGelu(const float* x, float* y, int64_t rows, int64_t dim) {
  for (; rows > 0; --rows, x += 2 * dim, y += dim) {
    for (int64_t i = 0; i < dim; ++i) y[i] = x[i] * GeluErf(x[dim + i]);
  }
}

LATENTD_INLINE void ChannelSums(const float* x, int64_t places, int64_t channels, float* __restrict sums,
                                float* __restrict squares) {
  for (int64_t c = 0; c < channels; ++c) sums[c] = squares[c] = 0;
  for (; places > 0; --places, x += channels) {
    for (int64_t c = 0; c < channels; ++c) {
      sums[c] += x[c];
      squares[c] += x[c] * x[c];
    }
  }
}

LATENTD_INLINE void ScaleShift(const float* x, const float* scale, const float* shift, float* y,
                               int64_t places, int64_t channels, bool silu) {
  for (; places > 0; --places, x += channels, y += channels) {
    if (silu) {
      for (int64_t c = 0; c < channels; ++c) {
        const float v = x[c] * scale[c] + shift[c];
        y[c] = v / (1.0f + KernelExp(-v));
      }
    } else {
      for (int64_t c = 0; c < channels; ++c) y[c] = x[c] * scale[c] + shift[c];
    }
  }
}

#define LATENTD_FOR_EACH_SET(name, parameters, arguments)         \
  LATENTD_AVX2 void name##Avx2 parameters { name arguments; }     \
  LATENTD_AVX512 void name##Avx512 parameters { name arguments; } \
  void name##Best parameters {                                    \
    switch (BestInstructionSet()) {                               \
      case InstructionSet::kAvx512:                               \
        return name##Avx512 arguments;                            \
      case InstructionSet::kAvx2:                                 \
        return name##Avx2 arguments;                              \
      case InstructionSet::kBaseline:                             \
        return name arguments;                                    \
    }                                                             \
  }

LATENTD_FOR_EACH_SET(Gelu, (const float* x, float* y, int64_t n), (x, y, n))
LATENTD_FOR_EACH_SET(NormRope,
                     (const float* x, const float* weight, const float* rope, float* y, int64_t tokens,
                      int64_t heads, int64_t dim, float eps),
                     (x, weight, rope, y, tokens, heads, dim, eps))
LATENTD_FOR_EACH_SET(GatedGelu, (const float* x, float* y, int64_t rows, int64_t dim), (x, y, rows, dim))
LATENTD_FOR_EACH_SET(ChannelSums,
                     (const float* x, int64_t places, int64_t channels, float* sums, float* squares),
                     (x, places, channels, sums, squares))
LATENTD_FOR_EACH_SET(ScaleShift,
                     (const float* x, const float* scale, const float* shift, float* y, int64_t places,
                      int64_t channels, bool silu),
                     (x, scale, shift, y, places, channels, silu))
#undef LATENTD_FOR_EACH_SET

}  // namespace

void GeluTanhKernel(const float* x, float* y, int64_t n) { GeluBest(x, y, n); }

void NormRopeKernel(const float* x, const float* weight, const float* rope, float* y, int64_t tokens,
                    int64_t heads, int64_t dim, float eps) {
  NormRopeBest(x, weight, rope, y, tokens, heads, dim, eps);
}

void GatedGeluKernel(const float* x, float* y, int64_t rows, int64_t dim) { GatedGeluBest(x, y, rows, dim); }

void ChannelSumsKernel(const float* x, int64_t places, int64_t channels, float* sums, float* squares) {
  ChannelSumsBest(x, places, channels, sums, squares);
}

void ScaleShiftKernel(const float* x, const float* scale, const float* shift, float* y, int64_t places,
                      int64_t channels, bool silu) {
  ScaleShiftBest(x, scale, shift, y, places, channels, silu);
}

}  // namespace latentd
