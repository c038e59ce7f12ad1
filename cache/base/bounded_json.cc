#include "cache/base/bounded_json.h"

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

using Json = nlohmann::json;

absl::Status Corrupt(absl::string_view what) {
  return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", what);
}

// Counts, and builds nothing. (A callback of the parser that builds could count as well, but that one
// searches the whole object at the end of every object in it.)
class Counter : public nlohmann::json_sax<Json> {
 public:
  explicit Counter(const JsonLimits& limits) : limits_(limits) {}
  const char* problem() const { return problem_; }

  bool null() override { return Value(); }
  bool boolean(bool) override { return Value(); }
  bool number_integer(number_integer_t) override { return Value(); }
  bool number_unsigned(number_unsigned_t) override { return Value(); }
  bool number_float(number_float_t, const string_t&) override { return Value(); }
  bool string(string_t&) override { return Value(); }
  bool binary(binary_t&) override { return Fail("is no JSON"); }
  bool start_object(std::size_t) override { return Deeper(); }
  bool start_array(std::size_t) override { return Deeper(); }
  bool end_object() override { return --depth_, true; }
  bool end_array() override { return --depth_, true; }
  bool key(string_t&) override { return true; }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override {
    return Fail("is no JSON");
  }

 private:
  bool Fail(const char* problem) {
    problem_ = problem;
    return false;
  }
  bool Value() { return ++values_ <= limits_.max_values || Fail("has too many values"); }
  bool Deeper() { return Value() && (++depth_ <= limits_.max_depth || Fail("JSON is nested too deeply")); }

  const JsonLimits limits_;
  const char* problem_ = "is no JSON";
  size_t values_ = 0;
  int depth_ = 0;
};

absl::StatusOr<Json> ParsePlain(absl::string_view text, const JsonLimits& limits) {
  Counter counter(limits);
  if (!Json::sax_parse(text.begin(), text.end(), &counter)) return Corrupt(counter.problem());
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return Corrupt("is no JSON");
  return json;
}

}  // namespace

std::string WithoutPythonsNumbers(absl::string_view text) {
  std::string result;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') in_string = !in_string;
    const absl::string_view number = in_string  ? ""
                                     : c == '-' ? "-Infinity"
                                     : c == 'I' ? "Infinity"
                                     : c == 'N' ? "NaN"
                                                : "";
    if (!number.empty() && text.substr(i, number.size()) == number) {
      result += "null";
      i += number.size() - 1;
      continue;
    }
    result += c;
    if (in_string && c == '\\' && i + 1 < text.size()) result += text[++i];
  }
  return result;
}

absl::StatusOr<Json> ParseBoundedJson(absl::string_view text, const JsonLimits& limits) {
  if (absl::StrContains(text, "NaN") || absl::StrContains(text, "Infinity")) {
    return ParsePlain(WithoutPythonsNumbers(text), limits);
  }
  return ParsePlain(text, limits);
}

}  // namespace latentd
