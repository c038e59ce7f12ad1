// Running a network over a large picture in overlapping tiles, each blended into its neighbours, for less
// memory. The tiles' borders, and statistics over a tile in place of the picture, change the result a little.
// Sizes, overlap and blending are those of diffusers' AutoencoderKL.enable_tiling().
#ifndef LATENTD_FAMILIES_VAE_TILING_H_
#define LATENTD_FAMILIES_VAE_TILING_H_

#include <cstdint>
#include <functional>

#include "ATen/core/Tensor.h"

namespace latentd {

// Share of a tile that its neighbour covers too.
inline constexpr double kTileOverlap = 0.25;

// x: [N, C, h, w] → f's result for all of it, [N, C', h · out/in, w · out/in], where `f` turns a tile of `in`
// × `in` places (less at the right and below) into one of `out` × `out`. REQUIRES: in and out are at least 4.
at::Tensor InTiles(const at::Tensor& x, int64_t in, int64_t out,
                   const std::function<at::Tensor(const at::Tensor&)>& f);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_VAE_TILING_H_
