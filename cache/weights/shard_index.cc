#include "cache/weights/shard_index.h"

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/bounded_json.h"
#include "cache/base/error.h"
#include "cache/base/text_file.h"
#include "nlohmann/json.hpp"

namespace latentd {
namespace {

constexpr int64_t kMaxShardIndexBytes = 64 << 20;
constexpr size_t kMaxShards = 1000;

}  // namespace

absl::StatusOr<std::vector<std::string>> ReadShardIndex(const std::string& path) {
  const std::string label = ShortPath(path);
  auto corrupt = [&](absl::string_view what) {
    return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", absl::StrCat(label, ": ", what),
                     {{"file", label}});
  };
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxShardIndexBytes));
  absl::StatusOr<nlohmann::json> json = ParseBoundedJson(text);
  if (!json.ok()) return corrupt(json.status().message());
  const auto map = json->find("weight_map");
  if (map == json->end() || !map->is_object()) return corrupt("no weight_map");
  std::set<std::string> names;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string()) return corrupt("a file name is no text");
    const auto name = file.get<std::string>();
    if (name.find('/') != std::string::npos || name.find('\0') != std::string::npos ||
        absl::StartsWith(name, ".") || !absl::EndsWith(name, ".safetensors")) {
      return corrupt("a shard is not a plain .safetensors name");
    }
    names.insert(name);
    if (names.size() > kMaxShards) return corrupt("too many shards");
  }
  if (names.empty()) return corrupt("weight_map is empty");
  return std::vector<std::string>(names.begin(), names.end());
}

}  // namespace latentd
