// What ModelCache::LockAll loads of a set, in which order, and the one promise for it.
#ifndef LATENTD_CACHE_LOAD_SET_H_
#define LATENTD_CACHE_LOAD_SET_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "cache/model_cache.h"

namespace latentd {

struct LoadSet {
  std::vector<size_t> order;  // indices of requests
  int64_t bytes = 0;          // promised together, before anything is loaded
  std::string what;           // that promise's purpose
};

// `missing`: indices of the requests whose records are not there, each key once. The order is that of the
// keys, whatever the caller's is.
LoadSet SetToLoad(absl::Span<const LockRequest> requests, std::vector<size_t> missing);

}  // namespace latentd

#endif  // LATENTD_CACHE_LOAD_SET_H_
