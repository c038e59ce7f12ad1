#include "patcher/merge_kernel.h"

#include <cstring>
#include <memory>

#include "cache/kernel_targets.h"

// Built with -O3, without which the compiler would use no vectors.

namespace latentd {
namespace {

// As many floats as a register of an instruction set has; their bits; and their upper halves, a bfloat16
// each.
template <int kLanes>
struct Lanes {
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
  typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
};

template <int kLanes>
LATENTD_INLINE void Load(const float* from, typename Lanes<kLanes>::Floats& value) {
  std::memcpy(&value, from, sizeof(value));
}
template <int kLanes>
LATENTD_INLINE void Load(const uint16_t* from, typename Lanes<kLanes>::Floats& value) {
  typename Lanes<kLanes>::Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  const auto bits = __builtin_convertvector(halves, typename Lanes<kLanes>::Bits) << 16;
  std::memcpy(&value, &bits, sizeof(value));
}

template <int kLanes>
LATENTD_INLINE void Store(const typename Lanes<kLanes>::Floats& value, float* to) {
  std::memcpy(to, &value, sizeof(value));
}
template <int kLanes>
LATENTD_INLINE void Store(const typename Lanes<kLanes>::Floats& value, uint16_t* to) {
  typedef typename Lanes<kLanes>::Bits Bits;
  Bits bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const Bits rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const Bits result = value != value ? Bits{} + 0x7fc0U : rounded;  // not a number stays none
  const auto halves = __builtin_convertvector(result, typename Lanes<kLanes>::Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

// kRows · kColumns · kLanes numbers, whose sums are in registers until they are done. `panel` is the tile's
// share of `down`, [rank, kColumns · kLanes] without gaps.
template <int kLanes, int kRows, int kColumns, class T>
LATENTD_INLINE void MergeTile(const T* weight, const float* up, const float* panel, T* out, int64_t columns,
                              int64_t rank) {
  typedef typename Lanes<kLanes>::Floats Floats;
  Floats sums[kRows][kColumns];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) Load<kLanes>(weight + r * columns + c * kLanes, sums[r][c]);
    // The same columns of the next rows are on their way when they are wanted.
    const auto* next = reinterpret_cast<const char*>(weight + (r + kRows) * columns);
#pragma GCC unroll 4
    for (size_t b = 0; b < sizeof(T) * kColumns * kLanes; b += 64) __builtin_prefetch(next + b);
  }
  for (int64_t k = 0; k < rank; ++k) {
    Floats d[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) Load<kLanes>(panel + (k * kColumns + c) * kLanes, d[c]);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats u = up[r * rank + k] - Floats{};
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sums[r][c] += u * d[c];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) Store<kLanes>(sums[r][c], out + r * columns + c * kLanes);
  }
}

// All columns of kRows rows. A number's sum is the same in each kind of tile.
template <int kLanes, int kRows, int kColumns, class T>
LATENTD_INLINE void MergeRows(const T* weight, const float* up, const float* panels, T* out, int64_t columns,
                              int64_t rank) {
  int64_t c = 0;
  for (; c + kColumns * kLanes <= columns; c += kColumns * kLanes) {
    MergeTile<kLanes, kRows, kColumns>(weight + c, up, panels + c * rank, out + c, columns, rank);
  }
  for (; c + kLanes <= columns; c += kLanes) {
    MergeTile<kLanes, kRows, 1>(weight + c, up, panels + c * rank, out + c, columns, rank);
  }
  for (; c < columns; ++c) MergeTile<1, kRows, 1>(weight + c, up, panels + c * rank, out + c, columns, rank);
}

// `down` tile by tile, in MergeRows' order: rows of a matrix whose width is a power of two meet in few places
// of a cache.
template <int kLanes, int kColumns>
LATENTD_INLINE void Pack(const float* down, float* panels, int64_t columns, int64_t rank) {
  int64_t c = 0;
  for (const int64_t width : {int64_t{kColumns} * kLanes, int64_t{kLanes}, int64_t{1}}) {
    for (; c + width <= columns; c += width) {
      for (int64_t k = 0; k < rank; ++k) {
        std::memcpy(panels + c * rank + k * width, down + k * columns + c, sizeof(float) * width);
      }
    }
  }
}

template <int kLanes, int kColumns, class T>
LATENTD_INLINE void Merge(const T* weight, const float* up, const float* down, T* out, int64_t rows,
                          int64_t columns, int64_t rank) {
  constexpr int kRows = 4;
  const auto panels = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(rank * columns));
  Pack<kLanes, kColumns>(down, panels.get(), columns, rank);
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    MergeRows<kLanes, kRows, kColumns>(weight + r * columns, up + r * rank, panels.get(), out + r * columns,
                                       columns, rank);
  }
  for (; r < rows; ++r) {
    MergeRows<kLanes, 1, kColumns>(weight + r * columns, up + r * rank, panels.get(), out + r * columns,
                                   columns, rank);
  }
}

template <class T>
LATENTD_AVX512 void MergeAvx512(const T* weight, const float* up, const float* down, T* out, int64_t rows,
                                int64_t columns, int64_t rank) {
  Merge<16, 4>(weight, up, down, out, rows, columns, rank);
}
template <class T>
LATENTD_AVX2 void MergeAvx2(const T* weight, const float* up, const float* down, T* out, int64_t rows,
                            int64_t columns, int64_t rank) {
  Merge<8, 2>(weight, up, down, out, rows, columns, rank);
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
      return Merge<4, 2>(weight, up, down, out, rows, columns, rank);
  }
}

}  // namespace

void MergeFloatRows(const float* weight, const float* up, const float* down, float* out, int64_t rows,
                    int64_t columns, int64_t rank) {
  MergeBest(weight, up, down, out, rows, columns, rank);
}

void MergeBFloat16Rows(const uint16_t* weight, const float* up, const float* down, uint16_t* out,
                       int64_t rows, int64_t columns, int64_t rank) {
  MergeBest(weight, up, down, out, rows, columns, rank);
}

}  // namespace latentd
