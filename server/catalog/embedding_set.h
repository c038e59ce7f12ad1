// The textual inversions that a request's prompts name: checked, and found on disk.
#ifndef LATENTD_SERVER_CATALOG_EMBEDDING_SET_H_
#define LATENTD_SERVER_CATALOG_EMBEDDING_SET_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache/model_cache.h"
#include "families/family.h"
#include "server/catalog/catalog.h"
#include "server/catalog/lora_set.h"

namespace latentd {

// Names for which a last segment stands: "cat" → {"pets/cat", "wild/cat"}. A full name stands for itself
// besides, and goes first.
std::map<std::string, std::vector<std::string>> NamesByLastSegment(const std::vector<std::string>& names);

// Those that the LoRAs of a set bring with them. `loras` are held: their files are as they were when they
// were loaded.
std::vector<EmbeddingFile> EmbeddingsOfLoras(const std::vector<HeldLora>& loras);

// Sets the report's unused embeddings: those that the LoRA brings and `pipeline` cannot use.
void NoteUnusedEmbeddings(const Pipeline& pipeline, const ModelPatch& patch, PatchReport& report);

// Writes down in `params` which embeddings the prompts name, without their vectors, and returns what the
// cache needs to lock them, in the same order. Reads headers: not on an RPC thread. Errors, naming the
// prompt's field: NOT_FOUND EMBEDDING_NOT_FOUND, for embedding:name alone; INVALID_ARGUMENT
// EMBEDDING_AMBIGUOUS with the candidates, INVALID_FIELD (too many); those of EmbeddingFile::Open and
// Pipeline::CheckEmbedding. `bundled` are those of the request's LoRAs, of which the last part of the name
// will do; what the catalog has of that name goes before them, as in A1111.
absl::StatusOr<std::vector<LockRequest>> ResolveEmbeddings(const Pipeline& pipeline, const Catalog& catalog,
                                                           GenerateParams& params,
                                                           const std::vector<EmbeddingFile>& bundled = {});

// The vectors of locked records, in the order of ResolveEmbeddings. They go before the handles do. Errors:
// ABORTED EMBEDDING_CHANGED for a file that was replaced between the two.
absl::StatusOr<std::vector<std::shared_ptr<const TextEmbedding>>> VectorsOf(
    const Pipeline& pipeline, absl::Span<const LockHandle> handles, const GenerateParams& params);

}  // namespace latentd

#endif  // LATENTD_SERVER_CATALOG_EMBEDDING_SET_H_
