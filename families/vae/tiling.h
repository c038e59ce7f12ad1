// Running a network over a large picture in overlapping tiles, each blended into its neighbours, for less
// memory. The tiles' borders, and statistics over a tile in place of the picture, change the result a little.
// Sizes, overlap and blending are those of diffusers' AutoencoderKL.enable_tiling().
#ifndef LATENTD_FAMILIES_VAE_TILING_H_
#define LATENTD_FAMILIES_VAE_TILING_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"

namespace latentd {

// Share of a tile that its neighbour covers too.
inline constexpr double kTileOverlap = 0.25;

// A map that goes through a network tile by tile, and what is made of it, [N, C', h · out/in, w · out/in].
//
//   TileWalk walk(x, in, out);
//   while (!walk.over()) walk.Add(network(walk.tile()));
//   return walk.Take();
class TileWalk {
 public:
  // x: [N, C, h, w]. The network turns a tile of `in` × `in` places (less at the right and below) into one of
  // `out` × `out`; with an `in` of 0, all of x is one tile. REQUIRES: in and out are 0 or at least 4.
  TileWalk(at::Tensor x, int64_t in, int64_t out);

  bool over() const { return top_ >= x_.size(2); }
  // The next one to go through the network: a view of x. REQUIRES: !over().
  at::Tensor tile() const;
  // What the network made of tile(); it is written to.
  void Add(at::Tensor made);
  // REQUIRES: over(). Once.
  at::Tensor Take();

 private:
  void EndRow();

  at::Tensor x_;
  int64_t in_, stride_;     // places of x
  int64_t overlap_, kept_;  // places of what is made
  int64_t top_ = 0, left_ = 0;
  std::vector<at::Tensor> rows_;         // finished
  std::vector<at::Tensor> above_, row_;  // tiles, blended
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_VAE_TILING_H_
