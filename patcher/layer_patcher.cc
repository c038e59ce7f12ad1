// A layer's difference is scale · weight · up · down. Direct: summed over all patches of a tensor in fp32,
// added to the fp32 value of the weight, rounded once to its storage type. Sidecar: the same sum as one pair
// of matrices, patches concatenated along the rank.
#include "patcher/layer_patcher.h"

#include <algorithm>

#include "ATen/ATen.h"
#include "c10/core/GradMode.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/error.h"
#include "patcher/layer_resolver.h"

namespace latentd {
namespace {

absl::Status Mismatch(const std::string& name, absl::string_view what, ErrorDetails details) {
  details["lora"] = name;
  return MakeError(absl::StatusCode::kFailedPrecondition, "LORA_MISMATCH", absl::StrCat("LoRA ", name, " ", what),
                   details);
}

// Does the layer fit the tensors that its name means?
absl::Status CheckShapes(const std::string& name, const LoraLayer& layer, const std::vector<LayerPart>& parts,
                         const ComponentLayout& layout) {
  int64_t rows = 0;
  for (const LayerPart& part : parts) {
    const auto& shape = layout[part.weight].shape;
    rows = std::max(rows, part.row_begin + part.rows);
    if (shape.size() != 2 || shape[1] != layer.down.size(1)) {
      return Mismatch(name,
                      absl::StrCat("does not fit: layer ", layer.name, " takes ", layer.down.size(1), " inputs, ",
                                   layout[part.weight].name, " is [", absl::StrJoin(shape, ", "), "]"),
                      {{"layer", layer.name}});
    }
  }
  if (rows != layer.up.size(0)) {
    return Mismatch(name,
                    absl::StrCat("does not fit: layer ", layer.name, " gives ", layer.up.size(0), " outputs, the model has ",
                                 rows),
                    {{"layer", layer.name}});
  }
  return absl::OkStatus();
}

// One layer's share in one tensor.
struct Contribution {
  size_t spec;
  const LoraLayer* layer;
  LayerPart part;
};

// The rows of `up` for a part, with weight and scale, in fp32.
at::Tensor ScaledUp(const Contribution& c, double weight) {
  at::Tensor up = c.layer->up.narrow(0, c.part.row_begin, c.part.rows).to(at::kFloat);
  if (c.part.swap_halves) {
    auto halves = up.chunk(2, 0);
    up = at::cat({halves[1], halves[0]}, 0);
  }
  return up * (weight * c.layer->scale);
}

int64_t SidecarRank(const std::vector<Contribution>& contributions) {
  int64_t rank = 0;
  for (const Contribution& c : contributions) rank += c.layer->rank();
  return rank;
}

}  // namespace

absl::StatusOr<PatchReport> LayerPatcher::Match(const ModelPatch& patch, const std::string& name, double weight,
                                                absl::Span<const PatchTarget> targets) {
  PatchReport report;
  report.name = name;
  report.format = patch.format();
  report.weight = weight;
  report.layers_in_file = static_cast<int64_t>(patch.layers().size());
  std::vector<LayerResolver> resolvers;
  resolvers.reserve(targets.size());
  for (const PatchTarget& target : targets) resolvers.emplace_back(target);
  int64_t matched = 0;
  for (const LoraLayer& layer : patch.layers()) {
    bool found = false;
    for (size_t t = 0; t < targets.size() && !found; ++t) {
      const std::vector<LayerPart> parts = resolvers[t].Resolve(layer.name);
      if (parts.empty()) continue;
      RETURN_IF_ERROR(CheckShapes(name, layer, parts, *targets[t].layout));
      ++report.matched[targets[t].component];
      ++matched;
      found = true;
    }
    if (found) continue;
    ++report.unmatched_count;
    if (report.unmatched.size() < kSampleKeys) report.unmatched.push_back(layer.name);
  }
  if (matched == 0) {
    const std::string sample = absl::StrJoin(report.unmatched, ", ");
    return Mismatch(name,
                    absl::StrCat("is for another architecture: none of its ", report.layers_in_file,
                                 " layers matches this model (", sample, ")"),
                    {{"sample", sample}, {"layers_in_file", absl::StrCat(report.layers_in_file)}});
  }
  return report;
}

absl::StatusOr<std::shared_ptr<const Overlay>> LayerPatcher::Apply(const WeightSet& weights, const PatchTarget& target,
                                                                   std::vector<PatchSpec> specs,
                                                                   const ApplyOptions& options,
                                                                   std::vector<PatchReport>* reports) {
  std::stable_sort(specs.begin(), specs.end(),
                   [](const PatchSpec& a, const PatchSpec& b) { return a.name < b.name; });
  const ComponentLayout& layout = weights.layout();
  const LayerResolver resolver(target);

  // Which patches meet in which tensor.
  std::map<int32_t, std::vector<Contribution>> by_slot;
  for (size_t s = 0; s < specs.size(); ++s) {
    if (specs[s].weight == 0) continue;
    for (const LoraLayer& layer : specs[s].patch->layers()) {
      const std::vector<LayerPart> parts = resolver.Resolve(layer.name);
      if (parts.empty()) continue;
      RETURN_IF_ERROR(CheckShapes(specs[s].name, layer, parts, layout));
      for (const LayerPart& part : parts) by_slot[part.weight.index].push_back({s, &layer, part});
    }
  }
  if (by_slot.empty()) return nullptr;
  const bool direct = options.mode == PatchMode::kDirect;

  // Promise the memory before any of it is used.
  auto overlay = std::make_shared<Overlay>();
  for (const auto& [index, contributions] : by_slot) {
    const at::Tensor& base = weights[Slot{index}].data;
    overlay->bytes_ += direct ? static_cast<int64_t>(base.nbytes())
                              : SidecarRank(contributions) * (base.size(0) + base.size(1)) *
                                    static_cast<int64_t>(c10::elementSize(options.compute));
  }
  if (options.device != nullptr) {
    ASSIGN_OR_RETURN(overlay->reservation_,
                     options.device->budget().Reserve({.bytes = overlay->bytes_,
                                                       .owner = options.owner,
                                                       .what = absl::StrCat("patches of ", target.component),
                                                       .stop = options.stop}));
  }

  const c10::NoGradGuard no_grad;
  std::vector<std::pair<int64_t, int64_t>> counts(specs.size());  // direct, sidecar tensors by spec
  if (direct) {
    overlay->merged_.resize(layout.tensors().size());
  } else {
    overlay->sidecars_.resize(layout.tensors().size());
  }
  for (const auto& [index, contributions] : by_slot) {
    if (options.stop.stop_requested()) {
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while patches were applied");
    }
    const at::Tensor& base = weights[Slot{index}].data;
    if (direct) {
      at::Tensor sum = base.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      for (const Contribution& c : contributions) {
        sum.addmm_(ScaledUp(c, specs[c.spec].weight), c.layer->down.to(at::kFloat));
        ++counts[c.spec].first;
      }
      overlay->merged_[static_cast<size_t>(index)] = sum.to(base.scalar_type());
      continue;
    }
    std::vector<at::Tensor> downs;
    std::vector<at::Tensor> ups;
    for (const Contribution& c : contributions) {
      downs.push_back(c.layer->down.to(options.compute));
      ups.push_back(ScaledUp(c, specs[c.spec].weight));
      ++counts[c.spec].second;
    }
    // A single down of the compute type would alias the patch; that is fine, the overlay holds its handle.
    overlay->sidecars_[static_cast<size_t>(index)] = std::make_unique<Sidecar>(
        Sidecar{downs.size() == 1 ? downs[0] : at::cat(downs, 0),
                (ups.size() == 1 ? ups[0] : at::cat(ups, 1)).to(options.compute)});
  }
  if (reports != nullptr) {
    for (size_t s = 0; s < specs.size() && s < reports->size(); ++s) {
      (*reports)[s].direct_tensors += counts[s].first;
      (*reports)[s].sidecar_tensors += counts[s].second;
    }
  }
  overlay->specs_ = std::move(specs);
  return overlay;
}

}  // namespace latentd
