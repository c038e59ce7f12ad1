#include "patcher/model_patch.h"

#include <cmath>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "patcher/adapter_config.h"
#include "patcher/patch_identity.h"

namespace latentd {
namespace {

NamedShapes ShapesOf(const WeightFiles& files) {
  NamedShapes shapes;
  for (const auto& [name, entry] : files.tensors()) shapes.emplace(name, entry.info->shape);
  return shapes;
}

bool IsFinite(const at::Tensor& t) {
  return t.numel() == 0 || t.is_meta() || std::isfinite(t.abs().amax().to(at::kDouble).item<double>());
}

}  // namespace

absl::StatusOr<PatchSummary> ModelPatch::Summarize(const WeightFiles& files) {
  const NamedShapes shapes = ShapesOf(files);
  ASSIGN_OR_RETURN(const PatchKeys keys, PatchKeys::Group(shapes));
  PatchSummary summary{.format = keys.Format(),
                       .family = FamilyOf(keys, shapes),
                       .layers = static_cast<int64_t>(keys.layers.size()),
                       .layer_types = {},
                       .embeddings = {keys.embeddings.begin(), keys.embeddings.end()}};
  for (const auto& [name, layer] : keys.layers) ++summary.layer_types[LayerType(layer, shapes)];
  return summary;
}

int64_t ModelPatch::MemoryBytes(const WeightFiles& files) {
  int64_t bytes = files.tensor_bytes();
  for (const auto& [name, entry] : files.tensors()) {
    const DType type = entry.info->dtype;
    if (type == DType::kF8E4M3 || type == DType::kF8E5M2) bytes += entry.info->bytes;  // kept as bf16
  }
  return bytes;
}

absl::Status ModelPatch::Build(const NamedShapes& shapes, const Read& read, const LoadContext& context,
                               int64_t total) {
  ASSIGN_OR_RETURN(const PatchKeys keys, PatchKeys::Group(shapes));
  ASSIGN_OR_RETURN(const AdapterConfig config, AdapterConfig::Parse(metadata_));
  for (const auto& [name, parts] : keys.layers) {
    if (context.cancelled()) return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "load cancelled");
    ASSIGN_OR_RETURN(PatchLayer layer, MakeLayer(name, parts, shapes, read));
    RETURN_IF_ERROR(config.SetScale(layer));
    bool finite = true;
    layer.ForEachTensor([&](const at::Tensor& t) { finite = finite && IsFinite(t); });
    bytes_ += layer.bytes();
    if (!finite) return InvalidLayer(name, "holds a value that is not finite");
    context.Progress(bytes_, total);
    if (const LowRank* low_rank = layer.low_rank()) {
      LowRank(*low_rank).ForEachTensor(
          [&](const at::Tensor& t) { device_bytes_ += PaddedBytes(static_cast<int64_t>(t.nbytes())); });
    }
    layers_.push_back(std::move(layer));
  }
  format_ = keys.Format();
  family_ = FamilyOf(keys, shapes);
  ignored_ = keys.ignored;
  embeddings_ = {keys.embeddings.begin(), keys.embeddings.end()};
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const ModelPatch>> ModelPatch::Load(std::shared_ptr<const WeightFiles> files,
                                                                   const LoadContext& context) {
  auto patch = std::make_shared<ModelPatch>();
  patch->metadata_ = files->metadata();
  files->TakeSamples();
  const absl::Status built = patch->Build(
      ShapesOf(*files), [&](const std::string& name) { return files->Read(name); }, context,
      MemoryBytes(*files));
  RETURN_IF_ERROR(files->Check());  // then what was read says nothing about the file
  RETURN_IF_ERROR(built);
  patch->files_ = std::move(files);
  return patch;
}

absl::StatusOr<std::shared_ptr<const ModelPatch>> ModelPatch::Outline(const WeightFiles& files) {
  auto patch = std::make_shared<ModelPatch>();
  patch->metadata_ = files.metadata();
  const auto read = [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
    const TensorInfo& info = *files.tensors().at(name).info;
    constexpr int64_t kSmall = 1 << 10;  // bytes: an alpha, the size of a sparse part
    if (info.bytes <= kSmall || !IsFloatingPoint(info.dtype)) return files.Read(name);
    return at::empty(info.shape, at::TensorOptions().device(at::kMeta));
  };
  const LoadContext context([] { return false; }, [](int64_t, int64_t) {});
  RETURN_IF_ERROR(patch->Build(ShapesOf(files), read, context, 0));
  RETURN_IF_ERROR(files.Check());
  return patch;
}

absl::StatusOr<std::shared_ptr<const ModelPatch>> ModelPatch::FromTensors(
    const std::map<std::string, at::Tensor>& tensors, const std::map<std::string, std::string>& metadata) {
  NamedShapes shapes;
  for (const auto& [name, tensor] : tensors) shapes.emplace(name, tensor.sizes().vec());
  auto patch = std::make_shared<ModelPatch>();
  patch->metadata_ = metadata;
  const LoadContext context([] { return false; }, [](int64_t, int64_t) {});
  RETURN_IF_ERROR(patch->Build(
      shapes, [&](const std::string& name) -> absl::StatusOr<at::Tensor> { return tensors.at(name); },
      context, 0));
  return patch;
}

absl::StatusOr<std::shared_ptr<const Resource>> ModelPatch::CopyTo(Device& device, const std::vector<bool>&,
                                                                   const Resource*,
                                                                   std::stop_token stop) const {
  auto copy = std::make_shared<ModelPatch>(*this);
  copy->files_ = nullptr;
  for (PatchLayer& layer : copy->layers_) {
    if (stop.stop_requested()) {
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED",
                       "cancelled while moving a LoRA to a device");
    }
    layer.bias = at::Tensor();
    if (const LowRank* low_rank = layer.low_rank()) {
      LowRank moved = *low_rank;
      for (at::Tensor* t : {&moved.down, &moved.up, &moved.mid}) {
        if (!t->defined()) continue;
        ASSIGN_OR_RETURN(*t, CopyTensorTo(*t, device));
      }
      layer.math = std::move(moved);
    } else {
      layer.math = std::monostate();  // meets its weight in host memory
    }
  }
  RETURN_IF_ERROR(Check());
  return copy;
}

}  // namespace latentd
