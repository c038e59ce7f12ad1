// Which devices a configuration means: `auto`, and GPUs by UUID.
//
// Pure functions over what the driver shows, so that they are tested on a machine without a GPU.
#ifndef LATENTD_CACHE_DEVICE_CHOICE_H_
#define LATENTD_CACHE_DEVICE_CHOICE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace latentd {

// The GPUs that CUDA shows to this process, in its order.
struct CudaGpus {
  std::vector<std::string> uuids;  // of cuda:0, cuda:1, …: "5a0e1f2c-…", lower case, without "GPU-" or "MIG-"
  std::string missing;             // why there is none, for a person; empty where there is one
};

// What MakeDevice is asked for, one by one, and why, for the log and for `latentctl info`.
struct DeviceChoice {
  std::vector<std::string> specs;
  std::string reason;
};

// {"auto"} becomes every GPU, or the CPU where there is none; other specs are taken as they stand. Errors:
// INVALID_ARGUMENT where `auto` stands beside others.
absl::StatusOr<DeviceChoice> ChooseDevices(const std::vector<std::string>& configured, const CudaGpus& gpus);

// Whether ChooseDevices looks at the GPUs: to list them may load a driver.
bool WantsAutoDevices(const std::vector<std::string>& configured);

// Whether the text after "cuda:" is a UUID and no index: "GPU-5a0e", "MIG-…", any case.
bool IsGpuUuid(absl::string_view text);

// N of the one GPU whose UUID begins so. Errors: UNAVAILABLE DEVICE_NOT_FOUND where none does or several do;
// the message names those that there are.
absl::StatusOr<int> FindGpu(absl::string_view uuid, const CudaGpus& gpus);

}  // namespace latentd

#endif  // LATENTD_CACHE_DEVICE_CHOICE_H_
