#include "families/config/json_config.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/base/bounded_json.h"
#include "cache/base/error.h"
#include "cache/base/utf8.h"
#include "nlohmann/json.hpp"

namespace latentd {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxShown = 200;  // bytes of a value, in messages

absl::Status Corrupt(const std::string& label, absl::string_view what) {
  return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", absl::StrCat(label, ": ", what),
                   {{"file", label}});
}

// An integer that no int64_t holds is none.
std::optional<int64_t> Integer(const Json& value) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
    return std::nullopt;
  return value.get<int64_t>();
}

absl::Status OutOfRange(const std::string& label, absl::string_view key, absl::string_view all) {
  const absl::string_view value = CutUtf8(all, kMaxShown);
  return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                   absl::StrCat(label, ": ", key, " = ", value, " is not supported"),
                   {{"file", label}, {"key", std::string(key)}, {"value", std::string(value)}});
}

absl::StatusOr<std::vector<int64_t>> IntsOf(const std::string& label, const Json& value,
                                            absl::string_view key, int64_t min, int64_t max) {
  if (!value.is_array()) return Corrupt(label, absl::StrCat(key, " is not an array"));
  std::vector<int64_t> numbers;
  for (const Json& element : value) {
    if (!element.is_number_integer())
      return Corrupt(label, absl::StrCat(key, " is not an array of integers"));
    const std::optional<int64_t> number = Integer(element);
    if (!number || *number < min || *number > max) return OutOfRange(label, key, element.dump());
    numbers.push_back(*number);
  }
  return numbers;
}

}  // namespace

struct JsonConfig::Impl {
  Json json = Json::object();

  const Json* Find(absl::string_view key) const {
    auto it = json.find(std::string(key));
    return it == json.end() || it->is_null() ? nullptr : &*it;
  }
};

JsonConfig::JsonConfig(std::string label, std::unique_ptr<Impl> impl)
    : label_(std::move(label)), impl_(std::move(impl)) {}
JsonConfig::JsonConfig(JsonConfig&&) noexcept = default;
JsonConfig& JsonConfig::operator=(JsonConfig&&) noexcept = default;
JsonConfig::~JsonConfig() = default;

absl::StatusOr<JsonConfig> JsonConfig::Load(const std::string& path, int64_t max_bytes) {
  ASSIGN_OR_RETURN(std::string text, ReadTextFile(path, max_bytes));
  return Parse(text, ShortPath(path));
}

absl::StatusOr<JsonConfig> JsonConfig::Parse(absl::string_view given, const std::string& label) {
  absl::StatusOr<Json> json = ParseBoundedJson(given);
  if (!json.ok()) return Corrupt(label, json.status().message());
  if (!json->is_object()) return Corrupt(label, "not a JSON object");
  auto impl = std::make_unique<Impl>();
  impl->json = *std::move(json);
  return JsonConfig(label, std::move(impl));
}

bool JsonConfig::Has(absl::string_view key) const { return impl_->Find(key) != nullptr; }

bool JsonConfig::IsNull(absl::string_view key) const {
  const auto it = impl_->json.find(std::string(key));
  return it != impl_->json.end() && it->is_null();
}

absl::Status JsonConfig::WrongType(absl::string_view key, absl::string_view wanted) const {
  return Corrupt(label_, absl::StrCat(key, " is not ", wanted));
}

void JsonConfig::Fail(absl::Status status) {
  if (status_.ok()) status_ = std::move(status);
}

int64_t JsonConfig::Int(absl::string_view key, int64_t fallback, int64_t min, int64_t max) {
  const Json* value = impl_->Find(key);
  if (value == nullptr) return fallback;
  if (!value->is_number_integer()) {
    Fail(WrongType(key, "an integer"));
    return fallback;
  }
  const std::optional<int64_t> number = Integer(*value);
  if (!number || *number < min || *number > max) {
    Fail(OutOfRange(label_, key, value->dump()));
    return fallback;
  }
  return *number;
}

double JsonConfig::Double(absl::string_view key, double fallback, double min, double max) {
  const Json* value = impl_->Find(key);
  if (value == nullptr) return fallback;
  if (!value->is_number()) {
    Fail(WrongType(key, "a number"));
    return fallback;
  }
  const double number = value->get<double>();
  if (!(number >= min && number <= max)) {
    Fail(OutOfRange(label_, key, value->dump()));
    return fallback;
  }
  return number;
}

bool JsonConfig::Bool(absl::string_view key, bool fallback) {
  const Json* value = impl_->Find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) {
    Fail(WrongType(key, "true or false"));
    return fallback;
  }
  return value->get<bool>();
}

std::string JsonConfig::String(absl::string_view key, absl::string_view fallback) {
  const Json* value = impl_->Find(key);
  if (value == nullptr) return std::string(fallback);
  if (!value->is_string()) {
    Fail(WrongType(key, "a string"));
    return std::string(fallback);
  }
  return value->get<std::string>();
}

std::vector<int64_t> JsonConfig::Ints(absl::string_view key, std::vector<int64_t> fallback, int64_t min,
                                      int64_t max) {
  const Json* value = impl_->Find(key);
  if (value == nullptr) return fallback;
  absl::StatusOr<std::vector<int64_t>> numbers = IntsOf(label_, *value, key, min, max);
  if (numbers.ok()) return *std::move(numbers);
  Fail(numbers.status());
  return fallback;
}

std::vector<std::vector<int64_t>> JsonConfig::IntOrNestedInts(absl::string_view key, int64_t fallback,
                                                              size_t count, int64_t min, int64_t max) {
  std::vector<std::vector<int64_t>> lists;
  const Json* value = impl_->Find(key);
  const bool nested = value != nullptr && value->is_array() &&
                      std::any_of(value->begin(), value->end(), [](const Json& e) { return e.is_array(); });
  if (!nested) {
    for (const int64_t number : IntOrInts(key, fallback, count, min, max)) lists.push_back({number});
    return lists;
  }
  for (const Json& element : *value) {
    auto numbers = IntsOf(label_, element.is_array() ? element : Json::array({element}), key, min, max);
    if (numbers.ok() && numbers->empty()) numbers = WrongType(key, "arrays that are not empty");
    if (!numbers.ok()) Fail(numbers.status());
    lists.push_back(numbers.ok() ? *std::move(numbers) : std::vector<int64_t>{fallback});
  }
  if (lists.size() != count) Fail(OutOfRange(label_, key, value->dump()));
  if (!status_.ok()) lists.assign(count, {fallback});
  return lists;
}

std::vector<int64_t> JsonConfig::IntOrInts(absl::string_view key, int64_t fallback, size_t count, int64_t min,
                                           int64_t max) {
  const Json* value = impl_->Find(key);
  if (value == nullptr || !value->is_array()) {
    return std::vector<int64_t>(count, Int(key, fallback, min, max));
  }
  std::vector<int64_t> numbers = Ints(key, {}, min, max);
  if (numbers.size() != count) {
    Fail(OutOfRange(label_, key, value->dump()));
    numbers.assign(count, fallback);
  }
  return numbers;
}

std::vector<std::string> JsonConfig::Strings(absl::string_view key, std::vector<std::string> fallback) {
  const Json* value = impl_->Find(key);
  if (value == nullptr) return fallback;
  std::vector<std::string> strings;
  bool good = value->is_array();
  if (good) {
    for (const Json& element : *value) {
      good = good && element.is_string();
      if (good) strings.push_back(element.get<std::string>());
    }
  }
  if (good) return strings;
  Fail(WrongType(key, "an array of strings"));
  return fallback;
}

std::vector<double> JsonConfig::Doubles(absl::string_view key) {
  std::vector<double> numbers;
  const Json* value = impl_->Find(key);
  if (value == nullptr) return numbers;
  auto take = [&](const Json& element) {
    if (!element.is_number() || !std::isfinite(element.get<double>())) return false;
    numbers.push_back(element.get<double>());
    return true;
  };
  bool good = value->is_array();
  if (good) {
    for (const Json& row : *value) {
      if (row.is_array()) {
        for (const Json& element : row) good = good && take(element);
      } else {
        good = good && take(row);
      }
    }
  }
  if (!good) Fail(WrongType(key, "an array of numbers"));
  return numbers;
}

std::vector<std::pair<std::string, int64_t>> JsonConfig::IntMap(absl::string_view key) {
  std::vector<std::pair<std::string, int64_t>> pairs;
  const Json* value = key.empty() ? &impl_->json : impl_->Find(key);
  if (value == nullptr || !value->is_object()) {
    Fail(WrongType(key, "an object"));
    return pairs;
  }
  for (const auto& [name, number] : value->items()) {
    const std::optional<int64_t> integer = number.is_number_integer() ? Integer(number) : std::nullopt;
    if (!integer) {
      Fail(WrongType(CutUtf8(name, kMaxShown), "an integer"));
      return {};
    }
    pairs.emplace_back(name, *integer);
  }
  return pairs;
}

std::vector<std::pair<std::string, std::string>> JsonConfig::StringPairs(absl::string_view key) {
  std::vector<std::pair<std::string, std::string>> pairs;
  const Json* value = impl_->Find(key);
  bool good = value != nullptr && value->is_array();
  if (good) {
    for (const Json& row : *value) {
      if (row.is_array() && row.size() == 2 && row[0].is_string() && row[1].is_string()) {
        pairs.emplace_back(row[0].get<std::string>(), row[1].get<std::string>());
        continue;
      }
      const std::string text = row.is_string() ? row.get<std::string>() : "";
      const size_t space = text.find(' ');
      good = good && space != std::string::npos;
      if (good) pairs.emplace_back(text.substr(0, space), text.substr(space + 1));
    }
  }
  if (!good) Fail(WrongType(key, "an array of pairs"));
  return pairs;
}

std::string JsonConfig::Token(absl::string_view key, absl::string_view fallback) {
  const Json* value = impl_->Find(key);
  if (value == nullptr || !value->is_object()) return String(key, fallback);
  return Object(key).String("content", fallback);
}

bool JsonConfig::IsObject(absl::string_view key) const {
  const Json* value = impl_->Find(key);
  return value != nullptr && value->is_object();
}

std::vector<std::pair<std::string, JsonConfig>> JsonConfig::Objects(absl::string_view key) {
  std::vector<std::pair<std::string, JsonConfig>> objects;
  const Json* value = impl_->Find(key);
  if (value == nullptr) return objects;
  bool good = value->is_array() || value->is_object();
  for (const auto& [name, object] : value->items()) {
    if (!good || !object.is_object()) {
      good = false;
      break;
    }
    auto impl = std::make_unique<Impl>();
    impl->json = object;
    objects.emplace_back(name, JsonConfig(absl::StrCat(label_, " ", key), std::move(impl)));
  }
  if (!good) Fail(WrongType(key, "made of objects"));
  return objects;
}

std::vector<std::pair<std::string, double>> JsonConfig::Scores(absl::string_view key) {
  std::vector<std::pair<std::string, double>> scores;
  const Json* value = impl_->Find(key);
  bool good = value != nullptr && value->is_array();
  if (good) {
    for (const Json& row : *value) {
      good = good && row.is_array() && row.size() == 2 && row[0].is_string() && row[1].is_number();
      if (good) scores.emplace_back(row[0].get<std::string>(), row[1].get<double>());
    }
  }
  if (!good) Fail(WrongType(key, "an array of texts with scores"));
  return scores;
}

JsonConfig JsonConfig::Object(absl::string_view key) {
  auto impl = std::make_unique<Impl>();
  const Json* value = impl_->Find(key);
  if (value != nullptr) {
    if (value->is_object()) {
      impl->json = *value;
    } else {
      Fail(WrongType(key, "an object"));
    }
  }
  return JsonConfig(absl::StrCat(label_, " ", key), std::move(impl));
}

}  // namespace latentd
