#include "families/encoders/text_embedding.h"

#include <algorithm>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "cache/base/utf8.h"
#include "families/prompt/embedding_triggers.h"

namespace latentd {
namespace {

constexpr int64_t kMaxColumns = 1 << 16;
constexpr size_t kMaxNameBytes = 64;

absl::Status InvalidTensor(absl::string_view name, absl::string_view what) {
  return InvalidEmbedding(absl::StrCat("tensor ", CutUtf8(name, kMaxNameBytes), " ", what));
}

// Adds the vectors of a tensor to `tokens`, and sets the columns.
absl::Status Measure(const std::string& name, const TensorInfo& info, int64_t& tokens, int64_t& columns) {
  if (!IsFloatingPoint(info.dtype)) {
    return InvalidTensor(name, absl::StrCat("holds ", DTypeName(info.dtype), ", not floating point"));
  }
  const bool one = info.shape.size() == 1;
  if (!one && info.shape.size() != 2) {
    return InvalidTensor(name, absl::StrCat("has ", info.shape.size(), " dimensions, not 1 or 2"));
  }
  const int64_t count = one ? 1 : info.shape[0];
  if (count < 1 || count > kMaxEmbeddingTokens - tokens) {
    return InvalidTensor(name, absl::StrCat("has ", count, " vectors", tokens > 0 ? " more" : "",
                                            "; there are 1 to ", kMaxEmbeddingTokens, " to a prompt"));
  }
  if (info.shape.back() < 1 || info.shape.back() > kMaxColumns) {
    return InvalidTensor(name, absl::StrCat("has ", info.shape.back(), " columns"));
  }
  if (columns != 0 && info.shape.back() != columns) {
    return InvalidTensor(
        name, absl::StrCat("has ", info.shape.back(), " columns, where those before it have ", columns));
  }
  columns = info.shape.back();
  tokens += count;
  return absl::OkStatus();
}

}  // namespace

absl::string_view EmbeddingEncoderName(EmbeddingEncoder encoder) {
  return encoder == EmbeddingEncoder::kClipL ? "clip_l" : "clip_g";
}

absl::string_view TextEmbeddingShape::family() const {
  if (clip_l == 768 && clip_g == 0) return "SD 1.x";
  if (clip_l == 1024 && clip_g == 0) return "SD 2.x";
  if (clip_g == 1280 && (clip_l == 0 || clip_l == 768)) return "SDXL";
  return "";
}

std::string TextEmbeddingShape::ToString() const {
  std::vector<std::string> parts;
  for (const EmbeddingEncoder encoder : {EmbeddingEncoder::kClipL, EmbeddingEncoder::kClipG}) {
    if (columns(encoder) == 0) continue;
    parts.push_back(absl::StrCat(EmbeddingEncoderName(encoder), " ", columns(encoder)));
  }
  return absl::StrJoin(parts, ", ");
}

absl::StatusOr<TextEmbeddingShape> TextEmbedding::Describe(const WeightFiles& files,
                                                           const EmbeddingTensors& tensors) {
  TextEmbeddingShape shape;
  for (const auto& [names, columns] :
       {std::pair(&tensors.clip_l, &shape.clip_l), std::pair(&tensors.clip_g, &shape.clip_g)}) {
    int64_t tokens = 0;
    for (const std::string& name : *names) {
      RETURN_IF_ERROR(Measure(name, *files.tensors().at(name).info, tokens, *columns));
    }
    if (shape.tokens != 0 && tokens != 0 && tokens != shape.tokens) {
      return InvalidTensor(
          names->front(),
          absl::StrCat("has ", tokens, " vectors, where the other encoder has ", shape.tokens));
    }
    shape.tokens = std::max(shape.tokens, tokens);
  }
  return shape;
}

absl::StatusOr<std::shared_ptr<const TextEmbedding>> TextEmbedding::Load(
    std::shared_ptr<const WeightFiles> files, const EmbeddingTensors& tensors, const LoadContext& context) {
  auto embedding = std::make_shared<TextEmbedding>();
  ASSIGN_OR_RETURN(embedding->shape_, Describe(*files, tensors));
  files->TakeSamples();
  for (const auto& [names, vectors] :
       {std::pair(&tensors.clip_l, &embedding->clip_l_), std::pair(&tensors.clip_g, &embedding->clip_g_)}) {
    std::vector<at::Tensor> parts;
    for (const std::string& name : *names) {
      if (context.cancelled()) return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "load cancelled");
      ASSIGN_OR_RETURN(const at::Tensor tensor, files->Read(name));
      // A copy, whatever type it is of.
      parts.push_back(
          tensor.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).reshape({-1, tensor.size(-1)}));
      RETURN_IF_ERROR(files->Check());
      if (!parts.back().isfinite().all().item<bool>())
        return InvalidTensor(name, "holds a value that is not finite");
    }
    if (!parts.empty()) *vectors = parts.size() == 1 ? parts[0].contiguous() : at::cat(parts);
  }
  context.Progress(embedding->bytes(), embedding->bytes());
  embedding->files_ = std::move(files);
  return embedding;
}

}  // namespace latentd
