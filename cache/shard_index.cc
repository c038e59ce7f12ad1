#include "cache/shard_index.h"

#include <fstream>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "nlohmann/json.hpp"

namespace latentd {

absl::StatusOr<std::vector<std::string>> ReadShardIndex(const std::string& path) {
  auto corrupt = [](absl::string_view what) {
    return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", absl::StrCat("shard index: ", what));
  };
  std::ifstream in(path);
  if (!in) return MakeError(absl::StatusCode::kNotFound, "FILE_NOT_FOUND", "cannot open the shard index");
  nlohmann::json json = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    return corrupt("no weight_map");
  }
  std::set<std::string> names;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string()) return corrupt("a file name is no text");
    const auto name = file.get<std::string>();
    if (name.find('/') != std::string::npos || name.find('\0') != std::string::npos || absl::StartsWith(name, ".") ||
        !absl::EndsWith(name, ".safetensors")) {
      return corrupt("a shard is not a plain .safetensors name");
    }
    names.insert(name);
  }
  if (names.empty()) return corrupt("weight_map is empty");
  return std::vector<std::string>(names.begin(), names.end());
}

}  // namespace latentd
