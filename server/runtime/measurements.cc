#include "server/runtime/measurements.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "cache/base/bounded_json.h"
#include "cache/base/error.h"
#include "cache/base/text_file.h"
#include "cache/base/utf8.h"
#include "spdlog/spdlog.h"

namespace latentd {
namespace {

constexpr int kVersion = 2;  // of what the keys are made of
// Allocators round, and the next run is not the last one. What takes more is found out before it does, and
// measured anew.
constexpr double kMargin = 1.05;
constexpr int64_t kSlackBytes = 256 << 10;
constexpr double kNoise = 0.2;  // of times
// How much more is tried than what did not do: a failure says where it came to, not how far it was to go.
constexpr double kMoreThanFailed = 1.25;
// Requests choose shapes: as many as are kept.
constexpr size_t kMaxKeys = 4096;

// What a file may say. More bytes than any machine has would refuse every job for good.
constexpr int64_t kMaxFileBytes = 16 << 20;
constexpr int64_t kMaxWorkingBytes = int64_t{1} << 46;
constexpr double kMaxSeconds = 1e6;

using Values = std::map<std::string, PhaseMeasurement>;

// Entries that make no sense are left out. Errors: those of ReadTextFile; DATA_LOSS CORRUPT_FILE.
absl::StatusOr<Values> Read(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxFileBytes));
  ASSIGN_OR_RETURN(const nlohmann::json json, ParseBoundedJson(text));
  const auto version = json.find("version"), phases = json.find("phases");
  if (!json.is_object() || version == json.end() || *version != kVersion || phases == json.end() ||
      !phases->is_object()) {
    return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", "it is not a file of measurements");
  }
  Values values;
  for (const auto& [key, value] : phases->items()) {
    const auto bytes = value.find("working_bytes"), seconds = value.find("seconds");
    if (bytes == value.end() || !bytes->is_number_integer() || seconds == value.end() ||
        !seconds->is_number())
      continue;
    const PhaseMeasurement m{bytes->get<int64_t>(), seconds->get<double>()};
    const bool sensible = m.working_bytes >= 0 && m.working_bytes <= kMaxWorkingBytes &&
                          m.seconds_per_unit >= 0 && m.seconds_per_unit <= kMaxSeconds;
    if (sensible) values[key] = m;
  }
  return values;
}

}  // namespace

Measurements::Measurements(std::string folder)
    : path_(folder.empty() ? "" : absl::StrCat(folder, "/measurements.json")) {
  struct stat st = {};
  if (path_.empty() || (lstat(path_.c_str(), &st) != 0 && errno == ENOENT)) return;
  absl::StatusOr<Values> values = Read(path_);
  if (!values.ok()) {
    spdlog::warn("{}: nothing that was measured before is known: {}", path_,
                 std::string(values.status().message()));
    SetAside();
    return;
  }
  MutexLock lock(&mu_);
  values_ = *std::move(values);
}

WorkingPromise Measurements::Promise(const std::string& key, int64_t estimate) const {
  MutexLock lock(&mu_);
  auto it = values_.find(key);
  if (it == values_.end()) return {.bytes = estimate};
  const PhaseMeasurement& m = it->second;
  if (m.working_bytes > 0) {
    const auto bytes = static_cast<int64_t>(static_cast<double>(m.working_bytes) * kMargin) + kSlackBytes;
    return {.bytes = bytes, .measured = true};
  }
  const auto more = static_cast<int64_t>(static_cast<double>(m.at_least) * kMoreThanFailed);
  return {.bytes = std::max(estimate, more), .measured = false, .at_least = m.at_least};
}

PhaseMeasurement& Measurements::At(const std::string& key) {
  auto it = values_.find(key);
  if (it != values_.end()) return it->second;
  // Any: what is asked for again is measured again.
  if (values_.size() >= kMaxKeys) values_.erase(values_.begin());
  return values_[key];
}

void Measurements::RecordFailure(const std::string& key, int64_t at_least) {
  MutexLock lock(&mu_);
  PhaseMeasurement& m = At(key);
  m.working_bytes = 0;
  m.at_least = std::max(m.at_least, at_least);
}

std::optional<PhaseMeasurement> Measurements::Find(const std::string& key) const {
  MutexLock lock(&mu_);
  auto it = values_.find(key);
  if (it == values_.end()) return std::nullopt;
  return it->second;
}

void Measurements::Record(const std::string& key, int64_t working_bytes, double seconds_per_unit) {
  Values copy;
  {
    MutexLock lock(&mu_);
    PhaseMeasurement& m = At(key);
    const bool moved = working_bytes > m.working_bytes ||
                       std::abs(seconds_per_unit - m.seconds_per_unit) > kNoise * m.seconds_per_unit;
    m.working_bytes = std::max(m.working_bytes, working_bytes);
    m.seconds_per_unit = seconds_per_unit;
    if (!moved || path_.empty()) return;
    copy = values_;
  }
  Save(copy);
}

void Measurements::Forget(const std::string& key) {
  MutexLock lock(&mu_);
  auto it = values_.find(key);
  if (it != values_.end()) it->second.working_bytes = 0;
}

void Measurements::SetAside() {
  const std::string aside = absl::StrCat(path_, ".broken");
  if (rename(path_.c_str(), aside.c_str()) == 0) {
    spdlog::warn("{} was renamed to {}", path_, aside);
  } else {
    spdlog::warn("{} cannot be renamed: {}", path_, std::strerror(errno));
  }
}

void Measurements::Save(const Values& values) {
  nlohmann::json phases = nlohmann::json::object();
  for (const auto& [key, m] : values) {
    phases[ValidUtf8(key)] = {{"working_bytes", m.working_bytes}, {"seconds", m.seconds_per_unit}};
  }
  MutexLock lock(&file_mu_);
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), error);
  const absl::Status status =
      ReplaceTextFile(path_, nlohmann::json{{"version", kVersion}, {"phases", phases}}.dump(1) + "\n");
  // Once: it is tried again after every job.
  if (!status.ok() && !said_) spdlog::warn("measurements are not kept: {}", std::string(status.message()));
  said_ = !status.ok();
}

}  // namespace latentd
