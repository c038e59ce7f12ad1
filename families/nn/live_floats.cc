#include "families/nn/live_floats.h"

#include "ATen/Parallel.h"

namespace latentd {

int64_t ConvertedFloats(const ComponentLayout& layout, const WeightUse& use, int32_t first_block) {
  int64_t largest = 0;
  if (!use.converted) return largest;
  for (const TensorDecl& tensor : layout.tensors()) {
    if (tensor.shape.size() < 2 || tensor.block < first_block) continue;
    int64_t numbers = 1;
    for (int64_t extent : tensor.shape) numbers *= extent;
    largest = std::max(largest, numbers);
  }
  return largest;
}

int64_t AttentionScratch(int64_t queries, int64_t keys, int64_t head_dim) {
  // As the library cuts them.
  const int64_t rows = queries >= 768 ? 256 : queries >= 192 ? 64 : 32;
  const int64_t columns = std::min<int64_t>(keys, 512);
  return at::get_num_threads() * std::min(rows, queries) * (columns + 2 + head_dim);
}

}  // namespace latentd
