#include "server/catalog/names.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "cache/base/utf8.h"

namespace latentd {
namespace {

constexpr size_t kMaxPlainBytes = 128;
constexpr size_t kMaxSegmentBytes = 255;  // NAME_MAX, which is that of every common file system

// C0, DEL and C1; what is no UTF-8 is -1.
bool IsControl(int32_t code) { return code < 0x20 || (code >= 0x7f && code < 0xa0); }

bool IsText(absl::string_view text) {
  while (!text.empty()) {
    if (IsControl(TakeCharacter(text))) return false;
  }
  return true;
}

bool IsPlain(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
}

template <typename Allowed>
bool IsName(absl::string_view name, size_t max_bytes, Allowed allowed) {
  if (name.empty() || name.size() > max_bytes) return false;
  for (absl::string_view segment : absl::StrSplit(name, '/')) {
    if (segment.empty() || segment.size() > kMaxSegmentBytes || segment[0] == '.' || !allowed(segment))
      return false;
  }
  return true;
}

}  // namespace

bool IsValidName(absl::string_view name) { return IsName(name, kMaxNameBytes, IsText); }

bool IsPlainName(absl::string_view name) { return IsName(name, kMaxPlainBytes, IsPlain); }

}  // namespace latentd
