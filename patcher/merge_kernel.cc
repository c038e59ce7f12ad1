#include "patcher/merge_kernel.h"

#include <algorithm>
#include <bit>

#include "cache/kernel_targets.h"

// Built with -O3, without which the compiler would use no vectors.

namespace latentd {
namespace {

// Sums of so many rows and columns at a time stay in the first cache, and what they need of `down` is read once for all
// of the rows.
constexpr int64_t kRows = 4, kColumns = 256;

LATENTD_INLINE float ToFloat(float value) { return value; }
LATENTD_INLINE float ToFloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

LATENTD_INLINE void Store(float value, float* out) { *out = value; }
LATENTD_INLINE void Store(float value, uint16_t* out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  *out = static_cast<uint16_t>(value != value ? 0x7fc0U : rounded);
}

template <class T>
LATENTD_INLINE void Merge(const T* weight, const float* up, const float* down, T* out, int64_t rows, int64_t columns,
                          int64_t rank) {
  float sums[kRows][kColumns];
  for (int64_t row = 0; row < rows; row += kRows) {
    const int64_t height = std::min(kRows, rows - row);
    for (int64_t column = 0; column < columns; column += kColumns) {
      const int64_t width = std::min(kColumns, columns - column);
      for (int64_t r = 0; r < height; ++r) {
        const T* from = weight + (row + r) * columns + column;
        for (int64_t i = 0; i < width; ++i) sums[r][i] = ToFloat(from[i]);
      }
      for (int64_t k = 0; k < rank; ++k) {
        const float* d = down + k * columns + column;
        for (int64_t r = 0; r < height; ++r) {
          const float u = up[(row + r) * rank + k];
          for (int64_t i = 0; i < width; ++i) sums[r][i] += u * d[i];
        }
      }
      for (int64_t r = 0; r < height; ++r) {
        T* to = out + (row + r) * columns + column;
        for (int64_t i = 0; i < width; ++i) Store(sums[r][i], to + i);
      }
    }
  }
}

template <class T>
LATENTD_AVX512 void MergeAvx512(const T* weight, const float* up, const float* down, T* out, int64_t rows,
                                int64_t columns, int64_t rank) {
  Merge(weight, up, down, out, rows, columns, rank);
}
template <class T>
LATENTD_AVX2 void MergeAvx2(const T* weight, const float* up, const float* down, T* out, int64_t rows, int64_t columns,
                            int64_t rank) {
  Merge(weight, up, down, out, rows, columns, rank);
}

template <class T>
void MergeBest(const T* weight, const float* up, const float* down, T* out, int64_t rows, int64_t columns,
               int64_t rank) {
  switch (BestInstructionSet()) {
    case InstructionSet::kAvx512:
      return MergeAvx512(weight, up, down, out, rows, columns, rank);
    case InstructionSet::kAvx2:
      return MergeAvx2(weight, up, down, out, rows, columns, rank);
    case InstructionSet::kBaseline:
      return Merge(weight, up, down, out, rows, columns, rank);
  }
}

}  // namespace

void MergeFloatRows(const float* weight, const float* up, const float* down, float* out, int64_t rows, int64_t columns,
                    int64_t rank) {
  MergeBest(weight, up, down, out, rows, columns, rank);
}

void MergeBFloat16Rows(const uint16_t* weight, const float* up, const float* down, uint16_t* out, int64_t rows,
                       int64_t columns, int64_t rank) {
  MergeBest(weight, up, down, out, rows, columns, rank);
}

}  // namespace latentd
