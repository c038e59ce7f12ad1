#include "server/catalog/embedding_set.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "families/prompt/embedding_triggers.h"
#include "patcher/model_patch.h"

namespace latentd {
namespace {

constexpr size_t kMaxCandidates = 16;  // in messages

// `status` as one of a request's field.
absl::Status OfField(const absl::Status& status, absl::string_view field) {
  ErrorDetails details = GetErrorDetails(status);
  details["field"] = std::string(field);
  return MakeError(status.code(), ErrorReason(status), status.message(), details);
}

class Resolver {
 public:
  Resolver(const Pipeline& pipeline, const Catalog& catalog, const std::vector<EmbeddingFile>& bundled,
           GenerateParams& params)
      : pipeline_(pipeline), catalog_(catalog), bundled_(bundled), params_(params) {}

  absl::Status Read(const PromptField& prompt) {
    // What else it could be is asked while the prompt is read; the first error of that is the prompt's.
    absl::Status status;
    auto known = [&](absl::string_view name) {
      const absl::StatusOr<bool> is = Add(std::string(name), prompt.field);
      status.Update(is.status());
      return is.value_or(false);
    };
    for (const EmbeddingTrigger& trigger : FindEmbeddingTriggers(prompt.text, known)) {
      RETURN_IF_ERROR(status);
      if (!trigger.known) return OfField(EmbeddingNotFound(trigger.name), prompt.field);
    }
    return status;
  }

  std::vector<LockRequest> TakeRequests() { return std::move(requests_); }

 private:
  // Whether there is an embedding of that name, which is then one of the request's.
  absl::StatusOr<bool> Add(const std::string& name, absl::string_view field) {
    if (params_.embedding_names.count(name) != 0) return true;
    ASSIGN_OR_RETURN(const std::optional<EmbeddingFile> file, Find(name, field));
    if (!file) return false;
    auto& embeddings = params_.embeddings;
    const auto same = std::find_if(embeddings.begin(), embeddings.end(),
                                   [&](const PromptEmbedding& e) { return e.name == file->name; });
    params_.embedding_names[name] = static_cast<size_t>(same - embeddings.begin());
    if (same != embeddings.end()) return true;
    if (embeddings.size() == kMaxPromptEmbeddings) {
      return FieldError(field, absl::StrCat("names more than ", kMaxPromptEmbeddings, " embeddings"));
    }
    auto opened = file->Open();
    if (!opened.ok()) return OfField(opened.status(), field);
    if (absl::Status status = pipeline_.CheckEmbedding(file->name, opened->shape); !status.ok()) {
      return OfField(status, field);
    }
    embeddings.push_back({.name = file->name, .id = opened->request.key.id, .tokens = opened->shape.tokens});
    requests_.push_back(std::move(opened->request));
    return true;
  }

  absl::StatusOr<std::optional<EmbeddingFile>> Find(const std::string& name, absl::string_view field) {
    if (auto file = catalog_.Embedding(name); file.ok()) return *std::move(file);
    if (!by_last_segment_) by_last_segment_ = NamesByLastSegment(catalog_.EmbeddingNames());
    if (const auto found = by_last_segment_->find(name); found != by_last_segment_->end()) {
      const std::vector<std::string>& candidates = found->second;
      if (candidates.size() > 1) return Ambiguous(name, field, candidates);
      auto file = catalog_.Embedding(candidates[0]);
      return file.ok() ? std::optional(*std::move(file)) : std::nullopt;
    }
    std::vector<std::string> candidates;
    std::optional<EmbeddingFile> file;
    for (const EmbeddingFile& bundled : bundled_) {
      if (bundled.name != name && bundled.token != name) continue;
      candidates.push_back(bundled.name);
      file = bundled;
    }
    if (candidates.size() > 1) return Ambiguous(name, field, candidates);
    return file;
  }

  static absl::Status Ambiguous(const std::string& name, absl::string_view field,
                                const std::vector<std::string>& candidates) {
    const auto end =
        candidates.begin() + static_cast<std::ptrdiff_t>(std::min(candidates.size(), kMaxCandidates));
    const std::string list = absl::StrJoin(candidates.begin(), end, ", ");
    return MakeError(absl::StatusCode::kInvalidArgument, "EMBEDDING_AMBIGUOUS",
                     absl::StrCat("'", name, "' may be each of ", candidates.size(), " embeddings: ", list,
                                  end == candidates.end() ? "" : ", …"),
                     {{"field", std::string(field)},
                      {"embedding", name},
                      {"count", absl::StrCat(candidates.size())},
                      {"candidates", list}});
  }

  const Pipeline& pipeline_;
  const Catalog& catalog_;
  const std::vector<EmbeddingFile>& bundled_;
  GenerateParams& params_;
  std::vector<LockRequest> requests_;
  std::optional<std::map<std::string, std::vector<std::string>>> by_last_segment_;
};

}  // namespace

std::map<std::string, std::vector<std::string>> NamesByLastSegment(const std::vector<std::string>& names) {
  std::map<std::string, std::vector<std::string>> by_last;
  for (const std::string& name : names) by_last[name.substr(name.rfind('/') + 1)].push_back(name);
  return by_last;
}

std::vector<EmbeddingFile> EmbeddingsOfLoras(const std::vector<HeldLora>& loras) {
  std::vector<EmbeddingFile> all;
  for (const HeldLora& lora : loras) {
    for (EmbeddingFile& embedding : EmbeddingsOfLora(lora.name, lora.handle.As<ModelPatch>().files())) {
      all.push_back(std::move(embedding));
    }
  }
  return all;
}

void NoteUnusedEmbeddings(const Pipeline& pipeline, const ModelPatch& patch, PatchReport& report) {
  std::set<std::string> usable;
  GenerateParams params;
  params.negative_prompt = "";
  if (patch.files() != nullptr && !pipeline.EmbeddingPrompts(params).empty()) {
    for (const EmbeddingTensors& tensors : BundledEmbeddings(*patch.files())) {
      const auto shape = TextEmbedding::Describe(*patch.files(), tensors);
      if (shape.ok() && pipeline.CheckEmbedding(tensors.name, *shape).ok()) usable.insert(tensors.name);
    }
  }
  report.unused_embeddings.clear();
  for (const std::string& name : report.embeddings) {
    if (usable.count(name) == 0) report.unused_embeddings.push_back(name);
  }
}

absl::StatusOr<std::vector<LockRequest>> ResolveEmbeddings(const Pipeline& pipeline, const Catalog& catalog,
                                                           GenerateParams& params,
                                                           const std::vector<EmbeddingFile>& bundled) {
  params.embeddings.clear();
  params.embedding_names.clear();
  Resolver resolver(pipeline, catalog, bundled, params);
  for (const PromptField& prompt : pipeline.EmbeddingPrompts(params)) RETURN_IF_ERROR(resolver.Read(prompt));
  return resolver.TakeRequests();
}

absl::StatusOr<std::vector<std::shared_ptr<const TextEmbedding>>> VectorsOf(
    const Pipeline& pipeline, absl::Span<const LockHandle> handles, const GenerateParams& params) {
  std::vector<std::shared_ptr<const TextEmbedding>> all;
  for (size_t i = 0; i < handles.size(); ++i) {
    const PromptEmbedding& embedding = params.embeddings[i];
    auto vectors = std::static_pointer_cast<const TextEmbedding>(handles[i].resource());
    if (vectors->shape().tokens != embedding.tokens ||
        !pipeline.CheckEmbedding(embedding.name, vectors->shape()).ok()) {
      return MakeError(
          absl::StatusCode::kAborted, "EMBEDDING_CHANGED",
          absl::StrCat("embedding ", embedding.name, " was replaced while it was read; try again"),
          {{"embedding", embedding.name}, {"retry_ms", "100"}});
    }
    all.push_back(std::move(vectors));
  }
  return all;
}

}  // namespace latentd
