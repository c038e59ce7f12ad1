// Text clean-up that tokenizers ask for. UTF-8 in, UTF-8 out; pure functions, any thread. They expect valid
// text: see ValidUtf8.
#ifndef LATENTD_FAMILIES_TOKENIZERS_UNICODE_H_
#define LATENTD_FAMILIES_TOKENIZERS_UNICODE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "cache/base/utf8.h"

namespace latentd {

// Normalisation form C.
std::string Nfc(absl::string_view text);

// Every character by its own lower-case mapping, without regard to its neighbours.
std::string LowerCase(absl::string_view text);

// Each run of characters with the property White_Space becomes one space.
std::string CollapseWhitespace(absl::string_view text);

// Whether the character that ends before byte `at`, or begins there, belongs to a word: a letter, a number or
// an underscore, as in Python's \\w. False beyond the text's ends. REQUIRES: `at` is between two characters.
bool WordEndsBefore(absl::string_view text, size_t at);
bool WordGoesOn(absl::string_view text, size_t at);

// The bytes of white space that `text` begins or ends with.
size_t LeadingWhitespace(absl::string_view text);
size_t TrailingWhitespace(absl::string_view text);

// A compiled regular expression with Unicode classes. Immutable; any thread.
class Pattern {
 public:
  // REQUIRES: `expression` is valid; it is part of the program.
  explicit Pattern(const char* expression);
  ~Pattern();
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

  // All matches, left to right. They point into `text`, which is valid UTF-8.
  std::vector<absl::string_view> FindAll(absl::string_view text) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_TOKENIZERS_UNICODE_H_
