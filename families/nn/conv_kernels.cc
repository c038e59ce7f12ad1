#include "families/nn/conv_kernels.h"

#include <algorithm>
#include <cstring>

#include "cache/kernel_targets.h"

namespace latentd {
namespace {

constexpr int64_t kPatch = 6;  // side of what a tile is made of

// Vectors as the compilers know them: one of another set than the target's is taken apart, so all code is
// written once, with the set's own width.
template <int kBytes>
struct Lanes {
  typedef float V __attribute__((vector_size(kBytes)));
  static constexpr int64_t kCount = kBytes / static_cast<int>(sizeof(float));
};

template <class V>
LATENTD_INLINE V Load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <class V>
LATENTD_INLINE void Store(float* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

// One side of Bᵀ·d·B.
template <class V>
LATENTD_INLINE void InputSide(const V d[6], V t[6]) {
  const V a = d[4] - 4.0f * d[2], b = d[3] - 4.0f * d[1];
  const V c = d[4] - d[2], e = 2.0f * (d[3] - d[1]);
  t[0] = 4.0f * d[0] - 5.0f * d[2] + d[4];
  t[1] = a + b;
  t[2] = a - b;
  t[3] = c + e;
  t[4] = c - e;
  t[5] = 4.0f * d[1] - 5.0f * d[3] + d[5];
}

// One side of Aᵀ·m·A.
template <class V>
LATENTD_INLINE void OutputSide(const V m[6], V t[4]) {
  const V a = m[1] + m[2], b = m[1] - m[2], c = m[3] + m[4], d = m[3] - m[4];
  t[0] = m[0] + a + c;
  t[1] = b + 2.0f * d;
  t[2] = a + 4.0f * c;
  t[3] = b + 8.0f * d + m[5];
}

// One side of G·g·Gᵀ.
template <class V>
LATENTD_INLINE void WeightSide(const V g[3], V t[6]) {
  const V a = (g[0] + g[2]) * (-1.0f / 6), b = g[1] * (1.0f / 6);
  const V c = g[0] * (1.0f / 24) + g[2] * (1.0f / 6), d = g[1] * (1.0f / 12);
  t[0] = 0.25f * g[0];
  t[1] = a - b;
  t[2] = a + b;
  t[3] = c + d;
  t[4] = c - d;
  t[5] = g[2];
}

struct Corner {
  int64_t map, top, left;  // of a tile's result
};

LATENTD_INLINE Corner CornerOf(const TileGrid& grid, int64_t tile) {
  const int64_t columns = grid.columns(), per_map = grid.rows() * columns, place = tile % per_map;
  return {tile / per_map, place / columns * kTileSide, place % columns * kTileSide};
}

template <int kBytes>
LATENTD_INLINE void Input(const float* x, const TileGrid& grid, int64_t channels, int64_t first,
                          int64_t count, float* spectra, int64_t spectrum) {
  using V = typename Lanes<kBytes>::V;
  static constexpr float kZeros[kConvLanes] = {};
  for (int64_t tile = first; tile < first + count; ++tile, spectra += channels) {
    const Corner corner = CornerOf(grid, tile);
    const float* map = x + corner.map * grid.height * grid.width * channels;
    const float* places[kPatch][kPatch];
    int64_t steps[kPatch][kPatch];  // 1, or 0 where the place is outside
    for (int64_t r = 0; r < kPatch; ++r) {
      for (int64_t s = 0; s < kPatch; ++s) {
        const int64_t row = corner.top + r - 1, column = corner.left + s - 1;
        const bool inside = row >= 0 && row < grid.height && column >= 0 && column < grid.width;
        places[r][s] = inside ? map + (row * grid.width + column) * channels : kZeros;
        steps[r][s] = inside ? 1 : 0;
      }
    }
    for (int64_t c = 0; c < channels; c += Lanes<kBytes>::kCount) {
      V half[kPatch][kPatch];
#pragma GCC unroll 6
      for (int s = 0; s < kPatch; ++s) {
        V d[6], t[6];
#pragma GCC unroll 6
        for (int r = 0; r < kPatch; ++r) d[r] = Load<V>(places[r][s] + c * steps[r][s]);
        InputSide(d, t);
#pragma GCC unroll 6
        for (int r = 0; r < kPatch; ++r) half[r][s] = t[r];
      }
#pragma GCC unroll 6
      for (int r = 0; r < kPatch; ++r) {
        V t[6];
        InputSide(half[r], t);
#pragma GCC unroll 6
        for (int s = 0; s < kPatch; ++s) Store(spectra + (r * kPatch + s) * spectrum + c, t[s]);
      }
    }
  }
}

template <int kBytes>
LATENTD_INLINE void Weight(const float* weight, int64_t out, int64_t in, float* spectra, int64_t spectrum) {
  using V = typename Lanes<kBytes>::V;
  constexpr int64_t kCount = Lanes<kBytes>::kCount;
  for (int64_t row = 0; row < out; ++row, spectra += in) {
    for (int64_t c = 0; c < in; c += kCount, weight += 9 * kCount) {
      float by_tap[9][kCount];
      for (int64_t lane = 0; lane < kCount; ++lane) {
#pragma GCC unroll 9
        for (int tap = 0; tap < 9; ++tap) by_tap[tap][lane] = weight[lane * 9 + tap];
      }
      V half[kPatch][3];
#pragma GCC unroll 3
      for (int s = 0; s < 3; ++s) {
        const V g[3] = {Load<V>(by_tap[s]), Load<V>(by_tap[3 + s]), Load<V>(by_tap[6 + s])};
        V t[6];
        WeightSide(g, t);
#pragma GCC unroll 6
        for (int r = 0; r < kPatch; ++r) half[r][s] = t[r];
      }
#pragma GCC unroll 6
      for (int r = 0; r < kPatch; ++r) {
        V t[6];
        WeightSide(half[r], t);
#pragma GCC unroll 6
        for (int s = 0; s < kPatch; ++s) Store(spectra + (r * kPatch + s) * spectrum + c, t[s]);
      }
    }
  }
}

template <int kBytes>
LATENTD_INLINE void Output(const float* spectra, int64_t spectrum, const float* bias, const TileGrid& grid,
                           int64_t channels, int64_t first, int64_t count, float* y, int64_t stride) {
  using V = typename Lanes<kBytes>::V;
  for (int64_t tile = first; tile < first + count; ++tile, spectra += channels) {
    const Corner corner = CornerOf(grid, tile);
    float* result = y + ((corner.map * grid.height + corner.top) * grid.width + corner.left) * stride;
    const int64_t rows = std::min(kTileSide, grid.height - corner.top);
    const int64_t columns = std::min(kTileSide, grid.width - corner.left);
    for (int64_t c = 0; c < channels; c += Lanes<kBytes>::kCount) {
      const V added = Load<V>(bias + c);
      V half[kTileSide][kPatch];
#pragma GCC unroll 6
      for (int s = 0; s < kPatch; ++s) {
        V m[6], t[4];
#pragma GCC unroll 6
        for (int r = 0; r < kPatch; ++r) m[r] = Load<V>(spectra + (r * kPatch + s) * spectrum + c);
        OutputSide(m, t);
#pragma GCC unroll 4
        for (int r = 0; r < kTileSide; ++r) half[r][s] = t[r];
      }
      for (int64_t r = 0; r < rows; ++r) {
        V t[4];
        OutputSide(half[r], t);
        for (int64_t s = 0; s < columns; ++s) Store(result + (r * grid.width + s) * stride + c, t[s] + added);
      }
    }
  }
}

LATENTD_INLINE void Windows(const float* x, int64_t height, int64_t width, int64_t channels, int64_t stride,
                            int64_t first, int64_t count, float* rows) {
  static constexpr float kZero = 0;
  const int64_t out_width = (width - 1) / stride + 1, out_height = (height - 1) / stride + 1;
  for (int64_t place = first; place < first + count; ++place, rows += channels * 9) {
    const int64_t map = place / (out_width * out_height);
    const int64_t top = place / out_width % out_height * stride - 1, left = place % out_width * stride - 1;
    const float* taps[9];
    int64_t steps[9];
    for (int64_t tap = 0; tap < 9; ++tap) {
      const int64_t row = top + tap / 3, column = left + tap % 3;
      const bool inside = row >= 0 && row < height && column >= 0 && column < width;
      taps[tap] = inside ? x + ((map * height + row) * width + column) * channels : &kZero;
      steps[tap] = inside ? 1 : 0;
    }
    for (int64_t c = 0; c < channels; ++c) {
#pragma GCC unroll 9
      for (int tap = 0; tap < 9; ++tap) rows[c * 9 + tap] = taps[tap][c * steps[tap]];
    }
  }
}

#define LATENTD_FOR_EACH_SET(name, parameters, arguments)             \
  LATENTD_AVX2 void name##Avx2 parameters { name<32> arguments; }     \
  LATENTD_AVX512 void name##Avx512 parameters { name<64> arguments; } \
  void name##Best parameters {                                        \
    switch (BestInstructionSet()) {                                   \
      case InstructionSet::kAvx512:                                   \
        return name##Avx512 arguments;                                \
      case InstructionSet::kAvx2:                                     \
        return name##Avx2 arguments;                                  \
      case InstructionSet::kBaseline:                                 \
        return name<16> arguments;                                    \
    }                                                                 \
  }

LATENTD_FOR_EACH_SET(Input,
                     (const float* x, const TileGrid& grid, int64_t channels, int64_t first, int64_t count,
                      float* spectra, int64_t spectrum),
                     (x, grid, channels, first, count, spectra, spectrum))
LATENTD_FOR_EACH_SET(Weight, (const float* weight, int64_t out, int64_t in, float* spectra, int64_t spectrum),
                     (weight, out, in, spectra, spectrum))
LATENTD_FOR_EACH_SET(Output,
                     (const float* spectra, int64_t spectrum, const float* bias, const TileGrid& grid,
                      int64_t channels, int64_t first, int64_t count, float* y, int64_t stride),
                     (spectra, spectrum, bias, grid, channels, first, count, y, stride))
#undef LATENTD_FOR_EACH_SET

}  // namespace

void WinogradInputKernel(const float* x, const TileGrid& grid, int64_t channels, int64_t first, int64_t count,
                         float* spectra, int64_t spectrum) {
  InputBest(x, grid, channels, first, count, spectra, spectrum);
}

void WinogradWeightKernel(const float* weight, int64_t out, int64_t in, float* spectra, int64_t spectrum) {
  WeightBest(weight, out, in, spectra, spectrum);
}

void WinogradOutputKernel(const float* spectra, int64_t spectrum, const float* bias, const TileGrid& grid,
                          int64_t channels, int64_t first, int64_t count, float* y, int64_t stride) {
  OutputBest(spectra, spectrum, bias, grid, channels, first, count, y, stride);
}

void WindowsKernel(const float* x, int64_t height, int64_t width, int64_t channels, int64_t stride,
                   int64_t first, int64_t count, float* rows) {
  Windows(x, height, width, channels, stride, first, count, rows);
}

}  // namespace latentd
