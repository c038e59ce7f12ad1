// Plain low-rank differences added to a weight in one pass: each number is read once, summed in fp32, and
// rounded once. Plain loops over arrays in host memory; any thread.
#ifndef LATENTD_PATCHER_MERGE_KERNEL_H_
#define LATENTD_PATCHER_MERGE_KERNEL_H_

#include <cstdint>

namespace latentd {

// out = weight + up · down for rows of a matrix: weight and out [rows, columns], up [rows, rank], down [rank,
// columns], all contiguous. Rows do not depend on each other, so a caller may share them out to threads
// without changing a bit.
void MergeFloatRows(const float* weight, const float* up, const float* down, float* out, int64_t rows,
                    int64_t columns, int64_t rank);

// The same for bfloat16, given by its bits; rounds to the nearest, ties to even.
void MergeBFloat16Rows(const uint16_t* weight, const float* up, const float* down, uint16_t* out,
                       int64_t rows, int64_t columns, int64_t rank);

}  // namespace latentd

#endif  // LATENTD_PATCHER_MERGE_KERNEL_H_
