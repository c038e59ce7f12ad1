// Where `cuda:N` comes from: the plug-in latentd_cuda.so (cache/cuda/cuda_device.h), beside the program, in
// its
// ../lib/latentd, or in the bin folder of a build tree.
//
// The first call that finds a driver loads LibTorch's CUDA part and the plug-in, which takes some tenths of a
// second and 200 MB of memory; a program that asks for no cuda device pays nothing. It must come before
// LibTorch is asked for CUDA in any way (at::hasCUDA(), a cuda tensor): LibTorch remembers that there was
// none.
//
// Thread-safe. Nothing is ever unloaded.
#ifndef LATENTD_CACHE_CUDA_PLUGIN_H_
#define LATENTD_CACHE_CUDA_PLUGIN_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "cache/cuda/cuda_device.h"
#include "cache/device.h"
#include "cache/device_choice.h"
#include "cache/memory_budget.h"

namespace latentd {

// cuda:`index` with a budget of `cap_bytes` (0: all that the device has). Makes no context on the device.
// `ram` must outlive the device's copy streams. Errors: UNAVAILABLE DEVICE_NOT_FOUND; the message says
// whether the driver, the device or the plug-in is missing, and what to do.
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int index, int64_t cap_bytes, RamBudget* ram);

// How many cuda devices there are: cuda:0 … cuda:N−1. 0 where there is no driver or no plug-in.
int CudaDeviceCount();

// The same with their UUIDs, or why there is none.
CudaGpus ListCudaGpus();

// The plug-in itself, with or without a driver. Errors: UNAVAILABLE DEVICE_NOT_FOUND.
absl::StatusOr<const CudaPluginApi*> LoadCudaPlugin();

}  // namespace latentd

#endif  // LATENTD_CACHE_CUDA_PLUGIN_H_
