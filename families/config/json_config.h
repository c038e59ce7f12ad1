// A JSON file of settings (config.json, scheduler_config.json, latentd.json), read as untrusted input.
//
// Getters take the default for a key that is absent or null, and a range. NaN and Infinity, which Python
// writes and JSON does not have, are null. The first thing that is wrong is remembered, so that a config is
// read in one go and checked once:
//
//   ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(folder + "/config.json"));
//   config.layers = json.Int("num_layers", 19, 0, 1000);
//   RETURN_IF_ERROR(json.status());
//
// One thread at a time. Errors: NOT_FOUND MISSING_FILE, DATA_LOSS CORRUPT_FILE (no JSON object, a value of
// the wrong type), FAILED_PRECONDITION UNSUPPORTED_MODEL (a value out of range).
#ifndef LATENTD_FAMILIES_CONFIG_JSON_CONFIG_H_
#define LATENTD_FAMILIES_CONFIG_JSON_CONFIG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/base/text_file.h"

namespace latentd {

class JsonConfig {
 public:
  static constexpr int64_t kMaxConfigBytes = 4 << 20;

  static absl::StatusOr<JsonConfig> Load(const std::string& path, int64_t max_bytes = kMaxConfigBytes);
  // `label` stands for the file in errors.
  static absl::StatusOr<JsonConfig> Parse(absl::string_view text, const std::string& label);

  JsonConfig(JsonConfig&&) noexcept;
  JsonConfig& operator=(JsonConfig&&) noexcept;
  ~JsonConfig();

  // True when the key is there and not null.
  bool Has(absl::string_view key) const;
  // True when the key is there and null, where that is not the same as its absence.
  bool IsNull(absl::string_view key) const;

  int64_t Int(absl::string_view key, int64_t fallback, int64_t min, int64_t max);
  double Double(absl::string_view key, double fallback, double min, double max);
  bool Bool(absl::string_view key, bool fallback);
  std::string String(absl::string_view key, absl::string_view fallback);
  std::vector<int64_t> Ints(absl::string_view key, std::vector<int64_t> fallback, int64_t min, int64_t max);
  // An array of `count` integers; one integer stands for `count` times itself.
  std::vector<int64_t> IntOrInts(absl::string_view key, int64_t fallback, size_t count, int64_t min,
                                 int64_t max);
  // The same, where each of the `count` may also be an array, which is not empty.
  std::vector<std::vector<int64_t>> IntOrNestedInts(absl::string_view key, int64_t fallback, size_t count,
                                                    int64_t min, int64_t max);
  std::vector<std::string> Strings(absl::string_view key, std::vector<std::string> fallback);
  // Numbers of an array, or of an array of arrays, row after row.
  std::vector<double> Doubles(absl::string_view key);
  // Name → number pairs of the object under `key`; of the whole file when `key` is empty.
  std::vector<std::pair<std::string, int64_t>> IntMap(absl::string_view key);
  // An array of pairs, each written as ["a", "b"] or "a b".
  std::vector<std::pair<std::string, std::string>> StringPairs(absl::string_view key);
  // A token: a string, or an object with the string under "content".
  std::string Token(absl::string_view key, absl::string_view fallback);
  bool IsObject(absl::string_view key) const;
  // The objects under `key`, which is an array of them, or an object of them by name. Check the status of
  // each.
  std::vector<std::pair<std::string, JsonConfig>> Objects(absl::string_view key);
  // An array of ["text", number].
  std::vector<std::pair<std::string, double>> Scores(absl::string_view key);
  // The object under `key`; an empty one when it is absent.
  JsonConfig Object(absl::string_view key);

  // Notes an error, unless there is one already.
  void Fail(absl::Status status);

  const absl::Status& status() const { return status_; }
  const std::string& label() const { return label_; }

 private:
  struct Impl;
  JsonConfig(std::string label, std::unique_ptr<Impl> impl);
  absl::Status WrongType(absl::string_view key, absl::string_view wanted) const;

  std::string label_;
  std::unique_ptr<Impl> impl_;
  absl::Status status_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_CONFIG_JSON_CONFIG_H_
