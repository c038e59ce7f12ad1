// The header of a .safetensors file, parsed as untrusted input.
//
// Checks, each with an error that names the tensor: header length within the file and at most 100 MB; JSON
// nesting and number of tensors bounded; known dtype; shape product without overflow, zeros left out; byte
// range of the right length, inside the file; ranges contiguous from 0 to the end, without gaps or overlaps;
// no duplicate names. Format: https://github.com/huggingface/safetensors
#ifndef LATENTD_CACHE_WEIGHTS_SAFETENSORS_HEADER_H_
#define LATENTD_CACHE_WEIGHTS_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

enum class DType {
  kF64,
  kF32,
  kF16,
  kBF16,
  kF8E4M3,
  kF8E5M2,
  kI64,
  kI32,
  kI16,
  kI8,
  kU8,
  kBool,
  // Known, and read by nothing here.
  kU64,
  kU32,
  kU16,
  kC64,
  kF8E8M0,
  kF6E3M2,
  kF6E2M3,
  kF4
};

// Bytes of one element; 0 for those of less than one byte.
int64_t ElementSize(DType dtype);
absl::string_view DTypeName(DType dtype);
// Those that weights are read from: fp64 to fp8, without formats that need a scale for each block.
bool IsFloatingPoint(DType dtype);

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // from the start of the file
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // by offset
  std::map<std::string, std::string>
      metadata;  // at most 4096 entries; texts are cut to 4096
                 // bytes, but for those that say how to read the tensors: to 16 MiB
};

// `start`: the file's first bytes, at least 8 + header length of them (or all of a shorter file).
// `file_bytes`: the size of the whole file. Errors: DATA_LOSS CORRUPT_FILE.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view start, int64_t file_bytes);

// Largest header that is read.
inline constexpr int64_t kMaxSafetensorsHeader = 100'000'000;

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_SAFETENSORS_HEADER_H_
