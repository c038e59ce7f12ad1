#include "families/nn/host_conv.h"

#include <algorithm>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "families/nn/conv_kernels.h"
#include "patcher/host_gemm.h"

namespace latentd {
namespace {

// Floats that spectra of input and result, and of weights, may have at a time. What is larger is taken in
// parts: tiles, and channels of the result.
constexpr int64_t kTileFloats = 12 << 20, kWeightFloats = 16 << 20;
constexpr int64_t kMinTiles = 128;  // of a part: with fewer, the weights are packed too often
constexpr int64_t kMinColumns = 64;

constexpr int64_t kWinogradTiles = 64;  // fewer: spectra of weights cost more than what they save
constexpr int64_t kWindowsPlaces = 1024;
constexpr int64_t kWindowsChannels = 256;

// Of the result.
int64_t Places(const HostConvShape& shape) {
  return shape.batch * ((shape.height - 1) / shape.stride + 1) * ((shape.width - 1) / shape.stride + 1);
}

struct Parts {
  int64_t tiles, columns;
};

Parts Divide(int64_t tiles, int64_t in, int64_t out) {
  const int64_t columns =
      std::min(out, std::max(kMinColumns, kWeightFloats / (kSpectra * in) / kConvLanes * kConvLanes));
  const int64_t most = std::max(kMinTiles, kTileFloats / (kSpectra * (in + columns)));
  const int64_t count = (tiles + most - 1) / most;
  return {(tiles + count - 1) / count, columns};
}

}  // namespace

HostConvWay ChooseHostConv(const HostConvShape& shape) {
  if (shape.in % kConvLanes != 0 || shape.out % kConvLanes != 0) return HostConvWay::kLibrary;
  const int64_t tiles = TileGrid{shape.batch, shape.height, shape.width}.tiles();
  if (shape.stride == 1 && tiles >= kWinogradTiles) return HostConvWay::kWinograd;
  if (Places(shape) <= kWindowsPlaces && shape.in >= kWindowsChannels) return HostConvWay::kWindows;
  return HostConvWay::kLibrary;
}

int64_t HostConvWorkspace(HostConvWay way, const HostConvShape& shape) {
  if (way == HostConvWay::kLibrary) return 0;
  if (way == HostConvWay::kWindows) return Places(shape) * shape.in * 9;
  const Parts parts = Divide(TileGrid{shape.batch, shape.height, shape.width}.tiles(), shape.in, shape.out);
  return kSpectra * (parts.tiles * (shape.in + parts.columns) + parts.columns * shape.in);
}

at::Tensor WinogradConv3x3(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                           const at::Tensor& workspace) {
  const at::Tensor from = x.contiguous(at::MemoryFormat::ChannelsLast);
  const int64_t in = weight.size(1), out = weight.size(0);
  const TileGrid grid{x.size(0), x.size(2), x.size(3)};
  const Parts parts = Divide(grid.tiles(), in, out);
  at::Tensor y =
      at::empty({grid.batch, out, grid.height, grid.width}, x.options(), at::MemoryFormat::ChannelsLast);
  const float* input = from.const_data_ptr<float>();
  const float* taps = weight.const_data_ptr<float>();
  const float* offsets = bias.const_data_ptr<float>();
  float* result = y.mutable_data_ptr<float>();

  const int64_t weight_floats = kSpectra * parts.columns * in, input_floats = kSpectra * parts.tiles * in;
  const at::Tensor weights = workspace.narrow(0, 0, weight_floats);
  const at::Tensor inputs = workspace.narrow(0, weight_floats, input_floats);
  const at::Tensor products =
      workspace.narrow(0, weight_floats + input_floats, kSpectra * parts.tiles * parts.columns);
  float* u = weights.mutable_data_ptr<float>();
  float* v = inputs.mutable_data_ptr<float>();
  float* m = products.mutable_data_ptr<float>();
  const bool one_part = parts.tiles == grid.tiles();
  for (int64_t column = 0; column < out; column += parts.columns) {
    const int64_t columns = std::min(parts.columns, out - column);
    at::parallel_for(0, columns, 4, [&](int64_t begin, int64_t end) {
      WinogradWeightKernel(taps + (column + begin) * in * 9, end - begin, in, u + begin * in, columns * in);
    });
    const at::Tensor b = weights.narrow(0, 0, kSpectra * columns * in).view({kSpectra, columns, in});
    for (int64_t tile = 0; tile < grid.tiles(); tile += parts.tiles) {
      const int64_t tiles = std::min(parts.tiles, grid.tiles() - tile);
      if (column == 0 || !one_part) {
        at::parallel_for(0, tiles, 4, [&](int64_t begin, int64_t end) {
          WinogradInputKernel(input, grid, in, tile + begin, end - begin, v + begin * in, tiles * in);
        });
      }
      const at::Tensor a = inputs.narrow(0, 0, kSpectra * tiles * in).view({kSpectra, tiles, in});
      at::Tensor c = products.narrow(0, 0, kSpectra * tiles * columns).view({kSpectra, tiles, columns});
      HostProducts(c, a, b);
      at::parallel_for(0, tiles, 4, [&](int64_t begin, int64_t end) {
        WinogradOutputKernel(m + begin * columns, tiles * columns, offsets + column, grid, columns,
                             tile + begin, end - begin, result + column, out);
      });
    }
  }
  return y;
}

at::Tensor WindowsConv3x3(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                          int64_t stride, const at::Tensor& workspace) {
  const at::Tensor from = x.contiguous(at::MemoryFormat::ChannelsLast);
  const int64_t in = weight.size(1), out = weight.size(0), height = x.size(2), width = x.size(3);
  const int64_t out_height = (height - 1) / stride + 1, out_width = (width - 1) / stride + 1;
  const int64_t places = x.size(0) * out_height * out_width;
  const at::Tensor rows = workspace.narrow(0, 0, places * in * 9).view({places, in * 9});
  const float* input = from.const_data_ptr<float>();
  float* to = rows.mutable_data_ptr<float>();
  at::parallel_for(0, places, 4, [&](int64_t begin, int64_t end) {
    WindowsKernel(input, height, width, in, stride, begin, end - begin, to + begin * in * 9);
  });
  const at::Tensor y = HostLinear(rows, weight.view({out, in * 9}), bias);
  return y.view({x.size(0), out_height, out_width, out}).permute({0, 3, 1, 2});
}

}  // namespace latentd
