// Denoising a picture larger than the model was trained for in overlapping tiles: MultiDiffusion, Bar-Tal et
// al. 2023, "MultiDiffusion: Fusing Diffusion Paths for Controlled Image Generation". Here: where tiles lie
// and how their results are put together. Sizes are in latent places. Pure; any thread.
#ifndef LATENTD_FAMILIES_SD_SD_TILES_H_
#define LATENTD_FAMILIES_SD_SD_TILES_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"

namespace latentd {

struct SdTile {
  int64_t top = 0, left = 0, height = 0, width = 0;
  // What the tile counts at each place, [1, 1, height, width] fp32, in host memory: 1, falling to 0 over what
  // it shares with a neighbour. Undefined where it is the only tile.
  at::Tensor weight;

  at::Tensor Of(const at::Tensor& x) const { return x.narrow(2, top, height).narrow(3, left, width); }
};

// Row by row. As few tiles as cover the picture with at least `overlap` between them, evenly spread, so that
// neighbours may share more. A tile is no larger than the picture. REQUIRES: 0 <= overlap < the tile's sides.
std::vector<SdTile> LayTiles(int64_t height, int64_t width, int64_t tile_height, int64_t tile_width,
                             int64_t overlap);

// The weighted mean of the tiles' results, each [1, C, height, width], at every place. → [1, C, h, w].
at::Tensor MergeTiles(const std::vector<SdTile>& tiles, const std::vector<at::Tensor>& results,
                      int64_t height, int64_t width);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_TILES_H_
