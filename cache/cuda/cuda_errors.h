// Which errors of CUDA mean what.
#ifndef LATENTD_CACHE_CUDA_CUDA_ERRORS_H_
#define LATENTD_CACHE_CUDA_CUDA_ERRORS_H_

#include <driver_types.h>

namespace latentd {

enum class CudaFailure {
  kOutOfMemory,  // there is no room now
  kLost,         // the process can use the device no more: every later call fails, until it starts anew
  kOther,        // this call failed
};

inline CudaFailure ClassifyCudaError(cudaError_t code) {
  switch (code) {
    case cudaErrorMemoryAllocation:
      return CudaFailure::kOutOfMemory;
    // The device, the driver or the way to it is gone.
    case cudaErrorDevicesUnavailable:
    case cudaErrorDeviceUninitialized:
    case cudaErrorContextIsDestroyed:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorMpsConnectionFailed:
    case cudaErrorMpsRpcFailure:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorECCUncorrectable:
    // A kernel died and took the context with it; CUDA's documentation says of each that the process must be
    // terminated and relaunched.
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
    case cudaErrorUnknown:
      return CudaFailure::kLost;
    default:
      return CudaFailure::kOther;
  }
}

}  // namespace latentd

#endif  // LATENTD_CACHE_CUDA_CUDA_ERRORS_H_
