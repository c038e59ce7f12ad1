#include "server/runtime/conditioning_key.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache/base/sha256.h"

namespace latentd {

ModelKey ConditioningKey(const OpenModel& model, const Run& run, size_t phase,
                         std::vector<ConditioningSource> sources, PatchMode mode, const Device& device,
                         ComputeType compute) {
  std::stable_sort(sources.begin(), sources.end(),
                   [](const auto& a, const auto& b) { return a.name < b.name; });
  std::string all = run.OutputKey(phase);
  for (const ConditioningSource& source : sources) {
    absl::StrAppend(&all, "\n", source.lora.ToString(), "*", source.strength, "/", static_cast<int>(mode));
  }
  // Devices of one kind give the same bytes; a simulated one computes as the CPU does.
  if (device.kind() == DeviceKind::kCuda || compute != ComputeType::kFp32) {
    absl::StrAppend(&all, "\n", device.kind() == DeviceKind::kCuda ? "cuda" : "cpu", "/",
                    ComputeTypeName(compute));
  }
  return {model.id, absl::StrCat("conditioning/", run.phases()[phase].components[0], "/",
                                 Sha256Hex(all).substr(0, 32))};
}

}  // namespace latentd
