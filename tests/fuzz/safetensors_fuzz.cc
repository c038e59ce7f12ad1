// Headers of safetensors files: no tensor lies outside of the file, whatever the header says.
#include <cstdint>
#include <cstdlib>

#include "cache/weights/safetensors_header.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view file(reinterpret_cast<const char*>(data), size);
  const auto header = latentd::ParseSafetensorsHeader(file, static_cast<int64_t>(size));
  if (!header.ok()) return 0;
  for (const latentd::TensorInfo& tensor : header->tensors) {
    int64_t elements = 1;
    for (const int64_t dim : tensor.shape) {
      if (dim < 0 || __builtin_mul_overflow(elements, dim, &elements)) std::abort();
    }
    const int64_t element = latentd::ElementSize(tensor.dtype);
    if (element > 0 && elements * element != tensor.bytes) std::abort();
    if (tensor.offset < 8 || tensor.bytes > static_cast<int64_t>(size) - tensor.offset) std::abort();
  }
  return 0;
}
