#include "families/vae/tiling.h"

#include <algorithm>
#include <vector>

#include "ATen/ATen.h"

namespace latentd {
namespace {

// The first `extent` places of `b` along `dim` fade over from the last ones of `a`.
void FadeIn(const at::Tensor& a, const at::Tensor& b, int64_t dim, int64_t extent) {
  extent = std::min({extent, a.size(dim), b.size(dim)});
  if (extent <= 0) return;
  std::vector<int64_t> shape(4, 1);
  shape[static_cast<size_t>(dim)] = extent;
  const at::Tensor ramp = (at::arange(extent, b.options()) / extent).view(shape);
  const at::Tensor before = a.narrow(dim, a.size(dim) - extent, extent);
  const at::Tensor after = b.narrow(dim, 0, extent);
  after.copy_(before * (1 - ramp) + after * ramp);
}

}  // namespace

at::Tensor InTiles(const at::Tensor& x, int64_t in, int64_t out,
                   const std::function<at::Tensor(const at::Tensor&)>& f) {
  const int64_t height = x.size(2), width = x.size(3);
  const auto stride = static_cast<int64_t>(static_cast<double>(in) * (1 - kTileOverlap));
  const auto extent = static_cast<int64_t>(static_cast<double>(out) * kTileOverlap);
  const int64_t kept = out - extent;

  std::vector<at::Tensor> result;      // finished rows
  std::vector<at::Tensor> above, row;  // tiles, blended
  for (int64_t top = 0; top < height; top += stride) {
    row.clear();
    std::vector<at::Tensor> cut;
    for (int64_t left = 0; left < width; left += stride) {
      at::Tensor tile =
          f(x.narrow(2, top, std::min(in, height - top)).narrow(3, left, std::min(in, width - left)));
      if (top > 0) FadeIn(above[row.size()], tile, 2, extent);
      if (left > 0) FadeIn(row.back(), tile, 3, extent);
      cut.push_back(
          tile.narrow(2, 0, std::min(kept, tile.size(2))).narrow(3, 0, std::min(kept, tile.size(3))));
      row.push_back(std::move(tile));
    }
    result.push_back(at::cat(cut, 3));
    above = std::move(row);
  }
  return at::cat(result, 2);
}

}  // namespace latentd
