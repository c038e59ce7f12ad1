#define PCRE2_CODE_UNIT_WIDTH 8
#include "patcher/module_pattern.h"

#include <pcre2.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace latentd {
namespace {

constexpr size_t kMaxText = 4096;
constexpr uint32_t kMaxSteps = 100'000;  // of one match; a path takes some hundreds

bool IsPlain(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](char c) { return absl::ascii_isalnum(c) || c == '_' || c == '.'; });
}

}  // namespace

struct ModulePattern::Compiled {
  pcre2_code* code = nullptr;
  pcre2_match_context* limits = nullptr;

  Compiled() = default;
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;
  ~Compiled() {
    pcre2_match_context_free(limits);
    pcre2_code_free(code);
  }
};

absl::StatusOr<ModulePattern> ModulePattern::Compile(const std::string& text) {
  if (text.size() > kMaxText) return absl::InvalidArgumentError("is longer than 4096 bytes");
  ModulePattern pattern;
  absl::string_view plain = text;
  const bool whole = absl::ConsumePrefix(&plain, "^");
  if (IsPlain(plain)) {
    pattern.plain_ = std::string(plain);
    pattern.whole_ = whole;
    return pattern;
  }
  const std::string expression = absl::StrCat("(.*\\.)?(", text, ")$");
  auto compiled = std::make_shared<Compiled>();
  int error = 0;
  PCRE2_SIZE offset = 0;
  compiled->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                                 PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NEVER_BACKSLASH_C, &error,
                                 &offset, nullptr);
  if (compiled->code == nullptr) return absl::InvalidArgumentError("is no regular expression");
  compiled->limits = pcre2_match_context_create(nullptr);
  pcre2_set_match_limit(compiled->limits, kMaxSteps);
  pcre2_set_heap_limit(compiled->limits, 1024);  // KiB
  pattern.compiled_ = std::move(compiled);
  return pattern;
}

absl::StatusOr<bool> ModulePattern::Matches(absl::string_view path) const {
  if (compiled_ == nullptr) {
    if (path.size() < plain_.size()) return false;
    const absl::string_view end = path.substr(path.size() - plain_.size());
    const bool from_a_dot =
        end.size() == path.size() || (!whole_ && path[path.size() - plain_.size() - 1] == '.');
    return from_a_dot && std::equal(plain_.begin(), plain_.end(), end.begin(), [](char p, char c) {
             return p == c || p == '.';
           });  // a dot is any character
  }
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  const int found = pcre2_match(compiled_->code, reinterpret_cast<PCRE2_SPTR>(path.data()), path.size(), 0, 0,
                                data, compiled_->limits);
  pcre2_match_data_free(data);
  if (found == PCRE2_ERROR_NOMATCH) return false;
  if (found < 0)
    return absl::InvalidArgumentError("a pattern in the file's header takes too long to match it");
  return true;
}

}  // namespace latentd
