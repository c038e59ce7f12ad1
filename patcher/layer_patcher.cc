#include "patcher/layer_patcher.h"

#include <algorithm>
#include <set>

#include "ATen/ATen.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "patcher/contribution.h"
#include "patcher/layer_resolver.h"

namespace latentd {
namespace {

// What was merged into what, of each tensor: two modes, or two ways to store a component, merge different
// tensors of one set of patches.
std::string DescribeMerge(const ComponentLayout& layout, const LayerPatcher::FormOf& form,
                          const std::vector<PatchSpec>& specs, const Contributions& contributions) {
  std::string text;
  for (const auto& [index, shares] : contributions) {
    const std::string& name = layout[Slot{index}].name;
    absl::StrAppend(&text, name.size(), ":", name, " ", static_cast<int>(form(Slot{index})), "\n");
    for (const Contribution& c : shares) {
      absl::StrAppend(&text, specs[c.spec].handle.key().ToString(), " ", c.layer->name.size(), ":",
                      c.layer->name, " ", c.part.row_begin, "+", c.part.rows,
                      c.part.swap_halves ? " swapped" : "", c.bias ? " bias" : "",
                      absl::StrFormat(" %.17g\n", c.weight));
    }
  }
  return text;
}

// Those that take part.
std::set<size_t> SpecsOf(const Contributions& contributions) {
  std::set<size_t> specs;
  for (const auto& [index, shares] : contributions) {
    for (const Contribution& c : shares) specs.insert(c.spec);
  }
  return specs;
}

// "transformer+dusk@1f3a*0.5[transformer.proj_out=0]#9d3c…": all that merged weights depend on, so that two
// sets are never taken for each other: which patches how strong, to be read, and behind it a hash of what was
// merged, for this process.
std::string MergedName(const std::string& component, const ComponentLayout& layout,
                       const LayerPatcher::FormOf& form, const std::vector<PatchSpec>& specs,
                       const Contributions& contributions) {
  std::string name = component;
  for (const size_t index : SpecsOf(contributions)) {
    const PatchSpec& spec = specs[index];
    absl::StrAppend(&name, "+", spec.handle.key().ToString(), "*",
                    StrengthText(spec.weight, spec.blocks, component));
  }
  const auto hash = static_cast<uint64_t>(absl::HashOf(DescribeMerge(layout, form, specs, contributions)));
  return absl::StrCat(name, "#", absl::Hex(hash, absl::kZeroPad16));
}

bool HasRecord(const std::vector<PatchSpec>& specs) {
  return std::all_of(specs.begin(), specs.end(),
                     [](const PatchSpec& s) { return s.weight == 0 || static_cast<bool>(s.handle); });
}

// The canonical order, so that A+B and B+A are one set.
void Sort(std::vector<PatchSpec>& specs) {
  std::stable_sort(specs.begin(), specs.end(),
                   [](const PatchSpec& a, const PatchSpec& b) { return a.name < b.name; });
}

MemoryBudget::Request Ask(int64_t bytes, MemoryUse use, const PatchTarget& target,
                          const ApplyOptions& options) {
  return {.bytes = bytes,
          .use = use,
          .owner = options.owner,
          .what = absl::StrCat("patches of ", target.component),
          .deadline = options.deadline,
          .stop = options.stop};
}

}  // namespace

namespace {

absl::Status CheckOnly(const std::string& name, absl::Span<const std::string> only,
                       absl::Span<const PatchTarget> targets) {
  for (const std::string& component : only) {
    if (std::any_of(targets.begin(), targets.end(),
                    [&](const PatchTarget& target) { return target.component == component; })) {
      continue;
    }
    return FieldError(
        "loras.only",
        absl::StrCat(
            "of ", name, ": the model has no component '", component, "' that LoRAs change; there are ",
            absl::StrJoin(targets, ", ",
                          [](std::string* out, const PatchTarget& target) { *out += target.component; })));
  }
  return absl::OkStatus();
}

// Weights of the target that get more inputs, and paths of `unused` that are above something.
void NoteTensors(const ModelPatch& patch, const std::vector<MatchedLayer>& layers, const PatchTarget& target,
                 std::set<std::string>& unused, PatchReport& report) {
  for (const auto& [index, parts] : layers) {
    for (const LayerPart& part : *parts) {
      const TensorDecl& tensor = (*target.layout)[part.weight];
      std::erase_if(unused,
                    [&](const std::string& path) { return LiesBelow(path, target.component, tensor.name); });
      const int64_t columns = ColumnsWith(patch.layers()[index], tensor.shape);
      if (tensor.shape.size() != 2 || columns == tensor.shape[1]) continue;
      report.grown[absl::StrCat(target.component, ".", tensor.name)] = columns;
    }
  }
}

}  // namespace

absl::StatusOr<PatchReport> LayerPatcher::Match(const ModelPatch& patch, const std::string& name,
                                                double weight, absl::Span<const PatchTarget> targets,
                                                const BlockWeights& blocks,
                                                absl::Span<const std::string> only) {
  RETURN_IF_ERROR(CheckOnly(name, only, targets));
  PatchReport report;
  report.name = name;
  report.format = patch.format();
  report.weight = weight;
  report.layers_in_file = static_cast<int64_t>(patch.layers().size());
  report.embeddings = patch.embeddings();
  std::set<std::string> unused;
  for (const auto& [path, factor] : blocks) unused.insert(path);
  std::vector<bool> known(patch.layers().size());
  PatchMatch match;
  for (const PatchTarget& target : targets) {
    ASSIGN_OR_RETURN(std::vector<MatchedLayer> layers, MatchComponent(patch, name, target));
    for (const MatchedLayer& layer : layers) known[layer.layer] = true;
    const bool wanted = only.empty() || std::find(only.begin(), only.end(), target.component) != only.end();
    if (wanted && !only.empty() && layers.empty()) {
      return FieldError("loras.only",
                        absl::StrCat("of ", name, ": the file changes nothing of '", target.component, "'"));
    }
    if (!wanted || layers.empty()) continue;
    NoteTensors(patch, layers, target, unused, report);
    report.matched[target.component] = static_cast<int64_t>(layers.size());
    match[target.component] = std::move(layers);
  }
  for (size_t l = 0; l < known.size(); ++l) {
    if (known[l]) continue;
    ++report.unmatched_count;
    if (report.unmatched.size() < kSampleKeys) report.unmatched.push_back(patch.layers()[l].name);
  }
  if (match.empty()) {
    const std::string sample = absl::StrJoin(report.unmatched, ", ");
    return LoraMismatch(name,
                        absl::StrCat("is for another architecture: none of its ", report.layers_in_file,
                                     " layers matches this model (", sample, ")"),
                        {{"sample", sample}, {"layers_in_file", absl::StrCat(report.layers_in_file)}});
  }
  if (!unused.empty()) {
    return FieldError(
        "loras.block_weights",
        absl::StrCat("of ", name, ": the file changes nothing below '", *unused.begin(),
                     "'; paths are a component, or a component and the start of a tensor's name "
                     "(transformer.transformer_blocks.3)"));
  }
  report.match = std::make_shared<const PatchMatch>(std::move(match));
  return report;
}

absl::StatusOr<LayerPatcher::OverlaySize> LayerPatcher::OverlayBytes(
    const ComponentLayout& layout, double bytes_per_number, const FormOf& form, const PatchTarget& target,
    std::vector<PatchSpec> specs, const ApplyOptions& options) {
  Sort(specs);
  ASSIGN_OR_RETURN(Contributions contributions, Collect(target, specs));
  const auto [direct, beside] =
      Split(layout, std::move(contributions), options.mode == PatchMode::kDirect, form);
  double bytes = 0;
  for (const auto& [index, shares] : direct) {
    double numbers = 1;
    for (int64_t extent : layout[Slot{index}].shape) numbers *= static_cast<double>(extent);
    bytes += numbers * bytes_per_number;
  }
  int64_t widest = 0;
  for (const auto& [index, shares] : beside) {
    int64_t rank = 0;
    for (const Contribution& share : shares) rank += share.layer->low_rank()->rank();
    widest = std::max(widest, rank);
  }
  OverlaySize size{.merged = static_cast<int64_t>(bytes),
                   .merging = MergeScratchBytes(layout, direct, form),
                   .beside = SidecarBytes(layout, beside, options.compute),
                   .rank = widest,
                   .record = {}};
  if (!direct.empty() && HasRecord(specs)) {
    size.record = {options.component.id,
                   MergedName(options.component.component, layout, form, specs, direct)};
  }
  return size;
}

absl::Status LayerPatcher::ApplyDirect(const WeightSet& weights, const PatchTarget& target,
                                       const std::vector<PatchSpec>& specs,
                                       const Contributions& contributions, const ApplyOptions& options,
                                       Overlay& overlay) {
  Device* const device = options.device;
  const bool elsewhere = device != nullptr && !device->uses_host_memory();
  const bool cacheable = options.cache != nullptr && HasRecord(specs);
  const FormOf form = [&](Slot slot) { return weights[slot].form; };
  const int64_t bytes = MergedBytes(weights, contributions);
  const int64_t scratch = MergeScratchBytes(weights.layout(), contributions, form);
  // What a file changed into meanwhile is not kept under the names of what it was.
  auto merge =
      [&](const std::function<bool()>& cancelled) -> absl::StatusOr<std::shared_ptr<const WeightSet>> {
    auto merged = Merge(weights, contributions, cancelled);
    for (const PatchSpec& spec : specs) {
      if (spec.weight == 0) continue;
      RETURN_IF_ERROR(spec.handle ? spec.handle.resource()->Check() : spec.patch->Check());
    }
    return merged;
  };
  if (!cacheable) {
    if (device != nullptr) {
      ASSIGN_OR_RETURN(overlay.reservation_,
                       device->budget().Reserve(Ask(bytes + scratch, MemoryUse::kMerged, target, options)));
    }
    ASSIGN_OR_RETURN(overlay.merged_on_host_, merge([&] { return options.stop.stop_requested(); }));
    overlay.merged_ = overlay.merged_on_host_;
    overlay.reservation_.ShrinkTo(bytes);
    if (elsewhere) {
      ASSIGN_OR_RETURN(auto copy,
                       overlay.merged_on_host_->CopyTo(*device, options.resident, nullptr, options.stop));
      overlay.merged_ = std::static_pointer_cast<const WeightSet>(std::move(copy));
    }
    return absl::OkStatus();
  }

  Loader loader{.kind = "merged",
                .estimated_bytes = bytes + scratch,  // the cache gives back what the record does not take
                .load = [&](const LoadContext& context) -> absl::StatusOr<std::shared_ptr<const Resource>> {
                  return merge([&] { return context.cancelled(); });
                },
                .use = MemoryUse::kMerged,
                .name = options.model};
  for (const size_t index : SpecsOf(contributions)) loader.sources.push_back(specs[index].handle.key().id);
  ASSIGN_OR_RETURN(overlay.merged_record_,
                   options.cache->Lock(
                       {options.component.id, MergedName(options.component.component, weights.layout(), form,
                                                         specs, contributions)},
                       loader, {.owner = options.owner, .deadline = options.deadline, .stop = options.stop}));
  overlay.merged_on_host_ = std::static_pointer_cast<const WeightSet>(overlay.merged_record_.resource());
  overlay.merged_ = overlay.merged_on_host_;
  if (elsewhere) {
    ASSIGN_OR_RETURN(overlay.merged_residency_, options.cache->LockOnDevice(overlay.merged_record_, *device,
                                                                            {.owner = options.owner,
                                                                             .mode = ResidencyMode::kFull,
                                                                             .blocks = options.resident,
                                                                             .deadline = options.deadline,
                                                                             .stop = options.stop}));
    overlay.merged_ = std::static_pointer_cast<const WeightSet>(overlay.merged_residency_.resource());
  }
  return absl::OkStatus();
}

absl::Status LayerPatcher::ApplySidecar(const WeightSet& weights, const PatchTarget& target,
                                        const Contributions& contributions, const ApplyOptions& options,
                                        Overlay& overlay) {
  if (options.device != nullptr) {
    const int64_t bytes = SidecarBytes(weights.layout(), contributions, options.compute);
    ASSIGN_OR_RETURN(overlay.beside_,
                     options.device->budget().Reserve(Ask(bytes, MemoryUse::kMerged, target, options)));
  }
  overlay.sidecars_.resize(weights.layout().tensors().size());
  for (const auto& [index, shares] : contributions) {
    if (options.stop.stop_requested()) {
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while patches were applied");
    }
    overlay.sidecars_[static_cast<size_t>(index)] =
        MakeSidecar(weights.layout()[Slot{index}].shape, shares, options.compute);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Overlay>> LayerPatcher::Apply(const WeightSet& weights,
                                                                   const PatchTarget& target,
                                                                   std::vector<PatchSpec> specs,
                                                                   const ApplyOptions& options,
                                                                   std::vector<PatchReport>* reports) {
  Sort(specs);
  ASSIGN_OR_RETURN(Contributions contributions, Collect(target, specs));
  if (contributions.empty()) return nullptr;
  const auto [direct, beside] =
      Split(weights.layout(), std::move(contributions), options.mode == PatchMode::kDirect,
            [&](Slot slot) { return weights[slot].form; });

  auto overlay = std::make_shared<Overlay>();
  int64_t uncached_bytes = 0;
  for (const PatchSpec& spec : specs) uncached_bytes += spec.handle ? 0 : spec.patch->bytes();
  if (options.cache != nullptr && uncached_bytes > 0) {
    ASSIGN_OR_RETURN(overlay->uncached_patches_,
                     options.cache->ram().Reserve(Ask(uncached_bytes, MemoryUse::kPatches, target, options)));
  }
  if (!direct.empty()) {
    RETURN_IF_ERROR(ApplyDirect(weights, target, specs, direct, options, *overlay));
  }
  if (!beside.empty()) RETURN_IF_ERROR(ApplySidecar(weights, target, beside, options, *overlay));
  if (reports != nullptr) {
    auto count = [&](const Contributions& tensors, int64_t PatchReport::*counter) {
      for (const auto& [index, shares] : tensors) {
        for (const Contribution& c : shares) {
          if (c.spec < reports->size()) ++((*reports)[c.spec].*counter);
        }
      }
    };
    count(direct, &PatchReport::direct_tensors);
    count(beside, &PatchReport::sidecar_tensors);
  }
  overlay->specs_ = std::move(specs);
  return overlay;
}

}  // namespace latentd
