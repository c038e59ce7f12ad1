// Turns PatchSpecs into an Overlay for one component. The one place where patches are applied: every
// encoder, denoiser, expert or tile goes through Apply().
//
//   std::vector<PatchSpec> specs = …;                     // the session's LoRAs
//   ASSIGN_OR_RETURN(auto overlay, LayerPatcher::Apply(weights, target, std::move(specs), options, &report));
//   WeightView view(weights, overlay.get());
#ifndef LATENTD_PATCHER_LAYER_PATCHER_H_
#define LATENTD_PATCHER_LAYER_PATCHER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cache/device.h"
#include "cache/model_cache.h"
#include "cache/weights/weight_set.h"
#include "patcher/overlay.h"
#include "patcher/patch_target.h"

namespace latentd {

struct Contribution;
using Contributions = std::map<int32_t, std::vector<Contribution>>;

// How a patch meets its weight.
// Weights in a form without a direct path (8-bit floats) have what can be computed beside them there in all
// modes, and are merged into bf16 where it cannot.
//   direct   added to a copy of the weight: all deltas of a tensor summed in fp32, rounded once
//   sidecar  computed beside it at each call
//   auto     per tensor, from the weight's storage form and the kinds of layers alone: tensors that meet
//   nothing
//            but plain low-rank layers go sidecar. Never from what happens to be resident, so the same
//            request gives the same bytes
// Only plain low-rank differences of a linear layer or a convolution can be computed beside it. A tensor that
// meets another kind, and every bias, is merged in all modes; the report counts it as direct.
enum class PatchMode { kAuto, kDirect, kSidecar };

struct ApplyOptions {
  PatchMode mode = PatchMode::kAuto;
  at::ScalarType compute = at::kFloat;
  Device* device = nullptr;  // where the overlay is used, and what it is charged to; null = host, uncharged
  // Which blocks of the component are resident on the device (see WeightSet::device_block); empty = all.
  std::vector<bool> resident = {};
  // With a cache, merged weights are a record of it, under the component's key, the names of the patches and
  // what they were merged into: they are found again by whoever asks for the same.
  ModelCache* cache = nullptr;
  ModelKey component = {};                       // key of the component's record; REQUIRED with a cache
  std::string model = {};                        // whose component it is: Loader::name of the record
  std::string owner = {};                        // of reservations and locks
  absl::Time deadline = absl::InfiniteFuture();  // of waits for memory
  std::stop_token stop = {};                     // checked per layer
};

// What became of one patch. Counts are layers of the file.
struct PatchReport {
  std::string name;
  std::string format;
  double weight = 1;
  int64_t layers_in_file = 0;
  std::map<std::string, int64_t> matched;  // by component
  std::map<std::string, int64_t> grown;    // weights that get more inputs, "transformer.x.weight" → inputs
  std::vector<std::string> unmatched;      // layer names that no component has, at most kSampleKeys
  int64_t unmatched_count = 0;
  std::vector<std::string> embeddings = {};           // textual inversions that the file brings with it
  std::vector<std::string> unused_embeddings = {};    // filled in by who knows what the model takes
  std::shared_ptr<const PatchMatch> match = nullptr;  // for PatchSpec
  int64_t direct_tensors = 0;                         // filled in by Apply
  int64_t sidecar_tensors = 0;                        // filled in by Apply
};

inline constexpr size_t kSampleKeys = 5;

class LayerPatcher {
 public:
  // Resolves every layer of `patch` against all components of a model and checks shapes, without touching a
  // weight. A layer whose name several components have is for all of them, unless the patch is limited to
  // those of `only`. Errors: FAILED_PRECONDITION LORA_MISMATCH when nothing matches (with sample keys) or a
  // shape does not fit (with the layer); INVALID_ARGUMENT INVALID_FIELD for a component of `only` and a path
  // of `blocks` of which the patch changes nothing.
  static absl::StatusOr<PatchReport> Match(const ModelPatch& patch, const std::string& name, double weight,
                                           absl::Span<const PatchTarget> targets,
                                           const BlockWeights& blocks = {},
                                           absl::Span<const std::string> only = {});

  // Overlay of `specs` on the component that `target` describes; `weights` are its weights in host memory.
  // Layers for other components are left alone; specs of weight 0 are held but change nothing. The specs are
  // taken in order of name, so A+B and B+A are one set. Returns null when nothing applies to this component,
  // and then the specs end. `reports`, when given, holds one report per spec in order of name; mode counts
  // are added to it.
  static absl::StatusOr<std::shared_ptr<const Overlay>> Apply(const WeightSet& weights,
                                                              const PatchTarget& target,
                                                              std::vector<PatchSpec> specs,
                                                              const ApplyOptions& options,
                                                              std::vector<PatchReport>* reports = nullptr);

  // What Apply would take, without doing it, where weights have `bytes_per_number`, and `form` says how each
  // is stored.
  struct OverlaySize {
    int64_t merged = 0;   // bytes of merged weights
    int64_t merging = 0;  // bytes that merging them takes for a while, beside them
    int64_t beside = 0;   // bytes of what is computed beside them
    int64_t rank = 0;     // rows of the widest of that
    ModelKey record;      // that merged weights would be; empty without any, or with a patch without a handle
  };
  using FormOf = std::function<StorageForm(Slot)>;
  static absl::StatusOr<OverlaySize> OverlayBytes(const ComponentLayout& layout, double bytes_per_number,
                                                  const FormOf& form, const PatchTarget& target,
                                                  std::vector<PatchSpec> specs, const ApplyOptions& options);

 private:
  static absl::Status ApplyDirect(const WeightSet& weights, const PatchTarget& target,
                                  const std::vector<PatchSpec>& specs, const Contributions& contributions,
                                  const ApplyOptions& options, Overlay& overlay);
  static absl::Status ApplySidecar(const WeightSet& weights, const PatchTarget& target,
                                   const Contributions& contributions, const ApplyOptions& options,
                                   Overlay& overlay);
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_LAYER_PATCHER_H_
