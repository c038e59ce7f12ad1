#include "families/text/text_embedding.h"

#include <algorithm>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/error.h"
#include "cache/utf8.h"
#include "families/text/embedding_triggers.h"

namespace latentd {
namespace {

constexpr int64_t kMaxColumns = 1 << 16;
constexpr size_t kMaxNames = 5;  // of tensors, in messages
constexpr size_t kMaxNameBytes = 64;

absl::Status Invalid(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_EMBEDDING",
                   absl::StrCat("is no textual inversion that can be used: ", what));
}

absl::Status InvalidTensor(absl::string_view name, absl::string_view what) {
  return Invalid(absl::StrCat("tensor ", CutUtf8(name, kMaxNameBytes), " ", what));
}

// The names of the tensors of each encoder; empty: there is none.
struct Names {
  std::string clip_l, clip_g;
};

absl::StatusOr<Names> NamesIn(const WeightFiles& files) {
  const auto& tensors = files.tensors();
  for (const auto& [l, g] : {std::pair("clip_l", "clip_g"), {"text_encoders_0", "text_encoders_1"}}) {
    Names names;
    if (tensors.count(l) != 0) names.clip_l = l;
    if (tensors.count(g) != 0) names.clip_g = g;
    const size_t count = (names.clip_l.empty() ? 0 : 1) + (names.clip_g.empty() ? 0 : 1);
    if (count > 0 && count == tensors.size()) return names;
  }
  if (tensors.size() == 1) return Names{.clip_l = tensors.begin()->first, .clip_g = {}};
  std::vector<std::string> some;
  for (const auto& [name, entry] : tensors) {
    if (some.size() < kMaxNames) some.push_back(std::string(CutUtf8(name, kMaxNameBytes)));
  }
  return Invalid(absl::StrCat("it has ", tensors.size(), " tensors (", absl::StrJoin(some, ", "),
                              tensors.size() > kMaxNames ? ", …" : "",
                              "), not one, or clip_l and clip_g, or text_encoders_0 and text_encoders_1"));
}

// Sets the columns, and the tokens where they are not known yet.
absl::Status Measure(const std::string& name, const TensorInfo& info, int64_t& tokens, int64_t& columns) {
  if (info.dtype != DType::kF32 && info.dtype != DType::kF16 && info.dtype != DType::kBF16) {
    return InvalidTensor(name, absl::StrCat("holds ", DTypeName(info.dtype), ", not F32, F16 or BF16"));
  }
  const bool one = info.shape.size() == 1;
  if (!one && info.shape.size() != 2) {
    return InvalidTensor(name, absl::StrCat("has ", info.shape.size(), " dimensions, not 1 or 2"));
  }
  const int64_t count = one ? 1 : info.shape[0];
  columns = info.shape.back();
  if (count < 1 || count > kMaxEmbeddingTokens) {
    return InvalidTensor(
        name, absl::StrCat("has ", count, " vectors; there are 1 to ", kMaxEmbeddingTokens, " to a prompt"));
  }
  if (columns < 1 || columns > kMaxColumns) {
    return InvalidTensor(name, absl::StrCat("has ", columns, " columns"));
  }
  if (tokens != 0 && tokens != count) {
    return InvalidTensor(name, absl::StrCat("has ", count, " vectors, where the other encoder has ", tokens));
  }
  tokens = count;
  return absl::OkStatus();
}

absl::StatusOr<TextEmbeddingShape> ShapeOf(const WeightFiles& files, const Names& names) {
  TextEmbeddingShape shape;
  for (const auto& [name, columns] :
       {std::pair(&names.clip_l, &shape.clip_l), std::pair(&names.clip_g, &shape.clip_g)}) {
    if (name->empty()) continue;
    RETURN_IF_ERROR(Measure(*name, *files.tensors().at(*name).info, shape.tokens, *columns));
  }
  return shape;
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

absl::StatusOr<TextEmbeddingShape> TextEmbedding::Describe(const WeightFiles& files) {
  ASSIGN_OR_RETURN(const Names names, NamesIn(files));
  return ShapeOf(files, names);
}

absl::StatusOr<std::shared_ptr<const TextEmbedding>> TextEmbedding::Load(
    std::shared_ptr<const WeightFiles> files, const LoadContext& context) {
  ASSIGN_OR_RETURN(const Names names, NamesIn(*files));
  auto embedding = std::make_shared<TextEmbedding>();
  ASSIGN_OR_RETURN(embedding->shape_, ShapeOf(*files, names));
  files->TakeSamples();
  for (const auto& [name, vectors] :
       {std::pair(&names.clip_l, &embedding->clip_l_), std::pair(&names.clip_g, &embedding->clip_g_)}) {
    if (name->empty()) continue;
    if (context.cancelled()) return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "load cancelled");
    ASSIGN_OR_RETURN(const at::Tensor tensor, files->Read(*name));
    // A copy, whatever type it is of.
    *vectors = tensor.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true)
                   .reshape({embedding->shape_.tokens, tensor.size(-1)})
                   .contiguous();
    RETURN_IF_ERROR(files->Check());
    if (!vectors->isfinite().all().item<bool>())
      return InvalidTensor(*name, "holds a value that is not finite");
  }
  context.Progress(embedding->bytes(), embedding->bytes());
  embedding->files_ = std::move(files);
  return embedding;
}

}  // namespace latentd
