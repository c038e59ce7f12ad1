// Rotary position embedding, interleaved layout: channels (0,1), (2,3), … of a head are pairs, each turned
// by an angle that depends on the token's position. Formula: Su et al. 2021, "RoFormer", section 3.2; several
// axes (text index, row, column) share out the channels of a head.
//
// Pure functions; any thread.
#ifndef LATENTD_FAMILIES_NN_ROPE_H_
#define LATENTD_FAMILIES_NN_ROPE_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"

namespace latentd {

// cos + i·sin of every angle, complex64 [tokens, 1, head_dim / 2]. `positions`: fp32 or int64 [tokens, axes];
// `axes`: channels per axis, even, summing to head_dim. Angles are computed in fp64, where the positions are:
// position · theta^(−2j/d).
at::Tensor RopeTable(const at::Tensor& positions, const std::vector<int64_t>& axes, double theta = 10000);

// What queries and keys go through: RMS norm of every head, then the turn by `table`.
// x: [1, tokens, heads · head_dim] fp32; weight: [head_dim]; out: [1, tokens, heads, head_dim], contiguous.
// One pass in host memory; elsewhere NormRopeComposed, the same out of ATen's operators.
void NormRopeTo(at::Tensor out, const at::Tensor& x, const at::Tensor& weight, double eps,
                const at::Tensor& table);
void NormRopeComposed(at::Tensor out, const at::Tensor& x, const at::Tensor& weight, double eps,
                      const at::Tensor& table);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_NN_ROPE_H_
