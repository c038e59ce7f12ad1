// Memory for large tensors of the host.
#ifndef LATENTD_CACHE_WEIGHTS_HOST_TENSOR_H_
#define LATENTD_CACHE_WEIGHTS_HOST_TENSOR_H_

#include "ATen/core/Tensor.h"
#include "c10/core/TensorOptions.h"

namespace latentd {

// A contiguous tensor in host memory with nothing in it yet, on a boundary of 64 bytes at least. From 4 MiB
// on it has pages of its own, huge ones where the system gives them (touching fresh 4-KiB pages takes longer
// than copying into them), and they go back to the system with the tensor. Undefined when the system has no
// memory. Thread-safe.
at::Tensor EmptyHostTensor(at::IntArrayRef shape, const at::TensorOptions& options);

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_HOST_TENSOR_H_
