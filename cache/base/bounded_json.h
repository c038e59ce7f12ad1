// JSON as untrusted input: parsed in time that grows with its size, and refused before anything is built of
// it when it nests too deeply or has too many values.
#ifndef LATENTD_CACHE_BASE_BOUNDED_JSON_H_
#define LATENTD_CACHE_BASE_BOUNDED_JSON_H_

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

struct JsonLimits {
  int max_depth = 32;
  size_t max_values =
      2'000'000;  // of all objects and arrays together; a value takes up to 150 bytes of memory
};

// Of a key that an object has twice, the last value counts. NaN and Infinity, which Python writes and JSON
// does not have, are null. Errors: DATA_LOSS CORRUPT_FILE, with a message to put a file's name before.
absl::StatusOr<nlohmann::json> ParseBoundedJson(absl::string_view text, const JsonLimits& limits = {});

// JSON as Python's json module writes it, made JSON: null in place of NaN, Infinity and -Infinity. For who
// parses in another way.
std::string WithoutPythonsNumbers(absl::string_view text);

}  // namespace latentd

#endif  // LATENTD_CACHE_BASE_BOUNDED_JSON_H_
