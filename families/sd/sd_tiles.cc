#include "families/sd/sd_tiles.h"

#include <algorithm>

#include "ATen/ATen.h"

namespace latentd {
namespace {

// Where tiles of `size` begin along an axis of `extent`.
std::vector<int64_t> Begins(int64_t extent, int64_t size, int64_t overlap) {
  if (size >= extent) return {0};
  const int64_t stride = size - overlap;
  const int64_t count = (extent - overlap + stride - 1) / stride;
  std::vector<int64_t> begins;
  for (int64_t i = 0; i < count; ++i) begins.push_back(i * (extent - size) / (count - 1));
  return begins;
}

// Along one axis: rises over what is shared with the tile before, falls over what is shared with the one
// after.
at::Tensor Ramp(const std::vector<int64_t>& begins, size_t i, int64_t size) {
  at::Tensor ramp = at::ones({size});
  if (i > 0) {
    const int64_t shared = begins[i - 1] + size - begins[i];
    if (shared > 0) ramp.narrow(0, 0, shared).mul_(at::linspace(0, 1, shared));
  }
  if (i + 1 < begins.size()) {
    const int64_t shared = begins[i] + size - begins[i + 1];
    if (shared > 0) ramp.narrow(0, size - shared, shared).mul_(at::linspace(1, 0, shared));
  }
  return ramp;
}

}  // namespace

std::vector<SdTile> LayTiles(int64_t height, int64_t width, int64_t tile_height, int64_t tile_width,
                             int64_t overlap) {
  tile_height = std::min(tile_height, height);
  tile_width = std::min(tile_width, width);
  const std::vector<int64_t> tops = Begins(height, tile_height, overlap);
  const std::vector<int64_t> lefts = Begins(width, tile_width, overlap);
  std::vector<SdTile> tiles;
  for (size_t row = 0; row < tops.size(); ++row) {
    for (size_t column = 0; column < lefts.size(); ++column) {
      SdTile tile{tops[row], lefts[column], tile_height, tile_width, {}};
      if (tops.size() * lefts.size() > 1) {
        tile.weight =
            (Ramp(tops, row, tile_height).unsqueeze(1) * Ramp(lefts, column, tile_width).unsqueeze(0))
                .view({1, 1, tile_height, tile_width});
      }
      tiles.push_back(std::move(tile));
    }
  }
  return tiles;
}

at::Tensor MergeTiles(const std::vector<SdTile>& tiles, const std::vector<at::Tensor>& results,
                      int64_t height, int64_t width) {
  if (tiles.size() == 1) return results.front();
  const at::Tensor& first = results.front();
  at::Tensor merged = at::zeros({1, first.size(1), height, width}, first.options());
  at::Tensor weights = at::zeros({1, 1, height, width}, first.options());
  for (size_t i = 0; i < tiles.size(); ++i) {
    const at::Tensor weight = tiles[i].weight.to(first.device());
    tiles[i].Of(merged).add_(results[i] * weight);
    tiles[i].Of(weights).add_(weight);
  }
  return merged.div_(weights);
}

}  // namespace latentd
