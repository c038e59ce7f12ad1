// What patches do to the tensors of one component. For the files of LayerPatcher; formulas are in layers/.
//
// Direct: the differences of all patches of a tensor, weight · Δ, are summed in fp32, added to the fp32 value
// of the weight, and rounded once to its storage type. Beside it: the same sum as one pair of factors,
// patches concatenated along the rank; for tensors that meet nothing but plain low-rank layers.
//
// Where a file's layer is a fused matrix and the model has its parts, the difference is made for the whole
// layer and each part takes its rows. What depends on the weights (DoRA, OFT, …) is given the parts put
// together again, so that norms and blocks that reach over parts are those of the fused matrix.
#ifndef LATENTD_PATCHER_CONTRIBUTION_H_
#define LATENTD_PATCHER_CONTRIBUTION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/base/error.h"
#include "cache/weights/weight_set.h"
#include "patcher/layer_resolver.h"
#include "patcher/overlay.h"
#include "patcher/patch_target.h"

namespace latentd {

// One layer's share in one tensor.
struct Contribution {
  const PatchLayer* layer;  // in host memory where the spec has a handle; its spec keeps it alive
  const PatchLayer*
      beside;      // the same layer where the overlay is used; only plain low-rank layers have tensors there
  size_t spec;     // index of that spec
  double weight;   // of that spec in this tensor
  LayerPart part;  // rows of the layer, and the weight or bias that they are for
  bool bias = false;                                    // the layer's difference of the bias
  std::shared_ptr<const std::vector<LayerPart>> parts;  // of the whole layer, for the weight
};

// By slot; tensors that no patch touches are not in it.
using Contributions = std::map<int32_t, std::vector<Contribution>>;

// Contributions by how they meet their tensors.
struct SplitContributions {
  Contributions direct, beside;
};

// FAILED_PRECONDITION LORA_MISMATCH about the LoRA `name`.
absl::Status LoraMismatch(const std::string& name, absl::string_view what, ErrorDetails details);

// Does the layer fit the tensors that its name means? Errors: LORA_MISMATCH with the layer.
absl::Status CheckShapes(const std::string& name, const PatchLayer& layer,
                         const std::vector<LayerPart>& parts, const PatchTarget& target);

// Columns that a weight has once the layer is merged into it: its own, or more where the layer grows it.
int64_t ColumnsWith(const PatchLayer& layer, at::IntArrayRef shape);

// Which patches meet in which tensor. Specs of weight 0 do nothing. Errors: LORA_MISMATCH.
absl::StatusOr<Contributions> Collect(const PatchTarget& target, const std::vector<PatchSpec>& specs);

// Tensors that meet nothing but plain low-rank layers of their own size are beside, unless `all_direct` and
// their form has a direct path: decided by the kinds of layers and the form alone. `form` says how a tensor
// is stored.
SplitContributions Split(const ComponentLayout& layout, Contributions contributions, bool all_direct,
                         const std::function<StorageForm(Slot)>& form);

// Bytes of the tensors that Merge makes.
int64_t MergedBytes(const WeightSet& base, const Contributions& contributions);

// Bytes that Merge takes beside its result while it works, at most: factors, sums and differences in fp32, by
// the shapes of the tensor that takes most.
int64_t MergeScratchBytes(const ComponentLayout& layout, const Contributions& contributions,
                          const std::function<StorageForm(Slot)>& form);

// A set of the patched weights alone, in host memory. Errors: CANCELLED when `cancelled` says so (asked for
// each tensor); those of WeightSet::Check.
absl::StatusOr<std::shared_ptr<const WeightSet>> Merge(const WeightSet& base,
                                                       const Contributions& contributions,
                                                       const std::function<bool()>& cancelled);

// Bytes that the sidecars of all tensors take, in the compute type.
int64_t SidecarBytes(const ComponentLayout& layout, const Contributions& contributions,
                     at::ScalarType compute);

// All contributions to one tensor of that shape as one pair of factors. May alias a patch.
std::unique_ptr<Sidecar> MakeSidecar(at::IntArrayRef shape, const std::vector<Contribution>& contributions,
                                     at::ScalarType compute);

}  // namespace latentd

#endif  // LATENTD_PATCHER_CONTRIBUTION_H_
