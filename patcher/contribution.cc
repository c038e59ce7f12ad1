#include "patcher/contribution.h"

#include <algorithm>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "c10/core/GradMode.h"
#include "cache/base/error.h"
#include "cache/weights/host_tensor.h"
#include "patcher/merge_kernel.h"

namespace latentd {
namespace {

at::Tensor SwapHalves(const at::Tensor& rows) {
  auto halves = rows.chunk(2, 0);
  return at::cat({halves[1], halves[0]}, 0);
}

// The rows of a layer's tensor that are for a part of it.
at::Tensor RowsOf(const at::Tensor& all, const LayerPart& part) {
  const at::Tensor rows = all.narrow(0, part.row_begin, part.rows);
  return part.swap_halves ? SwapHalves(rows) : rows;
}

// The rows of `up` for a part, with weight and scale, in fp32.
at::Tensor ScaledUp(const Contribution& c, const LowRank& layer) {
  return Matrix(RowsOf(layer.up, c.part)) * (c.weight * layer.scale);
}

// What a weight is stored as once patches are in it: 8-bit floats would round them away.
at::ScalarType MergedType(const at::Tensor& weight) {
  return at::isFloat8Type(weight.scalar_type()) ? at::kBFloat16 : weight.scalar_type();
}

// Numbers that are merged at a time: in fp32, they and their factors stay in a processor's own cache.
constexpr int64_t kMergedAtATime = 1 << 17;

// Numbers in a row of a weight.
int64_t RowNumbers(at::IntArrayRef shape) {
  return shape.empty() ? 1 : c10::multiply_integers(shape.slice(1));
}

// Plain low-rank layers as wide as the weight, and nothing else.
bool OnlyLowRank(at::IntArrayRef shape, StorageForm form, const std::vector<Contribution>& shares) {
  return HasDirectPath(form) && absl::c_all_of(shares, [&](const Contribution& c) {
           return !c.bias && c.layer->low_rank() != nullptr && c.layer->extent().columns == RowNumbers(shape);
         });
}

// By the kernel of our own, where there is one: false otherwise.
bool MergeInOnePass(const at::Tensor& weight, const at::Tensor& up, const at::Tensor& down,
                    const at::Tensor& out) {
  const at::Tensor base = weight.contiguous(), u = up.contiguous(), d = down.contiguous();
  const int64_t rank = u.size(1), columns = d.size(1), grain = std::max<int64_t>(1, kMergedAtATime / columns);
  const auto* ups = u.const_data_ptr<float>();
  const auto* downs = d.const_data_ptr<float>();
  auto rows = [&](auto* from, auto* to, auto kernel) {
    at::parallel_for(0, u.size(0), grain, [&](int64_t begin, int64_t end) {
      kernel(from + begin * columns, ups + begin * rank, downs, to + begin * columns, end - begin, columns,
             rank);
    });
    return true;
  };
  switch (weight.scalar_type()) {
    case at::kFloat:
      return rows(base.const_data_ptr<float>(), out.mutable_data_ptr<float>(), MergeFloatRows);
    case at::kBFloat16:
      return rows(static_cast<const uint16_t*>(base.const_data_ptr()),
                  static_cast<uint16_t*>(out.mutable_data_ptr()), MergeBFloat16Rows);
    default:
      return false;
  }
}

// weight + Σ up · down, a few rows at a time, so that memory is read once and written once. Errors:
// RESOURCE_EXHAUSTED OUT_OF_MEMORY.
absl::StatusOr<at::Tensor> MergeLowRank(const at::Tensor& weight, const std::vector<Contribution>& shares) {
  std::vector<at::Tensor> ups, downs;
  for (const Contribution& c : shares) {
    ups.push_back(ScaledUp(c, *c.layer->low_rank()));
    downs.push_back(c.layer->low_rank()->Inner());
  }
  const at::Tensor up = ups.size() == 1 ? ups[0] : at::cat(ups, 1);
  const at::Tensor down = downs.size() == 1 ? downs[0] : at::cat(downs, 0);
  at::Tensor result = EmptyHostTensor(weight.sizes(), weight.options());
  if (!result.defined()) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat("no memory for a merged weight of ", weight.nbytes(), " bytes"));
  }
  if (MergeInOnePass(weight, up, down, result)) return result;
  const at::Tensor from = weight.reshape({weight.size(0), -1}), to = result.view({weight.size(0), -1});
  const int64_t rows = std::min(from.size(0), std::max<int64_t>(1, kMergedAtATime / from.size(1)));
  const at::Tensor scratch = at::empty({rows, from.size(1)}, at::kFloat);
  for (int64_t row = 0; row < from.size(0); row += rows) {
    const int64_t n = std::min(rows, from.size(0) - row);
    at::Tensor sum = scratch.narrow(0, 0, n);
    sum.copy_(from.narrow(0, row, n));
    to.narrow(0, row, n).copy_(sum.addmm_(up.narrow(0, row, n), down));
  }
  return result;
}

// What makes rotations of their blocks takes: some solutions of systems of equations, as large as the blocks.
int64_t RotationNumbers(const PatchLayer& layer) {
  constexpr int64_t kSolutions = 6;
  int64_t numbers = 0;
  if (std::holds_alternative<Oft>(layer.math) || std::holds_alternative<Boft>(layer.math)) {
    PatchLayer(layer).ForEachTensor([&](const at::Tensor& t) { numbers += t.numel(); });
  }
  return kSolutions * numbers;
}

// The differences of fused layers, each kept until the last of its parts took its rows.
class Deltas {
 public:
  Deltas(const WeightSet& base, const Contributions& contributions) : base_(base) {
    for (const auto& [index, shares] : contributions) {
      for (const Contribution& c : shares) uses_[c.layer] += c.bias ? 0 : 1;
    }
  }

  // The rows for a contribution to a weight, at user weight 1.
  at::Tensor Rows(const Contribution& c) {
    at::Tensor& delta = kept_[c.layer];
    if (!delta.defined()) delta = Make(c);
    const at::Tensor rows = RowsOf(delta, c.part);
    if (--uses_[c.layer] == 0) kept_.erase(c.layer);
    return rows;
  }

 private:
  at::Tensor Make(const Contribution& c) const {
    std::vector<int64_t> shape = base_.layout()[c.parts->front().weight].shape;
    shape[0] = 0;
    for (const LayerPart& part : *c.parts) shape[0] = std::max(shape[0], part.row_begin + part.rows);
    at::Tensor base;
    if (c.layer->depends_on_base()) {
      if (c.parts->size() == 1 && !c.part.swap_halves) {
        base = base_[c.part.weight].To(at::kFloat);
      } else {
        base = at::empty(shape, at::kFloat);
        for (const LayerPart& part : *c.parts) {
          const at::Tensor stored = base_[part.weight].To(at::kFloat);
          base.narrow(0, part.row_begin, part.rows).copy_(part.swap_halves ? SwapHalves(stored) : stored);
        }
      }
    }
    return c.layer->Delta(shape, base);
  }

  const WeightSet& base_;
  std::map<const PatchLayer*, int64_t> uses_;
  std::map<const PatchLayer*, at::Tensor> kept_;
};

constexpr absl::string_view kWeightSuffix = ".weight";

// How many times as many inputs a patch may give a layer.
constexpr int64_t kMaxGrowth = 16;

// Columns of the weight as the contributions leave it.
int64_t ColumnsOf(at::IntArrayRef shape, const std::vector<Contribution>& shares) {
  int64_t columns = 0;
  for (const Contribution& c : shares) columns = std::max(columns, ColumnsWith(*c.layer, shape));
  return columns;
}

// The bias of the module whose weight this is; empty when it has none.
Slot BiasOf(const ComponentLayout& layout, Slot weight) {
  return layout.Find(absl::StrCat(absl::StripSuffix(layout[weight].name, kWeightSuffix), ".bias"));
}

}  // namespace

absl::Status LoraMismatch(const std::string& name, absl::string_view what, ErrorDetails details) {
  details["lora"] = name;
  return MakeError(absl::StatusCode::kFailedPrecondition, "LORA_MISMATCH",
                   absl::StrCat("LoRA ", name, " ", what), details);
}

absl::Status CheckShapes(const std::string& name, const PatchLayer& layer,
                         const std::vector<LayerPart>& parts, const PatchTarget& target) {
  const ComponentLayout& layout = *target.layout;
  auto mismatch = [&](const std::string& what) {
    return LoraMismatch(name, absl::StrCat("does not fit: layer ", layer.name, " ", what),
                        {{"layer", layer.name}});
  };
  const Extent extent = layer.extent();
  int64_t rows = 0;
  for (const LayerPart& part : parts) {
    const std::vector<int64_t>& shape = layout[part.weight].shape;
    const std::string& weight = layout[part.weight].name;
    rows = std::max(rows, part.row_begin + part.rows);
    const int64_t columns = RowNumbers(shape);
    const bool for_vectors =
        std::holds_alternative<Difference>(layer.math) || std::holds_alternative<Replacement>(layer.math);
    if (layer.has_weight() && shape.size() == 1 && !for_vectors) {
      return mismatch(absl::StrCat("is for a matrix, ", weight, " is a vector"));
    }
    const bool grows = extent.columns > columns && extent.columns <= kMaxGrowth * columns &&
                       shape.size() == 2 && layer.low_rank() != nullptr &&
                       absl::c_linear_search(target.growable, weight);
    if (layer.has_weight() && !grows &&
        ((extent.columns >= 0 && extent.columns != columns) ||
         (extent.inputs >= 0 && (shape.size() < 2 || extent.inputs != shape[1])))) {
      return mismatch(absl::StrCat("takes ", extent.inputs >= 0 ? extent.inputs : extent.columns, " inputs, ",
                                   weight, " is [", absl::StrJoin(shape, ", "), "]"));
    }
    if (layer.bias.defined() && !BiasOf(layout, part.weight)) {
      return mismatch(absl::StrCat("changes a bias, ", weight, " has none"));
    }
  }
  if (layer.has_weight() && extent.rows >= 0 && rows != extent.rows) {
    return mismatch(absl::StrCat("gives ", extent.rows, " outputs, the model has ", rows));
  }
  if (layer.bias.defined() && layer.bias.numel() != rows) {
    return mismatch(absl::StrCat("has ", layer.bias.numel(), " numbers for its bias, the model has ", rows));
  }
  return absl::OkStatus();
}

int64_t ColumnsWith(const PatchLayer& layer, at::IntArrayRef shape) {
  const int64_t columns = RowNumbers(shape);
  return shape.size() == 2 && layer.low_rank() != nullptr ? std::max(columns, layer.extent().columns)
                                                          : columns;
}

namespace {

absl::StatusOr<std::vector<MatchedLayer>> LayersOf(const PatchSpec& spec, const ModelPatch& patch,
                                                   const PatchTarget& target) {
  if (spec.match == nullptr) return MatchComponent(patch, spec.name, target);
  const auto found = spec.match->find(target.component);
  return found == spec.match->end() ? std::vector<MatchedLayer>() : found->second;
}

}  // namespace

absl::StatusOr<Contributions> Collect(const PatchTarget& target, const std::vector<PatchSpec>& specs) {
  const ComponentLayout& layout = *target.layout;
  Contributions by_slot;
  for (size_t s = 0; s < specs.size(); ++s) {
    const PatchSpec& spec = specs[s];
    if (spec.weight == 0) continue;
    const ModelPatch& patch = spec.handle ? spec.handle.As<ModelPatch>() : *spec.patch;
    ASSIGN_OR_RETURN(const std::vector<MatchedLayer> matched, LayersOf(spec, patch, target));
    for (const auto& [index, parts] : matched) {
      const PatchLayer& layer = patch.layers()[index];
      Contribution c{.layer = &layer,
                     .beside = &spec.patch->layers()[index],
                     .spec = s,
                     .weight = spec.weight,
                     .part = {},
                     .bias = false,
                     .parts = parts};
      for (const LayerPart& part : *parts) {
        c.part = part;
        c.weight = spec.weight * BlockFactor(spec.blocks, target.component, layout[part.weight].name);
        if (c.weight == 0) continue;
        if (layer.has_weight()) by_slot[part.weight.index].push_back(c);
        if (!layer.bias.defined()) continue;
        Contribution bias = c;
        bias.bias = true;
        bias.part.weight = BiasOf(layout, part.weight);
        by_slot[bias.part.weight.index].push_back(std::move(bias));
      }
    }
  }
  return by_slot;
}

SplitContributions Split(const ComponentLayout& layout, Contributions contributions, bool all_direct,
                         const std::function<StorageForm(Slot)>& form) {
  SplitContributions split;
  for (auto& [index, shares] : contributions) {
    const std::vector<int64_t>& shape = layout[Slot{index}].shape;
    const bool may_merge = all_direct && HasDirectPath(form(Slot{index}));
    const bool has_inputs = shape.size() == 2 || shape.size() == 4;  // of a linear layer or a convolution
    const bool beside = !may_merge && has_inputs && absl::c_all_of(shares, [&](const Contribution& c) {
      return !c.bias && c.layer->low_rank() != nullptr && ColumnsWith(*c.layer, shape) == RowNumbers(shape);
    });
    (beside ? split.beside : split.direct).emplace(index, std::move(shares));
  }
  return split;
}

int64_t MergedBytes(const WeightSet& base, const Contributions& contributions) {
  int64_t bytes = 0;
  for (const auto& [index, shares] : contributions) {
    const at::Tensor& weight = base[Slot{index}].data;
    const int64_t columns = shares.front().bias ? 1 : ColumnsOf(weight.sizes(), shares);
    bytes += weight.size(0) * columns * static_cast<int64_t>(c10::elementSize(MergedType(weight)));
  }
  return bytes;
}

int64_t MergeScratchBytes(const ComponentLayout& layout, const Contributions& contributions,
                          const std::function<StorageForm(Slot)>& form) {
  int64_t most = 0;
  for (const auto& [index, shares] : contributions) {
    const std::vector<int64_t>& shape = layout[Slot{index}].shape;
    const int64_t columns = shares.front().bias ? 1 : ColumnsOf(shape, shares);
    int64_t numbers = OnlyLowRank(shape, form(Slot{index}), shares) ? 0 : shape[0] * columns;  // the sum
    int64_t making = 0;  // what the formula that takes most has for itself
    for (const Contribution& c : shares) {
      if (c.bias || !c.layer->has_weight()) continue;
      if (const LowRank* low_rank = c.layer->low_rank()) {
        // Factors in fp32, put together for all layers, and packed.
        numbers += low_rank->rank() * (2 * shape[0] + 3 * columns);
        continue;
      }
      int64_t rows = 0;  // a fused layer's difference is made whole, and kept for its other parts
      for (const LayerPart& part : *c.parts) rows = std::max(rows, part.row_begin + part.rows);
      numbers += rows * columns;
      // The product of a factor and a term on its way to the sum; the weight, and it in a formula's
      // arrangement.
      making =
          std::max(making, (c.layer->depends_on_base() ? 4 : 2) * rows * columns + RotationNumbers(*c.layer));
    }
    most = std::max(most, numbers + making);
  }
  return most * static_cast<int64_t>(sizeof(float));
}

absl::StatusOr<std::shared_ptr<const WeightSet>> Merge(const WeightSet& base,
                                                       const Contributions& contributions,
                                                       const std::function<bool()>& cancelled) {
  const c10::NoGradGuard no_grad;
  std::vector<Weight> merged(base.layout().tensors().size());
  Deltas deltas(base, contributions);
  for (const auto& [index, shares] : contributions) {
    if (cancelled()) {
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while patches were merged");
    }
    const Weight& weight = base[Slot{index}];
    if (OnlyLowRank(weight.data.sizes(), weight.form, shares)) {
      ASSIGN_OR_RETURN(merged[static_cast<size_t>(index)].data, MergeLowRank(weight.data, shares));
      continue;
    }
    at::Tensor sum = weight.To(at::kFloat);
    if (sum.is_alias_of(weight.data)) sum = sum.clone();
    if (sum.dim() == 2) sum = at::constant_pad_nd(sum, {0, ColumnsOf(sum.sizes(), shares) - sum.size(1)});
    at::Tensor matrix = sum.view({sum.size(0), -1});
    for (const Contribution& c : shares) {  // what is set, before what is added
      const auto* set = c.bias ? nullptr : std::get_if<Replacement>(&c.layer->math);
      if (set != nullptr) matrix.copy_(Matrix(RowsOf(set->value, c.part)));
    }
    for (const Contribution& c : shares) {
      if (c.bias) {
        sum.add_(RowsOf(c.layer->bias, c.part).to(at::kFloat), c.weight * c.layer->bias_scale);
      } else if (std::holds_alternative<Replacement>(c.layer->math)) {
        continue;
      } else if (const LowRank* low_rank = c.layer->low_rank()) {
        const at::Tensor down = low_rank->Inner();
        matrix.narrow(1, 0, down.size(1)).addmm_(ScaledUp(c, *low_rank), down);
      } else {
        const at::Tensor rows = deltas.Rows(c);
        matrix.narrow(1, 0, rows.size(1)).add_(rows, c.weight);
      }
    }
    merged[static_cast<size_t>(index)] = {sum.to(MergedType(weight.data))};
  }
  RETURN_IF_ERROR(base.Check());
  return std::make_shared<const WeightSet>(base, std::move(merged));
}

int64_t SidecarBytes(const ComponentLayout& layout, const Contributions& contributions,
                     at::ScalarType compute) {
  int64_t elements = 0;
  for (const auto& [index, shares] : contributions) {
    const std::vector<int64_t>& shape = layout[Slot{index}].shape;
    int64_t rank = 0;
    for (const Contribution& c : shares) rank += c.layer->low_rank()->rank();
    elements += rank * (shape[0] + RowNumbers(shape));
  }
  return elements * static_cast<int64_t>(c10::elementSize(compute));
}

std::unique_ptr<Sidecar> MakeSidecar(at::IntArrayRef shape, const std::vector<Contribution>& contributions,
                                     at::ScalarType compute) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> downs;
  std::vector<at::Tensor> ups;
  for (const Contribution& c : contributions) {
    const LowRank& low_rank = *c.beside->low_rank();
    std::vector<int64_t> kernel = shape.vec();
    kernel[0] = low_rank.rank();
    downs.push_back((low_rank.mid.defined() ? low_rank.Inner() : low_rank.down).reshape(kernel).to(compute));
    ups.push_back(ScaledUp(c, low_rank));
  }
  return std::make_unique<Sidecar>(Sidecar{downs.size() == 1 ? downs[0] : at::cat(downs, 0),
                                           (ups.size() == 1 ? ups[0] : at::cat(ups, 1)).to(compute)});
}

}  // namespace latentd
