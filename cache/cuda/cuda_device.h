// What the plug-in latentd_cuda.so offers: the device `cuda:N`.
//
// The program links LibTorch's CPU part only; what needs CUDA is in the plug-in, which cache/cuda_plugin.h
// loads where it is asked for. Both are built from the same tree: they share classes, not only C functions,
// and `abi` keeps a plug-in of another build out.
#ifndef LATENTD_CACHE_CUDA_CUDA_DEVICE_H_
#define LATENTD_CACHE_CUDA_CUDA_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cache/base/fault_injection.h"
#include "cache/device.h"
#include "cache/memory_budget.h"

namespace latentd {

struct CudaDeviceRequest {
  int index = 0;             // as CUDA counts, so after CUDA_VISIBLE_DEVICES
  int64_t cap_bytes = 0;     // of its budget; 0: what the device has, which is also the most
  RamBudget* ram = nullptr;  // of pinned memory; outlives the device's streams
  // The program's MaybeFail: the plug-in has a copy of its own, in which no test arms anything.
  absl::Status (*maybe_fail)(FaultPoint, absl::string_view) = nullptr;
};

struct CudaDeviceReply {
  absl::Status status;  // UNAVAILABLE DEVICE_NOT_FOUND, with what to do
  std::unique_ptr<Device> device;
};

struct CudaPluginApi {
  uint64_t abi;

  // Devices that CUDA shows to this process; 0 without a driver that works. Makes no context.
  int (*device_count)();

  // UUIDs of those devices, in their order, as CudaGpus has them. Makes no context.
  void (*device_uuids)(std::vector<std::string>* uuids);

  // Makes no context either: the first Allocate or NewCopyStream does.
  //
  // The device, beyond what Device says: NewCopyStream pins 48 MiB of host memory for as long as the stream
  // lives and has it promised by `ram` first, without waiting; so it fails with BUDGET_EXHAUSTED or
  // MODEL_EXCEEDS_BUDGET too, and must not be called with the cache's mutex held. `to` of a piece has to live
  // until its copy was awaited or the stream ended, as `from`.
  void (*make_device)(const CudaDeviceRequest& request, CudaDeviceReply* reply);
};

inline constexpr uint64_t kCudaPluginAbi =
    (((uint64_t{2} << 16 | sizeof(Device)) << 16 | sizeof(MemoryBudget)) << 8 | sizeof(CudaDeviceRequest))
        << 8 |
    kMemoryUses;
inline constexpr char kCudaPlugin[] = "latentd_cuda.so";
inline constexpr char kCudaPluginEntry[] = "latentd_cuda_api";

}  // namespace latentd

// All that the plug-in exports.
extern "C" __attribute__((visibility("default"))) const latentd::CudaPluginApi* latentd_cuda_api();

#endif  // LATENTD_CACHE_CUDA_CUDA_DEVICE_H_
