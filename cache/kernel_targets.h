// For sources of plain loops that are compiled for several instruction sets, of which the best one that the
// processor has is chosen at run time. The loops are always-inlined functions, and a wrapper for each set has
// the set as an attribute. Included by such sources alone.
#ifndef LATENTD_CACHE_KERNEL_TARGETS_H_
#define LATENTD_CACHE_KERNEL_TARGETS_H_

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#define LATENTD_INLINE __attribute__((always_inline)) inline

#if defined(__x86_64__)
#define LATENTD_AVX2 __attribute__((target("avx2,fma")))
#ifdef __clang__
#define LATENTD_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma")))
#else
#define LATENTD_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#endif
#else
#define LATENTD_AVX2
#define LATENTD_AVX512
#endif

namespace latentd {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// The best one that this processor has; none better than LATENTD_INSTRUCTION_SET where that environment
// variable is "baseline" or "avx2", so that tests reach each of them.
inline InstructionSet BestInstructionSet() {
#if defined(__x86_64__)
  static const InstructionSet best = [] {
    const char* variable = std::getenv("LATENTD_INSTRUCTION_SET");
    const std::string_view limit = variable == nullptr ? "" : variable;
    __builtin_cpu_init();
    if (limit == "baseline") return InstructionSet::kBaseline;
    if (limit != "avx2" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      return InstructionSet::kAvx512;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? InstructionSet::kAvx2
                                                                           : InstructionSet::kBaseline;
  }();
  return best;
#else
  return InstructionSet::kBaseline;
#endif
}

// e^x: x = n·ln 2 + r, a polynomial for e^r, n into the exponent. Coefficients: Cephes, expf. 1 ulp or so.
LATENTD_INLINE float KernelExp(float x) {
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

}  // namespace latentd

#endif  // LATENTD_CACHE_KERNEL_TARGETS_H_
