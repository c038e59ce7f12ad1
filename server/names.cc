#include "server/names.h"

#include "absl/strings/str_split.h"

namespace latentd {

bool IsValidName(absl::string_view name) {
  if (name.empty() || name.size() > 128) return false;
  for (absl::string_view segment : absl::StrSplit(name, '/')) {
    if (segment.empty() || segment[0] == '.') return false;
    for (char c : segment) {
      const bool ok = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      c == '.' || c == '_' || c == '-';
      if (!ok) return false;
    }
  }
  return true;
}

}  // namespace latentd
