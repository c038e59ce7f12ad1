#include "server/measurements.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
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

}  // namespace

Measurements::Measurements(std::string folder)
    : path_(folder.empty() ? "" : absl::StrCat(folder, "/measurements.json")) {
  if (path_.empty()) return;
  std::ifstream file(path_);
  if (!file) return;
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("version", 0) != kVersion || !json.contains("phases") ||
      !json["phases"].is_object()) {
    spdlog::warn("{} is not a file of measurements; it is ignored", path_);
    return;
  }
  MutexLock lock(&mu_);
  for (const auto& [key, value] : json["phases"].items()) {
    if (!value.is_object() || !value.contains("working_bytes") || !value["working_bytes"].is_number() ||
        !value.contains("seconds") || !value["seconds"].is_number()) {
      continue;
    }
    const PhaseMeasurement m{value["working_bytes"].get<int64_t>(), value["seconds"].get<double>()};
    if (m.working_bytes >= 0 && m.seconds_per_slice >= 0 && std::isfinite(m.seconds_per_slice))
      values_[key] = m;
  }
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

void Measurements::Record(const std::string& key, int64_t working_bytes, double seconds_per_slice) {
  std::map<std::string, PhaseMeasurement> copy;
  {
    MutexLock lock(&mu_);
    PhaseMeasurement& m = At(key);
    const bool moved = working_bytes > m.working_bytes ||
                       std::abs(seconds_per_slice - m.seconds_per_slice) > kNoise * m.seconds_per_slice;
    m.working_bytes = std::max(m.working_bytes, working_bytes);
    m.seconds_per_slice = seconds_per_slice;
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

void Measurements::Save(const std::map<std::string, PhaseMeasurement>& values) {
  nlohmann::json phases = nlohmann::json::object();
  for (const auto& [key, m] : values) {
    phases[key] = {{"working_bytes", m.working_bytes}, {"seconds", m.seconds_per_slice}};
  }
  MutexLock lock(&file_mu_);
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), error);
  const std::string fresh = absl::StrCat(path_, ".new");  // renamed when it is whole
  {
    std::ofstream file(fresh, std::ios::trunc);
    file << nlohmann::json{{"version", kVersion}, {"phases", phases}}.dump(1) << "\n";
    if (!file.flush()) {
      spdlog::warn("cannot write {}; measurements are not kept", fresh);
      return;
    }
  }
  std::filesystem::rename(fresh, path_, error);
  if (error) spdlog::warn("cannot write {}: {}", path_, error.message());
}

}  // namespace latentd
