// A family is the code that knows one architecture. Its parts, from the outside in:
//
//   Family    detects whether files are of its architecture and describes the model in them
//   Pipeline  one described model: components, defaults, and the phases encode → begin → decode
//   Denoiser  one running generation, picture by picture (families/denoiser.h)
//
// Nothing here holds weights or knows of sessions, devices or LoRAs: weights come in as a WeightView. All
// that goes in and out of a phase (conditioning, latents, pictures) is in host memory; a phase takes it to
// where the weights are, and its results back.
#ifndef LATENTD_FAMILIES_FAMILY_H_
#define LATENTD_FAMILIES_FAMILY_H_

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/weights/component_layout.h"
#include "cache/weights/key_map.h"
#include "cache/weights/weight_files.h"
#include "families/conditioning.h"
#include "families/denoiser.h"
#include "families/generate_params.h"
#include "families/request_uses.h"
#include "patcher/patch_target.h"
#include "patcher/weight_view.h"

namespace latentd {

struct TextEmbeddingShape;  // families/encoders/text_embedding.h

// One part of a model with weights, described but not loaded.
struct Component {
  std::string name;  // "transformer", "text_encoder", "text_encoder_2", "vae"
  std::shared_ptr<const ComponentLayout> layout;
  std::shared_ptr<const WeightFiles> files;
  const KeyMap* key_map = nullptr;  // null: the file has canonical names. Lives as long as the program
  std::string prefix;               // taken off the file's names first
  // Where LoRAs find their layers; a component without one takes no patches.
  std::optional<PatchTarget> patch_target;
};

// How a phase is run, beyond what the request says: what the server decides when memory is short.
struct PhaseOptions {
  int64_t tile = 0;  // the VAE's, pixels of a tile's side; 0: the whole picture at once
  // For estimates alone.
  bool encodes_picture = false;  // the VAE: a picture is encoded, not decoded
  int64_t beside_rank = 0;       // of the widest patch that is computed beside a weight
};

// One of a request's prompts.
struct PromptField {
  absl::string_view field;  // "params.prompt"
  absl::string_view text;
};

// How much of one prompt one encoder reads, without the tokens that begin and end a window.
struct TokenCount {
  std::string field;      // "params.prompt": whose text it reads
  std::string component;  // "text_encoder", …
  int64_t read = 0, total = 0;
};

class Pipeline {
 public:
  virtual ~Pipeline() = default;

  virtual absl::string_view family() const = 0;   // "flux"
  virtual absl::string_view variant() const = 0;  // "dev", "schnell", …
  virtual const std::vector<Component>& components() const = 0;
  virtual const ModelDefaults& defaults() const = 0;
  // What of a request it takes: what Validate goes by, and GetModel shows. Any thread.
  const RequestUses& uses() const {
    std::call_once(uses_made_, [this] { uses_ = MakeUses(); });
    return uses_;
  }

  // Checks every field and fills in defaults. Errors: INVALID_ARGUMENT INVALID_FIELD naming the field.
  virtual absl::Status Validate(GenerateParams& params) const = 0;

  // Prompts that may name textual inversions (families/prompt/embedding_triggers.h), for whoever sets
  // params.embeddings before Validate. None: the model takes none, and what looks like a name is text.
  // `params` need not have passed Validate; the result lives as long as they do.
  virtual std::vector<PromptField> EmbeddingPrompts(const GenerateParams& params) const { return {}; }
  // Whether a textual inversion is for this model's text encoders. Errors: FAILED_PRECONDITION
  // EMBEDDING_MISMATCH.
  virtual absl::Status CheckEmbedding(const std::string& name, const TextEmbeddingShape& shape) const {
    return absl::OkStatus();
  }

  // The text encoders this generation needs, in order; Encode is called once for each.
  virtual std::vector<std::string> EncoderComponents(const GenerateParams& params) const = 0;
  virtual absl::Status Encode(const std::string& component, const WeightView& weights,
                              const GenerateParams& params, Conditioning& conditioning) const = 0;
  // All that Encode's result depends on besides weights and patches: equal keys, equal conditioning.
  virtual std::string EncodeKey(const std::string& component, const GenerateParams& params) const = 0;
  // By prompt and encoder; of texts that take turns, the longest. REQUIRES: params passed Validate.
  virtual absl::StatusOr<std::vector<TokenCount>> CountTokens(const GenerateParams& params) const {
    return std::vector<TokenCount>();
  }
  // Upper bound of the bytes that Encode adds to the conditioning.
  virtual int64_t ConditioningBytes(const std::string& component, const GenerateParams& params) const = 0;

  // The request's pictures as latents [1, C, h, w] (or [N, …] where the posterior is sampled per seed), those
  // of several pictures one after the other in C, as Begin takes them. REQUIRES: params.has_pictures().
  virtual std::string image_encoder_component() const = 0;
  virtual absl::StatusOr<at::Tensor> EncodeImage(const WeightView& weights, const GenerateParams& params,
                                                 const PhaseOptions& options) const = 0;

  virtual std::string denoiser_component() const = 0;
  // `image_latents` are EncodeImage's; undefined without pictures. REQUIRES: params passed Validate.
  virtual absl::StatusOr<std::unique_ptr<Denoiser>> Begin(const GenerateParams& params,
                                                          Conditioning conditioning,
                                                          at::Tensor image_latents) const = 0;

  virtual std::string decoder_component() const = 0;
  // One picture: latents [1, C, h, w] → uint8 [H, W, 3]. Errors: FAILED_PRECONDITION NON_FINITE.
  virtual absl::StatusOr<at::Tensor> Decode(const WeightView& weights, const at::Tensor& latents,
                                            const PhaseOptions& options) const = 0;
  // What becomes of a decoded picture, uint8 [H, W, 3] in host memory, before it is a file. REQUIRES: params
  // passed Validate.
  virtual at::Tensor Finish(const at::Tensor& picture, const GenerateParams& params) const { return picture; }
  // The next smaller tile to try: below `tile`, or the first one when that is 0. 0: there is none.
  virtual int64_t SmallerTile(const GenerateParams& params, int64_t tile) const = 0;

  // A small picture of unfinished latents [1, C, h, w] → uint8 [h, w, 3], by a linear map; undefined when
  // the model has none.
  virtual at::Tensor Preview(const at::Tensor& latents) const = 0;

  // Upper estimate of activation bytes of a phase on `component` for this request: of what code of this kind
  // allocates in host memory in fp32, weights converted on the way included.
  virtual int64_t WorkingBytes(const std::string& component, const GenerateParams& params,
                               const PhaseOptions& options) const = 0;
  // Names the shapes that a phase on `component` has for this request: all that its memory and its time
  // depend on besides weights, patches and options. Equal keys, equal shapes.
  virtual std::string ShapeKey(const std::string& component, const GenerateParams& params) const = 0;

 protected:
  virtual RequestUses MakeUses() const = 0;

 private:
  mutable std::once_flag uses_made_;
  mutable RequestUses uses_;
};

// The files that make up one model under a root.
struct ModelFiles {
  std::string name;    // what clients call it
  std::string folder;  // a diffusers folder (has model_index.json); else empty
  std::string file;    // a single-file denoiser; else empty
  // For a single file: the folder of the model that lends text encoders, VAE and scheduler.
  std::string base_folder;
};

class Family {
 public:
  virtual ~Family() = default;
  virtual absl::string_view name() const = 0;

  // True when the files are of this family. Looks at names only (model_index.json, tensor names).
  virtual bool Detect(const ModelFiles& files) const = 0;

  // Reads configs and headers, no weights. Errors: those of WeightFiles::Open; FAILED_PRECONDITION
  // UNSUPPORTED_MODEL with what is not understood.
  virtual absl::StatusOr<std::unique_ptr<Pipeline>> Open(const ModelFiles& files) const = 0;
};

// All families, by detection order. Adding one is adding a row in registry.cc.
const std::vector<const Family*>& AllFamilies();

}  // namespace latentd

#endif  // LATENTD_FAMILIES_FAMILY_H_
