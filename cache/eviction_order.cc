#include "cache/eviction_order.h"

#include <numeric>

namespace latentd {

std::vector<size_t> CopiesThatGo(absl::Span<const IdleCopy> copies, int64_t bytes) {
  if (bytes <= 0) return {};
  std::vector<size_t> go(copies.size());
  std::iota(go.begin(), go.end(), size_t{0});
  std::sort(go.begin(), go.end(),
            [&](size_t a, size_t b) { return copies[a].last_used < copies[b].last_used; });
  int64_t freed = 0;
  size_t n = 0;
  while (n < go.size() && freed < bytes) freed += copies[go[n++]].bytes;
  go.resize(n);
  for (size_t i = go.size(); i-- > 0;) {  // what was used last stays before the others
    if (freed - copies[go[i]].bytes < bytes) continue;
    freed -= copies[go[i]].bytes;
    go.erase(go.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return go;
}

}  // namespace latentd
