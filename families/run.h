// A run is what a pipeline makes of one request: everything that is parsed or tokenised is so once, then it
// is immutable. It is data: a list of phases, each with the components that it reads and what comes of it.
// Jobs, plans, goldens and benchmarks walk that list; what a phase does is a PhaseWork, a slice at a time,
// and whoever walks owns the loop: pins, memory, cancels, progress and fairness are written once, for all
// families.
//
//   auto run = pipeline.Prepare(params);
//   RunState state;
//   for (size_t i = 0; i < run->phases().size(); ++i) {
//     auto work = run->Begin(i, state);
//     bool over = false;
//     while (!over) over = work->Slice(views_of(work->reads()), options)->phase_over;
//   }
//   // state.pictures
#ifndef LATENTD_FAMILIES_RUN_H_
#define LATENTD_FAMILIES_RUN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "families/conditioning.h"
#include "families/denoiser.h"
#include "families/generate_params.h"
#include "patcher/weight_view.h"

namespace latentd {

// How a phase is run, beyond what the request says: what the server decides when memory is short.
struct PhaseOptions {
  int64_t tile = 0;  // the VAE's, pixels of a tile's side; 0: the whole picture at once
  // For estimates alone.
  int64_t beside_rank = 0;  // of the widest patch that is computed beside a weight
};

// How much of one prompt one encoder reads, without the tokens that begin and end a window.
struct TokenCount {
  std::string field;      // "params.prompt": whose text it reads
  std::string component;  // "text_encoder", …
  int64_t read = 0, total = 0;
};

enum class PhaseKind { kEncodeText, kEncodeMedia, kDenoise, kDecode };

struct RunPhase {
  PhaseKind kind = PhaseKind::kDenoise;
  // The components that it reads, in the order of their first use: one, several together, or one after the
  // other. PhaseWork::reads says which of them the next slice reads.
  std::vector<std::string> components;
  size_t first_reads = 1;  // of components, from the front: what the first slice reads
  int64_t units = 1;       // what its time is counted in: steps of pictures, pictures decoded, …
  bool may_tile = false;   // by PhaseOptions::tile
};

// What phases hand on, all of it in host memory, and what the walker puts in.
struct RunState {
  // Of GenerateParams::embeddings, in that order; their records are locked as long as they are here. Put in
  // by the walker before the first phase that encodes text; not read after the last.
  std::vector<std::shared_ptr<const TextEmbedding>> embeddings;

  // What phases that encode text put out, by names of the family's own. The walker may put in what it kept of
  // another run with the same OutputKey in place of such a phase.
  Conditioning conditioning;
  at::Tensor media_latents;          // of the pictures that went in, as the family lays them out
  at::Tensor latents;                // finished: [N, C, h, w]
  std::vector<at::Tensor> pictures;  // uint8 [H, W, 3], in the order of the seeds
};

// The weights that a slice reads, by component.
class WeightViews {
 public:
  WeightViews() = default;
  // Of one component.
  WeightViews(std::string component, const WeightView& view) { Add(std::move(component), view); }

  void Add(std::string component, const WeightView& view) { views_[std::move(component)] = &view; }
  // REQUIRES: the slice reads it.
  const WeightView& operator[](const std::string& component) const { return *views_.at(component); }

 private:
  std::map<std::string, const WeightView*> views_;
};

struct SliceReport {
  bool phase_over = false;
  std::optional<StepReport> step = {};  // of a step that this slice ended
};

// A phase that is under way. One thread at a time. Lives no longer than its run and state.
class PhaseWork {
 public:
  virtual ~PhaseWork() = default;

  // The components that the next slice reads, all of them at once; of those that it does not name, pins and
  // patches may be let go. It changes between slices alone. REQUIRES: the phase is not over.
  virtual std::vector<std::string> reads() const = 0;

  // Does the next slice; what the phase puts out is in the state when it is over. A slice that failed for
  // want of memory can be done again. Errors: FAILED_PRECONDITION NON_FINITE; those of WeightView; LibTorch
  // throws.
  virtual absl::StatusOr<SliceReport> Slice(const WeightViews& views, const PhaseOptions& options) = 0;

  // Lets go of what is half done on the device, for memory: the next slice begins it anew.
  virtual void LetGo() {}

  // Of a phase that denoises: how many steps it runs; what there is so far, [N, C, h, w]; and small pictures
  // of that, uint8 [h, w, 3] each, undefined where the model has no preview.
  virtual int64_t step_count() const { return 0; }
  virtual at::Tensor latents() const { return {}; }
  virtual std::vector<at::Tensor> Previews() const { return {}; }
};

// Immutable; any thread.
class Run {
 public:
  explicit Run(GenerateParams params) : params_(std::move(params)) {}
  virtual ~Run() = default;
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // With every default filled in.
  const GenerateParams& params() const { return params_; }
  const std::vector<RunPhase>& phases() const { return phases_; }
  // By prompt and encoder; of texts that take turns, the longest.
  const std::vector<TokenCount>& tokens() const { return tokens_; }

  // Of a phase that encodes text: all that it puts out depends on besides weights and patches (equal keys,
  // equal conditioning), and an upper bound of the bytes of that.
  virtual std::string OutputKey(size_t phase) const = 0;
  virtual int64_t OutputBytes(size_t phase) const = 0;

  // Upper estimate of activation bytes of the slices of a phase that read `component`: of what code of this
  // kind allocates in host memory in fp32, weights converted on the way included. Of slices that read
  // several, the first one has it all.
  virtual int64_t WorkingBytes(size_t phase, const std::string& component,
                               const PhaseOptions& options) const = 0;
  // Names the shapes that those slices have: all that their memory and time depend on besides weights,
  // patches and options. Equal keys, equal shapes.
  virtual std::string ShapeKey(size_t phase, const std::string& component) const = 0;

  // The next smaller tile to try in phases that may be tiled: below `tile`, or the first one when that is 0.
  // 0: there is none.
  virtual int64_t SmallerTile(int64_t tile) const { return 0; }

  // Phases begin in order, each when those before it are over. Errors: INTERNAL for a state that lacks what
  // they put out.
  virtual absl::StatusOr<std::unique_ptr<PhaseWork>> Begin(size_t phase, RunState& state) const = 0;

 protected:
  GenerateParams params_;
  std::vector<RunPhase> phases_;
  std::vector<TokenCount> tokens_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_RUN_H_
