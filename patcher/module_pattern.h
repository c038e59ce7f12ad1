// A regular expression for the end of a module's path, as peft's configs have them: Python's syntax,
// untrusted.
#ifndef LATENTD_PATCHER_MODULE_PATTERN_H_
#define LATENTD_PATCHER_MODULE_PATTERN_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

// Matches a path of which it is all, or the end behind a dot: "to_q" and "attn.to_q" match
// "blocks.0.attn.to_q", "o_q" does not, and "^to_q" matches "to_q" alone. Immutable; any thread.
class ModulePattern {
 public:
  // Errors: INVALID_ARGUMENT, in words that follow "that" ("is no regular expression: …").
  static absl::StatusOr<ModulePattern> Compile(const std::string& text);

  // `path` is valid UTF-8. Errors: INVALID_ARGUMENT where it takes too many steps.
  absl::StatusOr<bool> Matches(absl::string_view path) const;

 private:
  struct Compiled;
  std::string plain_;                         // of letters, digits, _ and . alone; most are
  bool whole_ = false;                        // of the plain one: it began with ^
  std::shared_ptr<const Compiled> compiled_;  // of all others
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_MODULE_PATTERN_H_
