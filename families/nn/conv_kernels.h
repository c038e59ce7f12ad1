// The plain loops of a convolution in host memory; nn/host_conv.h says what they are parts of. fp32, channels
// last: a map is [height, width, channels].
//
// Winograd's F(4×4, 3×3): 4×4 places of a result are made of 6×6 places of the input, as 36 products per pair
// of channels instead of 144. Lavin and Gray 2015, "Fast Algorithms for Convolutional Neural Networks",
// section 4. What stands below as "spectrum" is one of the 36 matrices that the products are taken of.
//
// Numbers of channels are multiples of kConvLanes. Each call is one thread's; ranges are independent of each
// other.
#ifndef LATENTD_FAMILIES_NN_CONV_KERNELS_H_
#define LATENTD_FAMILIES_NN_CONV_KERNELS_H_

#include <cstdint>

namespace latentd {

inline constexpr int64_t kConvLanes = 16;
inline constexpr int64_t kTileSide = 4, kSpectra = 36;

// A batch of maps, of which tiles are counted through: those of a row, then rows, then maps.
struct TileGrid {
  int64_t batch = 0, height = 0, width = 0;
  int64_t rows() const { return (height + kTileSide - 1) / kTileSide; }
  int64_t columns() const { return (width + kTileSide - 1) / kTileSide; }
  int64_t tiles() const { return batch * rows() * columns(); }
};

// x [grid, channels] → spectra [36][of tiles][channels], for tiles first … first + count − 1 of the grid.
// Rows of spectra are `channels` apart, spectra are `spectrum` floats apart. Outside of a map are zeros.
void WinogradInputKernel(const float* x, const TileGrid& grid, int64_t channels, int64_t first, int64_t count,
                         float* spectra, int64_t spectrum);

// weight [out, in, 3, 3] → spectra [36][out][in], for `out` rows.
void WinogradWeightKernel(const float* weight, int64_t out, int64_t in, float* spectra, int64_t spectrum);

// Spectra [36][of tiles][channels] → y, plus bias. y is of `stride` channels per place, of which `channels`
// are written.
void WinogradOutputKernel(const float* spectra, int64_t spectrum, const float* bias, const TileGrid& grid,
                          int64_t channels, int64_t first, int64_t count, float* y, int64_t stride);

// x [height, width, channels] → rows [count][channels][3][3] of what a 3×3 window around a place sees, with
// zeros outside; places first … first + count − 1 of a result [.., height', width'] with that stride, counted
// through all maps of a batch.
void WindowsKernel(const float* x, int64_t height, int64_t width, int64_t channels, int64_t stride,
                   int64_t first, int64_t count, float* rows);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_NN_CONV_KERNELS_H_
