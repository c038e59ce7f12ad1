// UTF-8 text that came from a file or a client: cut and repaired, so that it can stand in a protobuf string,
// and looked through for characters that do something to a display other than to be seen.
//
// Pure; any thread.
#ifndef LATENTD_CACHE_BASE_UTF8_H_
#define LATENTD_CACHE_BASE_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace latentd {

// Takes the first character off `text` and returns its code point; -1 for a byte that begins no valid
// character (overlong forms, surrogates, beyond U+10FFFF), which is taken off alone. REQUIRES: `text` is not
// empty.
int32_t TakeCharacter(absl::string_view& text);

// `text` with each invalid byte replaced by U+FFFD.
std::string ValidUtf8(absl::string_view text);

// The longest beginning of `text` that has at most `max_bytes` bytes and ends between two characters.
absl::string_view CutUtf8(absl::string_view text, size_t max_bytes);

// True for what must not reach a terminal or a log as it is: C0 and C1 controls, DEL, marks that turn the
// direction of writing, characters without width, separators of lines and paragraphs, tags, noncharacters;
// and for TakeCharacter's -1.
bool IsUnsafeToShow(int32_t code);

// `text` with what is unsafe to show as an escape: \n, \t, \x1b (C0 and invalid bytes), \u202e, and two of
// those for characters beyond U+FFFF. Inside of JSON it changes how a text is written, not what it is.
std::string EscapeUnsafe(absl::string_view text);

}  // namespace latentd

#endif  // LATENTD_CACHE_BASE_UTF8_H_
