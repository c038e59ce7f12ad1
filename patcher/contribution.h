// What patches do to the tensors of one component, and the formulas for it. For the files of LayerPatcher.
//
// A layer's difference is scale · weight · up · down. Merged: summed over all patches of a tensor in fp32, added
// to the fp32 value of the weight, rounded once to its storage type. Sidecar: the same sum as one pair of
// matrices, patches concatenated along the rank.
#ifndef LATENTD_PATCHER_CONTRIBUTION_H_
#define LATENTD_PATCHER_CONTRIBUTION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/error.h"
#include "cache/weight_set.h"
#include "patcher/layer_resolver.h"
#include "patcher/overlay.h"
#include "patcher/patch_target.h"

namespace latentd {

// One layer's share in one tensor.
struct Contribution {
  const LoraLayer* layer;  // of a patch that its spec keeps alive
  size_t spec;             // index of that spec
  double weight;           // of that spec
  LayerPart part;
};

// By slot; tensors that no patch touches are not in it.
using Contributions = std::map<int32_t, std::vector<Contribution>>;

// FAILED_PRECONDITION LORA_MISMATCH about the LoRA `name`.
absl::Status LoraMismatch(const std::string& name, absl::string_view what, ErrorDetails details);

// Does the layer fit the tensors that its name means? Errors: LORA_MISMATCH with the layer.
absl::Status CheckShapes(const std::string& name, const LoraLayer& layer, const std::vector<LayerPart>& parts,
                         const ComponentLayout& layout);

// Which patches meet in which tensor. Specs of weight 0 do nothing. `on_host`: take the patches as they are in
// host memory, where a spec has both. Errors: LORA_MISMATCH.
absl::StatusOr<Contributions> Collect(const ComponentLayout& layout, const PatchTarget& target,
                                      const std::vector<PatchSpec>& specs, bool on_host);

// Bytes of the tensors that Merge makes.
int64_t MergedBytes(const WeightSet& base, const Contributions& contributions);

// A set of the patched weights alone, in host memory. Errors: CANCELLED when `cancelled` says so (asked for each
// tensor); those of WeightSet::Check.
absl::StatusOr<std::shared_ptr<const WeightSet>> Merge(const WeightSet& base, const Contributions& contributions,
                                                       const std::function<bool()>& cancelled);

// Bytes that the sidecars of all tensors take, in the compute type.
int64_t SidecarBytes(const ComponentLayout& layout, const Contributions& contributions, at::ScalarType compute);

// All contributions to one tensor as one pair of matrices. May alias a patch.
std::unique_ptr<Sidecar> MakeSidecar(const std::vector<Contribution>& contributions, at::ScalarType compute);

}  // namespace latentd

#endif  // LATENTD_PATCHER_CONTRIBUTION_H_
