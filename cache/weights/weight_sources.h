// Which tensors of a file are which weights of a layout, told by the file's header.
//
// Pure, but that marks and scales of a few bytes are read; any thread.
#ifndef LATENTD_CACHE_WEIGHTS_WEIGHT_SOURCES_H_
#define LATENTD_CACHE_WEIGHTS_WEIGHT_SOURCES_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/weights/component_layout.h"
#include "cache/weights/key_map.h"
#include "cache/weights/weight_files.h"

namespace latentd {

// A tensor, or rows of one, that is a weight.
struct WeightSource {
  Slot slot;
  std::string tensor;
  int64_t row_begin = 0;
  int64_t rows = -1;  // -1: the whole tensor
  KeyTransform transform = KeyTransform::kNone;
};

struct WeightSources {
  std::vector<std::vector<WeightSource>> by_slot;  // of each weight, the first one counts
  std::map<std::string, std::string> scales;       // of 8-bit weights: by module, the tensor that holds it
  std::vector<std::string> marks;                  // ComfyUI's notes on how a module's weight is quantised
  std::vector<std::string> known;                  // that checkpoints carry and no network uses
  // Names below the prefix that the layout does not have: of things that are none of a network's (a trainer's
  // losses and averages, other towers of the same model), and others.
  std::vector<std::string> extra, unknown;
};

WeightSources FindWeightSources(const WeightFiles& files, const ComponentLayout& layout,
                                const KeyMap* key_map, absl::string_view prefix);

// Whether LoadWeights will take them, as far as can be told without the values. Errors: FAILED_PRECONDITION
// WEIGHTS_MISMATCH with the first missing, unknown or misshapen names, UNSUPPORTED_MODEL for a quantisation
// that is not read, by name; UNIMPLEMENTED UNSUPPORTED_DTYPE.
absl::Status CheckWeightSources(const WeightFiles& files, const ComponentLayout& layout,
                                const WeightSources& sources, absl::string_view prefix);

// The value of a scale. Errors: UNIMPLEMENTED UNSUPPORTED_DTYPE where it is no finite number.
absl::StatusOr<double> ReadScale(const WeightFiles& files, const std::string& tensor);

// Bytes of the weights, by the type in which the file has them; those of 64 bits count as the 32 that are
// kept.
std::map<DType, int64_t> BytesByType(const WeightFiles& files, const WeightSources& sources);

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_WEIGHT_SOURCES_H_
