#include "cache/load_set.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/admission.h"

namespace latentd {

LoadSet SetToLoad(absl::Span<const LockRequest> requests, std::vector<size_t> missing) {
  LoadSet set;
  std::sort(missing.begin(), missing.end(),
            [&](size_t a, size_t b) { return requests[a].key < requests[b].key; });
  for (const size_t i : missing) set.bytes += requests[i].loader.estimated_bytes;
  if (missing.size() == 1) {
    const LockRequest& one = requests[missing[0]];
    set.what = PurposeOfRecord(one.loader.kind, one.key.ToString());
  } else {
    set.what = absl::StrCat("a set of ", missing.size(), " records");
  }
  set.order = std::move(missing);
  return set;
}

}  // namespace latentd
