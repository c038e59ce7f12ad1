// What may lie where the server expects a state file of its own; for tests.
#ifndef LATENTD_SERVER_CATALOG_GARBAGE_FILES_H_
#define LATENTD_SERVER_CATALOG_GARBAGE_FILES_H_

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace latentd {

// Each with a name for messages. REQUIRES of the functions: nothing is at the path.
inline std::vector<std::pair<std::string, std::function<void(const std::filesystem::path&)>>>
ThingsThatAreNoFile() {
  namespace fs = std::filesystem;
  return {
      {"a folder", [](const fs::path& path) { fs::create_directory(path); }},
      {"a folder with something in it", [](const fs::path& path) { fs::create_directories(path / "x"); }},
      {"a FIFO", [](const fs::path& path) { mkfifo(path.c_str(), 0600); }},
      {"a link to itself", [](const fs::path& path) { fs::create_symlink(path.filename(), path); }},
      {"a link to a device", [](const fs::path& path) { fs::create_symlink("/dev/zero", path); }},
      {"a gigabyte of nothing",
       [](const fs::path& path) {
         std::ofstream(path) << "{";
         fs::resize_file(path, 1 << 30);
       }},
  };
}

// `good` with some values replaced by ones of another type, keys lost, and sometimes bytes changed.
inline std::string DamagedJson(const nlohmann::json& good, std::mt19937& random) {
  using Json = nlohmann::json;
  const std::vector<Json> others = {nullptr,        true,      -1,        0,   1e308,    1.5,
                                    UINT64_MAX,     INT64_MIN, "",        "1", "\u009b", Json::array(),
                                    Json::object(), {1, 2},    {{"a", 1}}};
  Json bad = good;
  for (int changes = 1 + static_cast<int>(random() % 3); changes > 0; --changes) {
    Json* at = &bad;
    while (at->is_structured() && !at->empty() && random() % 4 != 0) {
      auto it = at->begin();
      std::advance(it, random() % at->size());
      at = &*it;
    }
    if (at->is_object() && !at->empty() && random() % 3 == 0) {
      at->erase(at->begin());
    } else {
      *at = others[random() % others.size()];
    }
  }
  std::string text = bad.dump();
  for (int changes = static_cast<int>(random() % 4); changes > 1; --changes) {
    text[random() % text.size()] = static_cast<char>(random());
  }
  if (random() % 8 == 0) text.resize(random() % text.size());
  return text;
}

}  // namespace latentd

#endif  // LATENTD_SERVER_CATALOG_GARBAGE_FILES_H_
