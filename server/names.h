// Names of models, LoRAs and embeddings, as requests give them.
#ifndef LATENTD_SERVER_NAMES_H_
#define LATENTD_SERVER_NAMES_H_

#include "absl/strings/string_view.h"

namespace latentd {

// True for names that may be looked up: segments of [A-Za-z0-9._-] split by '/', none of them starting with a
// dot, at most 128 bytes.
bool IsValidName(absl::string_view name);

}  // namespace latentd

#endif  // LATENTD_SERVER_NAMES_H_
