#include "cache/base/utf8.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace latentd {
namespace {

struct Range {
  int32_t first, last;
};

// Ascending. Source: General_Category Cc, Cf, Zl and Zp of the Unicode Character Database, version 15,
// without the visible signs of Arabic, Syriac, Kaithi and Egyptian; and U+034F, U+115F, U+3164, U+FFA0, which
// are blank.
constexpr Range kUnsafe[] = {
    {0x0000, 0x001F},   {0x007F, 0x009F},   {0x00AD, 0x00AD},   {0x034F, 0x034F}, {0x061C, 0x061C},
    {0x115F, 0x1160},   {0x17B4, 0x17B5},   {0x180B, 0x180F},   {0x200B, 0x200F}, {0x2028, 0x202E},
    {0x2060, 0x206F},   {0x3164, 0x3164},   {0xFEFF, 0xFEFF},   {0xFFA0, 0xFFA0}, {0xFFF0, 0xFFFB},
    {0x1BCA0, 0x1BCA3}, {0x1D173, 0x1D17A}, {0xE0000, 0xE0FFF},
};

}  // namespace

int32_t TakeCharacter(absl::string_view& text) {
  const auto byte = [&](size_t at) { return static_cast<unsigned char>(text[at]); };
  const int32_t lead = byte(0);
  const size_t length = lead < 0x80                   ? 1
                        : lead >= 0xC2 && lead < 0xE0 ? 2
                        : lead >= 0xE0 && lead < 0xF0 ? 3
                        : lead >= 0xF0 && lead < 0xF5 ? 4
                                                      : 0;
  bool valid = length > 0 && length <= text.size();
  int32_t code = length < 2 ? lead : lead & (0x7F >> length);
  for (size_t i = 1; valid && i < length; ++i) {
    valid = (byte(i) & 0xC0) == 0x80;
    code = code << 6 | (byte(i) & 0x3F);
  }
  constexpr int32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  valid = valid && code >= kLeast[length] && code <= 0x10FFFF && (code < 0xD800 || code > 0xDFFF);
  text.remove_prefix(valid ? length : 1);
  return valid ? code : -1;
}

std::string ValidUtf8(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const absl::string_view before = text;
    if (TakeCharacter(text) < 0) {
      out += "\xEF\xBF\xBD";
    } else {
      out.append(before.data(), before.size() - text.size());
    }
  }
  return out;
}

absl::string_view CutUtf8(absl::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  size_t end = max_bytes;
  // Four bytes are the most that a character has; what goes on for longer is no text.
  for (int i = 0; i < 3 && end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80; ++i) --end;
  return text.substr(0, end);
}

bool IsUnsafeToShow(int32_t code) {
  if (code < 0 || (code & 0xFFFE) == 0xFFFE || (code >= 0xFDD0 && code <= 0xFDEF)) return true;
  const auto* range = std::upper_bound(std::begin(kUnsafe), std::end(kUnsafe), code,
                                       [](int32_t c, const Range& r) { return c < r.first; });
  return range != std::begin(kUnsafe) && code <= (range - 1)->last;
}

std::string EscapeUnsafe(absl::string_view text) {
  const auto append_unit = [](int32_t unit, std::string& out) {
    absl::StrAppend(&out, "\\u", absl::Hex(unit, absl::kZeroPad4));
  };
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const absl::string_view before = text;
    const int32_t code = TakeCharacter(text);
    if (!IsUnsafeToShow(code)) {
      out.append(before.data(), before.size() - text.size());
    } else if (code == '\n') {
      out += "\\n";
    } else if (code == '\t') {
      out += "\\t";
    } else if (code < 0x20) {  // an invalid byte, too
      absl::StrAppend(&out, "\\x", absl::Hex(static_cast<unsigned char>(before[0]), absl::kZeroPad2));
    } else if (code < 0x10000) {
      append_unit(code, out);
    } else {
      append_unit(0xD800 + ((code - 0x10000) >> 10), out);
      append_unit(0xDC00 + ((code - 0x10000) & 0x3FF), out);
    }
  }
  return out;
}

}  // namespace latentd
