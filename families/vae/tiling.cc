#include "families/vae/tiling.h"

#include <algorithm>
#include <limits>
#include <utility>

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

TileWalk::TileWalk(at::Tensor x, int64_t in, int64_t out)
    : x_(std::move(x)),
      in_(in == 0 ? std::max(x_.size(2), x_.size(3)) : in),
      stride_(in == 0 ? in_ : static_cast<int64_t>(static_cast<double>(in) * (1 - kTileOverlap))),
      overlap_(in == 0 ? 0 : static_cast<int64_t>(static_cast<double>(out) * kTileOverlap)),
      kept_(in == 0 ? std::numeric_limits<int64_t>::max() : out - overlap_) {}

at::Tensor TileWalk::tile() const {
  return x_.narrow(2, top_, std::min(in_, x_.size(2) - top_))
      .narrow(3, left_, std::min(in_, x_.size(3) - left_));
}

void TileWalk::Add(at::Tensor made) {
  if (top_ > 0) FadeIn(above_[row_.size()], made, 2, overlap_);
  if (left_ > 0) FadeIn(row_.back(), made, 3, overlap_);
  row_.push_back(std::move(made));
  left_ += stride_;
  if (left_ >= x_.size(3)) EndRow();
}

void TileWalk::EndRow() {
  std::vector<at::Tensor> cut;
  for (const at::Tensor& tile : row_) {
    cut.push_back(
        tile.narrow(2, 0, std::min(kept_, tile.size(2))).narrow(3, 0, std::min(kept_, tile.size(3))));
  }
  rows_.push_back(cut.size() == 1 ? cut[0] : at::cat(cut, 3));
  above_ = std::exchange(row_, {});
  left_ = 0;
  top_ += stride_;
}

at::Tensor TileWalk::Take() {
  above_.clear();
  return rows_.size() == 1 ? rows_[0] : at::cat(std::exchange(rows_, {}), 2);
}

}  // namespace latentd
