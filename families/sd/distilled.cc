#include "families/sd/distilled.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace latentd {
namespace {

struct Kind {
  const char* variant;
  const char* mark;
  bool whole_word;
  const char* sampler;
  bool trailing;
};

constexpr Kind kKinds[] = {
    {"lightning", "lightning", false, "euler", true},
    {"turbo", "turbo", false, "euler_a", true},
    {"hyper", "hyper-sd", false, "", true},
    {"hyper", "hyper_sd", false, "", true},
    {"hyper", "hypersd", false, "", true},
    {"dmd2", "dmd2", true, "lcm", false},
    {"lcm", "lcm", true, "lcm", false},
};

bool HasMark(absl::string_view name, const Kind& kind) {
  const absl::string_view mark = kind.mark;
  for (size_t at = name.find(mark); at != absl::string_view::npos; at = name.find(mark, at + 1)) {
    const size_t end = at + mark.size();
    const bool begins = at == 0 || !absl::ascii_isalpha(static_cast<unsigned char>(name[at - 1]));
    const bool ends = end == name.size() || !absl::ascii_isalnum(static_cast<unsigned char>(name[end]));
    if (!kind.whole_word || (begins && ends)) return true;
  }
  return false;
}

// The number of "4step", "8-steps", "2 step"; 0: none of up to two digits.
int64_t Steps(absl::string_view name) {
  for (size_t at = name.find("step"); at != absl::string_view::npos; at = name.find("step", at + 1)) {
    size_t end = at;
    if (end > 0 && (name[end - 1] == '-' || name[end - 1] == '_' || name[end - 1] == ' ')) --end;
    int64_t number = 0, scale = 1;
    for (; end > 0 && absl::ascii_isdigit(static_cast<unsigned char>(name[end - 1])) && scale <= 1000;
         scale *= 10) {
      number += scale * (name[--end] - '0');
    }
    if (number > 0 && number < 100) return number;
  }
  return 0;
}

}  // namespace

std::optional<Distilled> DistilledByName(absl::string_view name) {
  const std::string lower = absl::AsciiStrToLower(name);
  for (const Kind& kind : kKinds) {
    if (!HasMark(lower, kind)) continue;
    Distilled found{kind.variant, kind.sampler};
    found.trailing = kind.trailing;
    if (const int64_t steps = Steps(lower); steps > 0) found.steps = steps;
    return found;
  }
  return std::nullopt;
}

std::optional<Distilled> FindDistilled(const std::map<std::string, std::string>& header,
                                       absl::string_view path) {
  if (const auto title = header.find("modelspec.title"); title != header.end()) {
    if (auto found = DistilledByName(title->second)) return found;
  }
  return DistilledByName(path.substr(path.rfind('/') + 1));
}

}  // namespace latentd
