// What there is to serve: models, LoRAs and textual inversions (embeddings) under the configured roots, by
// name.
//
// Names are paths below a root without the file's extension ("portraits/inkwash"). They resolve inside the
// roots only (root_files.h): a name with "..", an absolute path, or a link that leads out of all roots is not
// found, and a model with such a link in its folder is refused, unless links are followed. Files are looked
// at on every call, so that what is added, replaced or removed is seen without a restart; opened models are
// kept until their files change.
//
// An id is of what was opened: of the descriptors of the files that weights are read from, and of settings as
// they were read. Files that are moved about while a model is opened make it be opened again.
//
// A model is a folder with a model_index.json (diffusers layout), or a single .safetensors denoiser with a
// file NAME.json beside it that says {"base": "MODEL"}: whose text encoders, VAE and scheduler it uses.
//
// Thread-safe. Calls read the disk: not from an RPC or executor thread.
#ifndef LATENTD_SERVER_CATALOG_CATALOG_H_
#define LATENTD_SERVER_CATALOG_CATALOG_H_

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "cache/base/mutex.h"
#include "cache/model_cache.h"
#include "families/encoders/text_embedding.h"
#include "families/family.h"
#include "server/catalog/names.h"
#include "server/catalog/root_files.h"

namespace latentd {

// A model whose configs and headers were read. Immutable.
struct OpenModel {
  // A component as the cache knows it: by what it is, whatever models it is a part of.
  struct Part {
    ModelKey key;
    int64_t bytes = 0;  // that its weights take; see WeightBytes
  };

  static std::shared_ptr<const OpenModel> Make(std::string name, std::string id, std::string source,
                                               std::unique_ptr<const Pipeline> pipeline);

  std::string name;
  std::string id;      // name@signature of its files
  std::string source;  // path below its root
  std::unique_ptr<const Pipeline> pipeline;
  std::vector<PatchTarget> patch_targets;  // of all components that take patches
  std::map<std::string, Part> parts;       // by component

  // REQUIRES of all three: the pipeline has a component of that name.
  const Component& component(const std::string& component_name) const;
  const Part& part(const std::string& component_name) const { return parts.at(component_name); }
  // What the cache needs to lock a component.
  LockRequest ComponentRequest(const std::string& component_name) const;

  // The file that a component's weights are taken from; with what stands before its names there, where that
  // differs from component to component.
  std::string SourceOf(const Component& component) const;

  // ABORTED FILE_CHANGED once a file of it was written to since it was opened; see MappedFile::Check.
  absl::Status Check() const;
  // Whether all its files are where they were opened.
  bool at_its_place() const;
};

struct LoraFile {
  std::string name;
  std::string id;  // lora/name@fingerprint, of what lies there now
  int64_t bytes = 0;
  std::string path;

  // What the cache needs to lock it, under the id of what was opened. The record holds a ModelPatch. Errors:
  // those of WeightFiles::Open.
  absl::StatusOr<LockRequest> Request() const;
};

// NOT_FOUND EMBEDDING_NOT_FOUND, on the field "name".
absl::Status EmbeddingNotFound(const std::string& name);

struct EmbeddingFile {
  std::string name;
  std::string id;     // embedding/name@fingerprint, of what lies there now
  int64_t bytes = 0;  // of the file
  std::string path;
  std::string token = {};  // which of the file's textual inversions, where it holds several
  // The LoRA file that brings it along, as it was opened. Null: it is a file of its own, at `path`.
  std::shared_ptr<const WeightFiles> bundle = nullptr;

  struct Opened {
    TextEmbeddingShape shape;
    LockRequest request;  // what the cache needs to lock it; the record holds a TextEmbedding
  };
  // Reads the header. Errors: those of WeightFiles::Open, EmbeddingsOf and TextEmbedding::Describe, with the
  // name before them; INVALID_EMBEDDING for a file of several where none of them is named, with their names.
  absl::StatusOr<Opened> Open() const;
};

// Those that a LoRA brings with it, as "LORA/NAME"; `files` is its file.
std::vector<EmbeddingFile> EmbeddingsOfLora(const std::string& lora,
                                            const std::shared_ptr<const WeightFiles>& files);

class Catalog {
 public:
  // `follow_links`: also those that lead out of the roots.
  Catalog(const std::vector<std::string>& model_roots, const std::vector<std::string>& lora_roots,
          const std::vector<std::string>& embedding_roots = {}, bool follow_links = false);

  // All names, sorted; models that cannot be opened are among them.
  std::vector<std::string> ModelNames() const;
  // What lies under the roots, looks as if it should be served, and has no name here; in order. Each is
  // logged the first time.
  std::vector<Unserved> UnservedModels() const;
  std::vector<Unserved> UnservedLoras() const;
  std::vector<Unserved> UnservedEmbeddings() const;
  // Errors: NOT_FOUND MODEL_NOT_FOUND; those of Family::Open; ABORTED FILE_CHANGED when its files do not come
  // to rest; RESOURCE_EXHAUSTED OUT_OF_DESCRIPTORS.
  absl::StatusOr<std::shared_ptr<const OpenModel>> Model(const std::string& name);

  // An opened model is not kept any more; whoever has it keeps it.
  void Forget(const std::string& name);
  // Ids of models that were opened, are not served any more, and are in nobody's hands: whatever was made of
  // them is of no use. Forgets models whose files have changed or gone.
  std::vector<std::string> TakeUnused();

  std::vector<LoraFile> Loras() const;
  // Errors: NOT_FOUND LORA_NOT_FOUND.
  absl::StatusOr<LoraFile> Lora(const std::string& name) const;

  // Files that hold several textual inversions stand for those, each under the name that the file gives it
  // ("pets/cat" of pets.safetensors). In order of name.
  std::vector<EmbeddingFile> Embeddings() const;
  // Of the same. Looks into files that it has not seen as they are now.
  std::vector<std::string> EmbeddingNames() const;
  // Also finds a file of several by its own name. Errors: NOT_FOUND EMBEDDING_NOT_FOUND.
  absl::StatusOr<EmbeddingFile> Embedding(const std::string& name) const;

  // Serves a model that is not on disk; for tests and benchmarks.
  void AddModel(std::shared_ptr<const OpenModel> model);

 private:
  struct Found {
    ModelFiles files;
    std::string source;
    std::vector<std::string> paths;  // of its files, and of folders of them
    std::string state;               // another one when anything happened to any of these
  };
  struct Kept {
    std::shared_ptr<const OpenModel> model;
    std::string state;  // in which its files were found last
  };
  absl::StatusOr<Found> Find(const std::string& name) const;
  absl::StatusOr<std::shared_ptr<const OpenModel>> FindOrOpen(const std::string& name);
  absl::StatusOr<std::shared_ptr<const OpenModel>> Open(const std::string& name, const Found& found) const;
  RootListing ListModels(bool with_unserved) const;
  std::vector<Unserved> Noted(absl::string_view kind, std::vector<Unserved> unserved) const;
  // What the file calls its textual inversions; empty for one without a name, and for what is none.
  std::vector<std::string> TokensOf(const EmbeddingFile& file) const;

  const Roots model_roots_, lora_roots_, embedding_roots_;
  mutable Mutex mu_;
  std::map<std::string, Kept> open_ ABSL_GUARDED_BY(mu_);                              // by name
  std::map<std::string, std::weak_ptr<const OpenModel>> opened_ ABSL_GUARDED_BY(mu_);  // by id: all there are
  std::map<std::string, std::shared_ptr<const OpenModel>> added_ ABSL_GUARDED_BY(mu_);
  // By the path of a file: its id when it was looked into, and TokensOf it.
  mutable std::map<std::string, std::pair<std::string, std::vector<std::string>>> tokens_
      ABSL_GUARDED_BY(mu_);
  mutable std::set<std::string> noted_ ABSL_GUARDED_BY(mu_);  // what was logged of files that are not served
};

}  // namespace latentd

#endif  // LATENTD_SERVER_CATALOG_CATALOG_H_
