#include "patcher/contribution.h"

#include <algorithm>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "cache/error.h"

namespace latentd {
namespace {

// The rows of `up` for a part, with weight and scale, in fp32.
at::Tensor ScaledUp(const Contribution& c) {
  at::Tensor up = c.layer->up.narrow(0, c.part.row_begin, c.part.rows).to(at::kFloat);
  if (c.part.swap_halves) {
    auto halves = up.chunk(2, 0);
    up = at::cat({halves[1], halves[0]}, 0);
  }
  return up * (c.weight * c.layer->scale);
}

}  // namespace

absl::Status LoraMismatch(const std::string& name, absl::string_view what, ErrorDetails details) {
  details["lora"] = name;
  return MakeError(absl::StatusCode::kFailedPrecondition, "LORA_MISMATCH", absl::StrCat("LoRA ", name, " ", what),
                   details);
}

absl::Status CheckShapes(const std::string& name, const LoraLayer& layer, const std::vector<LayerPart>& parts,
                         const ComponentLayout& layout) {
  int64_t rows = 0;
  for (const LayerPart& part : parts) {
    const auto& shape = layout[part.weight].shape;
    rows = std::max(rows, part.row_begin + part.rows);
    if (shape.size() != 2 || shape[1] != layer.down.size(1)) {
      return LoraMismatch(name,
                      absl::StrCat("does not fit: layer ", layer.name, " takes ", layer.down.size(1), " inputs, ",
                                   layout[part.weight].name, " is [", absl::StrJoin(shape, ", "), "]"),
                      {{"layer", layer.name}});
    }
  }
  if (rows != layer.up.size(0)) {
    return LoraMismatch(name,
                    absl::StrCat("does not fit: layer ", layer.name, " gives ", layer.up.size(0), " outputs, the model has ",
                                 rows),
                    {{"layer", layer.name}});
  }
  return absl::OkStatus();
}

absl::StatusOr<Contributions> Collect(const ComponentLayout& layout, const PatchTarget& target,
                                      const std::vector<PatchSpec>& specs, bool on_host) {
  const LayerResolver resolver(target);
  Contributions by_slot;
  for (size_t s = 0; s < specs.size(); ++s) {
    const PatchSpec& spec = specs[s];
    if (spec.weight == 0) continue;
    const ModelPatch& patch = on_host && spec.handle ? spec.handle.As<ModelPatch>() : *spec.patch;
    for (const LoraLayer& layer : patch.layers()) {
      const std::vector<LayerPart> parts = resolver.Resolve(layer.name);
      if (parts.empty()) continue;
      RETURN_IF_ERROR(CheckShapes(spec.name, layer, parts, layout));
      for (const LayerPart& part : parts) by_slot[part.weight.index].push_back({&layer, s, spec.weight, part});
    }
  }
  return by_slot;
}

int64_t MergedBytes(const WeightSet& base, const Contributions& contributions) {
  int64_t bytes = 0;
  for (const auto& [index, shares] : contributions) bytes += static_cast<int64_t>(base[Slot{index}].data.nbytes());
  return bytes;
}

absl::StatusOr<std::shared_ptr<const WeightSet>> Merge(const WeightSet& base, const Contributions& contributions,
                                                       const std::function<bool()>& cancelled) {
  const c10::NoGradGuard no_grad;
  std::vector<Weight> merged(base.layout().tensors().size());
  for (const auto& [index, shares] : contributions) {
    if (cancelled()) {
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while patches were merged");
    }
    const Weight& weight = base[Slot{index}];
    at::Tensor sum = weight.data.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    for (const Contribution& c : shares) sum.addmm_(ScaledUp(c), c.layer->down.to(at::kFloat));
    merged[static_cast<size_t>(index)] = {sum.to(weight.data.scalar_type()), weight.form};
  }
  RETURN_IF_ERROR(base.Check());
  return std::make_shared<const WeightSet>(base, std::move(merged));
}

int64_t SidecarBytes(const ComponentLayout& layout, const Contributions& contributions, at::ScalarType compute) {
  int64_t elements = 0;
  for (const auto& [index, shares] : contributions) {
    const std::vector<int64_t>& shape = layout[Slot{index}].shape;
    int64_t rank = 0;
    for (const Contribution& c : shares) rank += c.layer->rank();
    elements += rank * (shape[0] + shape[1]);
  }
  return elements * static_cast<int64_t>(c10::elementSize(compute));
}

std::unique_ptr<Sidecar> MakeSidecar(const std::vector<Contribution>& contributions, at::ScalarType compute) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> downs;
  std::vector<at::Tensor> ups;
  for (const Contribution& c : contributions) {
    downs.push_back(c.layer->down.to(compute));
    ups.push_back(ScaledUp(c));
  }
  return std::make_unique<Sidecar>(Sidecar{downs.size() == 1 ? downs[0] : at::cat(downs, 0),
                                           (ups.size() == 1 ? ups[0] : at::cat(ups, 1)).to(compute)});
}

}  // namespace latentd
