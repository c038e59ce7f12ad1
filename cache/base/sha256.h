// SHA-256, as 64 lower-case hexadecimal digits.
#ifndef LATENTD_CACHE_BASE_SHA256_H_
#define LATENTD_CACHE_BASE_SHA256_H_

#include <memory>
#include <string>

#include "absl/strings/string_view.h"

namespace latentd {

std::string Sha256Hex(absl::string_view data);

// The same for data that comes in pieces. Not thread-safe.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  void Update(absl::string_view data);
  // Ends the sum; nothing else may be called after it.
  std::string Finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace latentd

#endif  // LATENTD_CACHE_BASE_SHA256_H_
