// The name of one record of the ModelCache.
#ifndef LATENTD_CACHE_MODEL_KEY_H_
#define LATENTD_CACHE_MODEL_KEY_H_

#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"

namespace latentd {

// id + component. The id carries the fingerprint of the files ("flux-dev@1f3a…"), so that a replaced file
// is another record and whoever holds the old one keeps it. The component is empty for a thing that has
// none (a LoRA).
//
// Matching is exact, or by whole id (`Matches` with an empty component on the left); it is never a string
// prefix: "flux" does not match "flux-dev".
struct ModelKey {
  std::string id;
  std::string component;

  // "id" or "id:component"; for logs and the API, never parsed back.
  std::string ToString() const { return component.empty() ? id : absl::StrCat(id, ":", component); }

  // True when `this`, taken as a pattern, covers `key`: equal, or the same id with no component given.
  bool Covers(const ModelKey& key) const {
    return id == key.id && (component.empty() || component == key.component);
  }

  friend bool operator==(const ModelKey& a, const ModelKey& b) {
    return a.id == b.id && a.component == b.component;
  }
  friend bool operator<(const ModelKey& a, const ModelKey& b) {
    return std::tie(a.id, a.component) < std::tie(b.id, b.component);
  }
  template <typename H>
  friend H AbslHashValue(H h, const ModelKey& k) {
    return H::combine(std::move(h), k.id, k.component);
  }
};

}  // namespace latentd

#endif  // LATENTD_CACHE_MODEL_KEY_H_
