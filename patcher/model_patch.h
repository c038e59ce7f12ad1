// A parsed LoRA-like file: the layers that it holds, under the names that the file gives them.
//
// Parsing knows no model. Which component and tensor a layer belongs to is found when the patch is applied
// (LayerPatcher) or inspected. Immutable; cached like a component, with host bytes counted in full.
#ifndef LATENTD_PATCHER_MODEL_PATCH_H_
#define LATENTD_PATCHER_MODEL_PATCH_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "cache/resource.h"
#include "cache/weights/weight_files.h"
#include "patcher/layers/patch_layer.h"
#include "patcher/patch_keys.h"

namespace latentd {

// What a file's header tells of it.
struct PatchSummary {
  std::string format;
  std::string family;  // a guess; see patch_identity.h
  int64_t layers = 0;
  std::map<std::string, int64_t> layer_types;  // number of layers by type (LayerType in patch_keys.h)
  std::vector<std::string> embeddings = {};
};

class ModelPatch : public Resource {
 public:
  // Reads no values, so that a folder of large files can be listed. Errors: those of Load that names show.
  static absl::StatusOr<PatchSummary> Summarize(const WeightFiles& files);

  // Parses and checks a file. All of it or nothing: a file with keys of a kind that is not supported is
  // refused, not applied in part. Errors: DATA_LOSS CORRUPT_FILE; INVALID_ARGUMENT INVALID_LORA (a layer
  // incomplete, shapes that do not fit each other, alpha or a value not finite, no layer at all);
  // UNIMPLEMENTED UNSUPPORTED_LORA with the layer type and sample keys.
  static absl::StatusOr<std::shared_ptr<const ModelPatch>> Load(std::shared_ptr<const WeightFiles> files,
                                                                const LoadContext& context);

  // The layers of a file without their values: can be matched, not applied. Reads small tensors alone.
  // Errors: those of Load that names and shapes show.
  static absl::StatusOr<std::shared_ptr<const ModelPatch>> Outline(const WeightFiles& files);

  // The most that the layers of a file take in memory.
  static int64_t MemoryBytes(const WeightFiles& files);

  // The same for tensors in memory. Tensors without storage (at::kMeta) make a patch that can be matched, not
  // applied; scalars need values.
  static absl::StatusOr<std::shared_ptr<const ModelPatch>> FromTensors(
      const std::map<std::string, at::Tensor>& tensors,
      const std::map<std::string, std::string>& metadata = {});

  // In order of name; the same in a copy on a device, where layers that are never computed beside a weight
  // have no tensors.
  const std::vector<PatchLayer>& layers() const { return layers_; }
  // Tensors of the file that belong to no layer (bundled embeddings).
  int64_t ignored() const { return ignored_; }
  // Names of the textual inversions that the file brings with it, in order.
  const std::vector<std::string>& embeddings() const { return embeddings_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // "diffusers/PEFT", "kohya", "BFL (native names)": how the file names its layers.
  const std::string& format() const { return format_; }
  // The architecture that it seems to be for; empty when its names do not tell.
  const std::string& family() const { return family_; }

  // The file that it was read from; null for tensors in memory, and in a copy on a device.
  const std::shared_ptr<const WeightFiles>& files() const { return files_; }

  int64_t bytes() const override { return bytes_; }
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device& device, const std::vector<bool>& resident,
                                                         const Resource* have,
                                                         std::stop_token stop) const override;
  std::vector<ResourceBlock> device_blocks() const override { return {{device_bytes_, true}}; }
  absl::Status Check() const override { return files_ ? files_->Check() : absl::OkStatus(); }
  bool at_its_place() const override { return files_ == nullptr || files_->at_its_place(); }

 private:
  using Read = std::function<absl::StatusOr<at::Tensor>(const std::string&)>;
  absl::Status Build(const NamedShapes& shapes, const Read& read, const LoadContext& context, int64_t total);

  std::vector<PatchLayer> layers_;
  std::map<std::string, std::string> metadata_;
  std::string format_, family_;
  std::vector<std::string> embeddings_;
  std::shared_ptr<const WeightFiles> files_;
  int64_t bytes_ = 0;
  int64_t device_bytes_ = 0;
  int64_t ignored_ = 0;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_MODEL_PATCH_H_
