// Names of models, LoRAs and embeddings, as requests give them.
#ifndef LATENTD_SERVER_CATALOG_NAMES_H_
#define LATENTD_SERVER_CATALOG_NAMES_H_

#include <cstddef>

#include "absl/strings/string_view.h"

namespace latentd {

// Bytes of the longest name.
inline constexpr size_t kMaxNameBytes = 512;

// True for names that may be looked up: UTF-8 without control characters, at most kMaxNameBytes, in segments
// of at most 255 bytes that are split by '/', none of them starting with a dot.
bool IsValidName(absl::string_view name);

// True for names that clients may give to files: segments of [A-Za-z0-9._-] split by '/', none of them
// starting with a dot, at most 128 bytes.
bool IsPlainName(absl::string_view name);

}  // namespace latentd

#endif  // LATENTD_SERVER_CATALOG_NAMES_H_
