#define PCRE2_CODE_UNIT_WIDTH 8
#include "families/tokenizers/unicode.h"

#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "families/tokenizers/unicode_tables.h"

namespace latentd {
namespace {

const utf8proc_uint8_t* Bytes(absl::string_view text) {
  return reinterpret_cast<const utf8proc_uint8_t*>(text.data());
}

void Append(utf8proc_int32_t code, std::string& out) {
  utf8proc_uint8_t buffer[4];
  const utf8proc_ssize_t n = utf8proc_encode_char(code, buffer);
  out.append(reinterpret_cast<const char*>(buffer), static_cast<size_t>(n));
}

// Takes the first character off `text`; -1 for an invalid byte.
utf8proc_int32_t Next(absl::string_view& text) {
  utf8proc_int32_t code = -1;
  const utf8proc_ssize_t n = utf8proc_iterate(Bytes(text), static_cast<utf8proc_ssize_t>(text.size()), &code);
  text.remove_prefix(n > 0 ? static_cast<size_t>(n) : 1);
  return n > 0 ? code : -1;
}

int32_t ToLower(int32_t code) {
  const auto* pair = std::lower_bound(std::begin(kNewLowerCases), std::end(kNewLowerCases), code,
                                      [](const LowerCasePair& p, int32_t c) { return p.capital < c; });
  return pair != std::end(kNewLowerCases) && pair->capital == code ? pair->small : utf8proc_tolower(code);
}

// Unicode property White_Space.
bool IsWhitespace(utf8proc_int32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool IsWord(utf8proc_int32_t c) {
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return true;
    default:
      return c == '_';
  }
}

// No character's canonical decomposition is longer: 4 in Unicode 15.
constexpr int kMaxDecomposition = 32;

int MarkClass(utf8proc_int32_t code) { return utf8proc_get_property(code)->combining_class; }

// The canonical order: of marks behind one character by their classes, and of one class as they are.
void SortMarks(std::vector<utf8proc_int32_t>& codes) {
  for (auto begin = codes.begin(); begin != codes.end();) {
    if (MarkClass(*begin) == 0) {
      ++begin;
      continue;
    }
    const auto end = std::find_if(begin, codes.end(), [](utf8proc_int32_t c) { return MarkClass(c) == 0; });
    std::stable_sort(begin, end,
                     [](utf8proc_int32_t a, utf8proc_int32_t b) { return MarkClass(a) < MarkClass(b); });
    begin = end;
  }
}

// The last character of a text that is not empty.
absl::string_view LastCharacter(absl::string_view text) {
  size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return text.substr(begin);
}

}  // namespace

// As utf8proc_map does it, but for the order of marks: that sorts them one place at a time, which takes
// seconds for a prompt of marks alone.
std::string Nfc(absl::string_view text) {
  constexpr auto kForm = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  std::vector<utf8proc_int32_t> codes;
  codes.reserve(text.size());
  for (absl::string_view rest = text; !rest.empty();) {
    const utf8proc_int32_t code = Next(rest);
    if (code < 0) return std::string(text);
    utf8proc_int32_t parts[kMaxDecomposition];
    int boundary = 0;
    const utf8proc_ssize_t n = utf8proc_decompose_char(code, parts, kMaxDecomposition, kForm, &boundary);
    if (n < 0 || n > kMaxDecomposition) return std::string(text);
    codes.insert(codes.end(), parts, parts + n);
  }
  SortMarks(codes);
  const utf8proc_ssize_t n =
      utf8proc_normalize_utf32(codes.data(), static_cast<utf8proc_ssize_t>(codes.size()), kForm);
  if (n < 0) return std::string(text);
  std::string out;
  out.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < n; ++i) Append(codes[static_cast<size_t>(i)], out);
  return out;
}

std::string LowerCase(absl::string_view text) {
  constexpr utf8proc_int32_t kCapitalIWithDot = 0x130;  // the one character whose lower case is two
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const utf8proc_int32_t code = Next(text);
    if (code == kCapitalIWithDot) {
      out += "i\u0307";
    } else {
      Append(ToLower(code), out);
    }
  }
  return out;
}

std::string CollapseWhitespace(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  bool in_run = false;
  while (!text.empty()) {
    const utf8proc_int32_t code = Next(text);
    const bool space = IsWhitespace(code);
    if (!space) Append(code, out);
    if (space && !in_run) out += ' ';
    in_run = space;
  }
  return out;
}

bool WordEndsBefore(absl::string_view text, size_t at) {
  if (at == 0) return false;
  absl::string_view last = LastCharacter(text.substr(0, at));
  return IsWord(Next(last));
}

bool WordGoesOn(absl::string_view text, size_t at) {
  if (at >= text.size()) return false;
  absl::string_view rest = text.substr(at);
  return IsWord(Next(rest));
}

size_t LeadingWhitespace(absl::string_view text) {
  absl::string_view rest = text;
  size_t count = 0;
  while (!rest.empty() && IsWhitespace(Next(rest))) count = text.size() - rest.size();
  return count;
}

size_t TrailingWhitespace(absl::string_view text) {
  size_t count = 0;
  while (count < text.size()) {
    absl::string_view last = LastCharacter(text.substr(0, text.size() - count));
    const size_t bytes = last.size();
    if (!IsWhitespace(Next(last))) break;
    count += bytes;
  }
  return count;
}

struct Pattern::Impl {
  pcre2_code* code = nullptr;
};

Pattern::Pattern(const char* expression) : impl_(std::make_unique<Impl>()) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  impl_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression), PCRE2_ZERO_TERMINATED,
                              PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr);
  ABSL_INTERNAL_CHECK(impl_->code != nullptr, "a pattern of the program does not compile");
}

Pattern::~Pattern() { pcre2_code_free(impl_->code); }

std::vector<absl::string_view> Pattern::FindAll(absl::string_view text) const {
  std::vector<absl::string_view> matches;
  pcre2_match_data* data = pcre2_match_data_create_from_pattern(impl_->code, nullptr);
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  for (PCRE2_SIZE at = 0; at < text.size();) {
    const int n = pcre2_match(impl_->code, subject, text.size(), at, PCRE2_NO_UTF_CHECK, data, nullptr);
    if (n < 1) break;
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data);
    if (range[1] <= range[0]) break;  // the patterns here match no empty text
    matches.push_back(text.substr(range[0], range[1] - range[0]));
    at = range[1];
  }
  pcre2_match_data_free(data);
  return matches;
}

}  // namespace latentd
