#include "server/runtime/machine_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// "MemTotal:       24576000 kB"; 0 when it is not there.
int64_t ReadMemTotal(const std::string& root) {
  std::ifstream file(absl::StrCat(root, "/proc/meminfo"));
  for (std::string word; file >> word;) {
    int64_t kib = 0;
    if (word == "MemTotal:" && file >> kib && kib < kNoLimit / 1024) return kib * 1024;
  }
  return 0;
}

// This process's group in the v2 hierarchy, "/a/b"; the line is "0::/a/b".
std::string ReadCgroup(const std::string& root) {
  std::ifstream file(absl::StrCat(root, "/proc/self/cgroup"));
  for (std::string line; std::getline(file, line);) {
    if (absl::StartsWith(line, "0::/")) return line.substr(3);
  }
  return "";
}

int64_t ReadMemoryMax(const std::string& folder) {
  std::ifstream file(absl::StrCat(folder, "/memory.max"));
  std::string word;
  int64_t bytes = 0;
  // "max" is no number, and means what a missing file means.
  return file >> word && absl::SimpleAtoi(word, &bytes) && bytes > 0 ? bytes : kNoLimit;
}

}  // namespace

absl::StatusOr<int64_t> MachineRamBytes(const std::string& root) {
  int64_t bytes = ReadMemTotal(root);
  if (bytes <= 0) {
    return MakeError(absl::StatusCode::kInternal, "NO_MEMORY_INFO",
                     "/proc/meminfo does not tell the machine's RAM; set ram_cap to a size");
  }
  // In a container the group is often "/", and its own limit stands at the mount's root.
  std::string group = ReadCgroup(root);
  while (true) {
    bytes = std::min(bytes, ReadMemoryMax(absl::StrCat(root, "/sys/fs/cgroup", group)));
    if (group.empty()) return bytes;
    group.resize(group.find_last_of('/'));
  }
}

RamCap DefaultRamCap(int64_t machine_ram_bytes, const std::vector<int64_t>& gpu_bytes) {
  RamCap cap{machine_ram_bytes / 2 - 2 * kGiB, "half of the RAM less 2 GiB"};
  int64_t most = 0;
  for (int64_t gpu : gpu_bytes) most += std::max<int64_t>(0, gpu - 3 * kGiB);
  if (gpu_bytes.empty()) most = 32 * kGiB;
  if (cap.bytes > most) cap = {most, gpu_bytes.empty() ? "32 GiB without a GPU" : "what the GPUs hold"};
  if (cap.bytes < 4 * kGiB) cap = {4 * kGiB, "4 GiB at least"};
  if (cap.bytes > machine_ram_bytes / 4 * 3)
    cap = {machine_ram_bytes / 4 * 3, "three quarters of the RAM at most"};
  return cap;
}

}  // namespace latentd
