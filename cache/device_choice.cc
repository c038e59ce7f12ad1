#include "cache/device_choice.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

constexpr char kAuto[] = "auto";
constexpr size_t kUuidPrefix = 4;  // "GPU-", "MIG-"

std::string AllOf(const CudaGpus& gpus) {
  if (gpus.uuids.empty()) return gpus.missing.empty() ? "there is no GPU" : gpus.missing;
  return absl::StrCat("there are ", absl::StrJoin(gpus.uuids, ", ", [](std::string* out, const auto& uuid) {
                        absl::StrAppend(out, "GPU-", uuid);
                      }));
}

}  // namespace

bool WantsAutoDevices(const std::vector<std::string>& configured) {
  return std::find(configured.begin(), configured.end(), kAuto) != configured.end();
}

absl::StatusOr<DeviceChoice> ChooseDevices(const std::vector<std::string>& configured, const CudaGpus& gpus) {
  if (!WantsAutoDevices(configured)) return DeviceChoice{configured, "as configured"};
  if (configured.size() != 1) {
    return absl::InvalidArgumentError("'auto' stands alone; name all devices, or none beside it");
  }
  if (gpus.uuids.empty()) return DeviceChoice{{"cpu"}, absl::StrCat("auto: the CPU, as ", AllOf(gpus))};
  DeviceChoice choice;
  for (size_t i = 0; i < gpus.uuids.size(); ++i) choice.specs.push_back(absl::StrCat("cuda:", i));
  choice.reason = absl::StrCat("auto: every GPU; ", AllOf(gpus));
  return choice;
}

bool IsGpuUuid(absl::string_view text) {
  return absl::StartsWithIgnoreCase(text, "GPU-") || absl::StartsWithIgnoreCase(text, "MIG-");
}

absl::StatusOr<int> FindGpu(absl::string_view uuid, const CudaGpus& gpus) {
  const std::string wanted = absl::AsciiStrToLower(uuid.substr(std::min(kUuidPrefix, uuid.size())));
  std::vector<int> found;
  for (size_t i = 0; i < gpus.uuids.size(); ++i) {
    if (!wanted.empty() && absl::StartsWith(gpus.uuids[i], wanted)) found.push_back(static_cast<int>(i));
  }
  if (found.size() == 1) return found[0];
  return MakeError(absl::StatusCode::kUnavailable, "DEVICE_NOT_FOUND",
                   absl::StrCat("cuda:", uuid, ": ", found.empty() ? "no GPU" : "more than one GPU",
                                " has a UUID that begins so; ", AllOf(gpus)));
}

}  // namespace latentd
