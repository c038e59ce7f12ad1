// A family is the code that knows one architecture. Its parts, from the outside in:
//
//   Family    detects whether files are of its architecture and describes the model in them
//   Pipeline  one described model: components, defaults, what it takes of a request
//   Run       what it makes of one request: phases, one after the other (families/run.h)
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
#include "families/generate_params.h"
#include "families/request_uses.h"
#include "families/run.h"
#include "patcher/patch_target.h"

namespace latentd {

struct TextEmbeddingShape;  // families/encoders/text_embedding.h

// One part of a model with weights, described but not loaded.
struct Component {
  std::string name;  // "transformer", "text_encoder", "text_encoder_2", "vae"
  std::shared_ptr<const ComponentLayout> layout;
  std::shared_ptr<const WeightFiles> files;
  const KeyMap* key_map = nullptr;  // null: the file has canonical names. Lives as long as the program
  std::string prefix;               // taken off the file's names first
  bool leaves_fp16 = false;         // activations go beyond its range: VAEs, T5
  // Where LoRAs find their layers; a component without one takes no patches.
  std::optional<PatchTarget> patch_target;
};

// One of a request's prompts.
struct PromptField {
  absl::string_view field;  // "params.prompt"
  absl::string_view text;
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

  // Prompts that may name textual inversions (families/prompt/embedding_triggers.h), for whoever sets
  // params.embeddings before Prepare. None: the model takes none, and what looks like a name is text.
  // `params` need not be prepared; the result lives as long as they do.
  virtual std::vector<PromptField> EmbeddingPrompts(const GenerateParams& params) const { return {}; }
  // Whether a textual inversion is for this model's text encoders. Errors: FAILED_PRECONDITION
  // EMBEDDING_MISMATCH.
  virtual absl::Status CheckEmbedding(const std::string& name, const TextEmbeddingShape& shape) const {
    return absl::OkStatus();
  }

  // What becomes of one request. Parses and tokenises, loads nothing. Errors: INVALID_ARGUMENT INVALID_FIELD
  // naming the field. The run lives no longer than the pipeline.
  virtual absl::StatusOr<std::shared_ptr<const Run>> Prepare(GenerateParams params) const = 0;

  // Where runs spend their time: a device that holds it is the first choice. Of several, the first.
  virtual std::string denoiser_component() const = 0;

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
