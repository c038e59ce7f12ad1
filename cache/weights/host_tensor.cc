#include "cache/weights/host_tensor.h"

#include <sys/mman.h>

#include "ATen/ATen.h"

namespace latentd {

at::Tensor EmptyHostTensor(at::IntArrayRef shape, const at::TensorOptions& options) {
  constexpr size_t kLarge = size_t{4} << 20;
  const size_t size = static_cast<size_t>(c10::multiply_integers(shape)) * options.dtype().itemsize();
  if (size < kLarge) return at::empty(shape, options);
  void* const p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return {};
  madvise(p, size, MADV_HUGEPAGE);
  return at::from_blob(
      p, shape, [size](void* q) { munmap(q, size); }, options);
}

}  // namespace latentd
