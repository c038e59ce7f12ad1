// Weight files as a set of named tensors: one .safetensors file, or the shards of an index.
//
// Files are untrusted input: everything that a header says is checked before it is used (see
// safetensors_header.h); pickles are recognised by their content and refused.
#ifndef LATENTD_CACHE_WEIGHTS_WEIGHT_FILES_H_
#define LATENTD_CACHE_WEIGHTS_WEIGHT_FILES_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/model_cache.h"
#include "cache/weights/key_map.h"
#include "cache/weights/safetensors_header.h"
#include "cache/weights/weight_set.h"

namespace latentd {

class MappedFile;

// Headers only, until a tensor is asked for. Immutable; thread-safe.
class WeightFiles {
 public:
  // `path` is a .safetensors file, a *.safetensors.index.json, or a folder that holds either. Errors:
  // those of MappedFile::Open; NOT_FOUND, DATA_LOSS CORRUPT_FILE (names the file's base name and the tensor),
  // FAILED_PRECONDITION UNSAFE_FILE for pickles.
  static absl::StatusOr<std::shared_ptr<const WeightFiles>> Open(const std::string& path);

  struct Entry {
    const TensorInfo* info;
    int file;  // index into files()
  };

  const std::map<std::string, Entry>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // The first of the files, by the last two parts of its path.
  std::string label() const;

  // Bytes of all tensors.
  int64_t tensor_bytes() const { return tensor_bytes_; }

  // Stands for the files as they were opened (MappedFile::identity): another one when a file was replaced or
  // changed, whatever its name. 16 hex digits.
  const std::string& fingerprint() const { return fingerprint_; }
  // The fingerprint that Open() would find for the one file at `path`. Opens nothing.
  static std::string FingerprintAt(const std::string& path);

  // The tensor of that name as it lies in the file's mapping, without a copy, at whatever address that is:
  // only aligned for its type. For weights that are read through a WeightView, which sees to the alignment.
  // REQUIRES: the name is in tensors().
  absl::StatusOr<at::Tensor> Alias(absl::string_view name) const { return Read(name, /*compute=*/false); }

  // The same for direct use: 16-byte aligned, so a copy where the file is not.
  absl::StatusOr<at::Tensor> Read(absl::string_view name) const { return Read(name, /*compute=*/true); }

  // The errors of MappedFile::Check, for the first of the files that has one.
  absl::Status Check() const;
  // Whether every file is still where it was opened.
  bool at_its_place() const;
  // Before the bytes are used; see MappedFile. Done by LoadWeights.
  void TakeSamples() const;

 private:
  struct File {
    std::string path;
    std::vector<TensorInfo> infos;
    std::shared_ptr<MappedFile> mapping;
  };
  absl::StatusOr<at::Tensor> Read(absl::string_view name, bool compute) const;
  absl::Status AddFile(const std::string& path);
  void Finish();

  std::vector<File> files_;
  std::map<std::string, Entry> tensors_;
  std::map<std::string, std::string> metadata_;
  int64_t tensor_bytes_ = 0;
  std::string fingerprint_;
};

// Bytes of the weights that LoadWeights reads from the same: what is charged for a component, whatever else
// its file holds. At least what the loaded set has; more only where tensors are tied in ways that the names
// do not show. Reads no values.
int64_t WeightBytes(const WeightFiles& files, const ComponentLayout& layout, const KeyMap* key_map,
                    absl::string_view prefix);
// The same by the type in which the file has them.
std::map<DType, int64_t> WeightBytesByType(const WeightFiles& files, const ComponentLayout& layout,
                                           const KeyMap* key_map, absl::string_view prefix);

// Whether LoadWeights will take them, as far as can be told without the values: its errors.
absl::Status CheckWeights(const WeightFiles& files, const ComponentLayout& layout, const KeyMap* key_map,
                          absl::string_view prefix);

// The tensors that LoadWeights reads, and those that it knows and needs not, such as position ids. May have
// one twice.
std::vector<std::string> TensorsOf(const WeightFiles& files, const ComponentLayout& layout,
                                   const KeyMap* key_map, absl::string_view prefix);

// What LoadWeights makes of the same depends on nothing else: equal texts, equal weights. 16 hex digits.
std::string WeightsFingerprint(const WeightFiles& files, const ComponentLayout& layout, const KeyMap* key_map,
                               absl::string_view prefix);

// Reads a whole component. Names go through `key_map` when it is not null, after `prefix` is taken off;
// source tensors that start differently are left alone, and so is what is none of a network's
// (weight_sources.h). Shapes are checked against the layout. 64-bit numbers become 32-bit ones. Cancellable
// per tensor. Errors: those of CheckWeightSources and WeightFiles::Check.
absl::StatusOr<std::shared_ptr<const WeightSet>> LoadWeights(std::shared_ptr<const WeightFiles> files,
                                                             std::shared_ptr<const ComponentLayout> layout,
                                                             const KeyMap* key_map, absl::string_view prefix,
                                                             const LoadContext& context);

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_WEIGHT_FILES_H_
