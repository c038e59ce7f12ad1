#include "families/encoders/embedding_tensors.h"

#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "cache/base/utf8.h"

namespace latentd {
namespace {

constexpr size_t kMaxNames = 5;  // of tensors, in messages
constexpr size_t kMaxNameBytes = 64;

struct Encoder {
  absl::string_view key;
  bool second;
};
constexpr Encoder kEncoders[] = {
    {"clip_l", false}, {"clip_g", true}, {"text_encoders_0", false}, {"text_encoders_1", true}};
// What a file for one encoder calls its vectors.
constexpr absl::string_view kOneEncoder[] = {"emb_params", "string_to_param.*"};

bool IsOfWholeNumbers(DType type) {
  switch (type) {
    case DType::kI64:
    case DType::kI32:
    case DType::kI16:
    case DType::kI8:
    case DType::kU8:
    case DType::kBool:
    case DType::kU64:
    case DType::kU32:
    case DType::kU16:
      return true;
    default:
      return false;
  }
}

// Puts a tensor that is named after an encoder where it belongs: "clip_l".
bool TakeByEncoder(absl::string_view key, const std::string& tensor, EmbeddingTensors& out) {
  for (const Encoder& encoder : kEncoders) {
    if (key != encoder.key) continue;
    (encoder.second ? out.clip_g : out.clip_l).push_back(tensor);
    return true;
  }
  return false;
}

// "<cat>" → "cat".
std::string WithoutBrackets(absl::string_view token) {
  absl::string_view inner = token;
  return absl::ConsumePrefix(&inner, "<") && absl::ConsumeSuffix(&inner, ">") ? std::string(inner)
                                                                              : std::string(token);
}

bool IsOneVector(const WeightFiles& files, const std::string& tensor) {
  const std::vector<int64_t>& shape = files.tensors().at(tensor).info->shape;
  return shape.size() == 1 || (shape.size() == 2 && shape[0] == 1);
}

// "<cat>_1", "<cat>_2", … join "<cat>".
void JoinNumbered(const WeightFiles& files, std::map<std::string, EmbeddingTensors>& by_token) {
  for (auto& [token, embedding] : by_token) {
    if (embedding.clip_l.size() != 1 || !embedding.clip_g.empty() || !IsOneVector(files, embedding.clip_l[0]))
      continue;
    for (int number = 1;; ++number) {
      const auto next = by_token.find(absl::StrCat(token, "_", number));
      if (next == by_token.end() || next->second.clip_l.size() != 1 || !next->second.clip_g.empty() ||
          !IsOneVector(files, next->second.clip_l[0])) {
        break;
      }
      embedding.clip_l.push_back(next->second.clip_l[0]);
      by_token.erase(next);  // not where the loop stands
    }
  }
}

std::vector<EmbeddingTensors> Named(std::map<std::string, EmbeddingTensors> by_token) {
  std::map<std::string, EmbeddingTensors> by_name;
  for (auto& [token, embedding] : by_token) {
    embedding.name = WithoutBrackets(token);
    by_name.emplace(embedding.name, std::move(embedding));  // "cat" beside "<cat>": the first
  }
  std::vector<EmbeddingTensors> out;
  for (auto& [name, embedding] : by_name) out.push_back(std::move(embedding));
  return out;
}

}  // namespace

absl::Status InvalidEmbedding(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_EMBEDDING",
                   absl::StrCat("is no textual inversion that can be used: ", what));
}

absl::StatusOr<std::vector<EmbeddingTensors>> EmbeddingsOf(const WeightFiles& files) {
  std::vector<std::string> tensors;
  for (const auto& [name, entry] : files.tensors()) {
    if (!IsOfWholeNumbers(entry.info->dtype)) tensors.push_back(name);
  }
  if (tensors.empty()) {  // to be named in the refusal
    for (const auto& [name, entry] : files.tensors()) tensors.push_back(name);
  }
  EmbeddingTensors whole;
  size_t taken = 0;
  std::set<absl::string_view> spellings;
  for (const std::string& tensor : tensors) {
    if (!TakeByEncoder(tensor, tensor, whole)) continue;
    ++taken;
    spellings.insert(absl::string_view(tensor).substr(0, 4));  // "clip", "text"
  }
  if (taken > 0 && taken == tensors.size() && spellings.size() == 1) return std::vector{std::move(whole)};
  if (taken == 0 && tensors.size() == 1) return std::vector{EmbeddingTensors{{}, {tensors[0]}, {}}};
  if (taken > 0 || tensors.empty() || tensors.size() > kMaxEmbeddingsOfAFile) {
    std::vector<std::string> some;
    for (const std::string& name : tensors) {
      if (some.size() < kMaxNames) some.push_back(std::string(CutUtf8(name, kMaxNameBytes)));
    }
    return InvalidEmbedding(absl::StrCat(
        "it has ", tensors.size(), " tensors (", absl::StrJoin(some, ", "),
        tensors.size() > kMaxNames ? ", …" : "",
        "), not one, or clip_l and clip_g, or text_encoders_0 and text_encoders_1, or one for each of up to ",
        kMaxEmbeddingsOfAFile, " names"));
  }
  std::map<std::string, EmbeddingTensors> by_token;
  for (const std::string& tensor : tensors) {
    const size_t dot = tensor.rfind('.');
    if (dot != std::string::npos) {
      const std::string token = tensor.substr(0, dot);
      EmbeddingTensors embedding = by_token[token];
      if (TakeByEncoder(absl::string_view(tensor).substr(dot + 1), tensor, embedding)) {
        by_token[token] = std::move(embedding);
        continue;
      }
    }
    by_token[std::string(absl::StripPrefix(tensor, "string_to_param."))].clip_l = {tensor};
  }
  std::erase_if(by_token, [](const auto& e) { return e.second.clip_l.empty() && e.second.clip_g.empty(); });
  JoinNumbered(files, by_token);
  std::vector<EmbeddingTensors> embeddings = Named(std::move(by_token));
  if (embeddings.size() == 1) embeddings[0].name.clear();
  return embeddings;
}

std::vector<EmbeddingTensors> BundledEmbeddings(const WeightFiles& files) {
  constexpr absl::string_view kPrefix = "bundle_emb.";
  std::map<std::string, EmbeddingTensors> by_token;
  for (const auto& [tensor, entry] : files.tensors()) {
    absl::string_view rest = tensor;
    if (!absl::ConsumePrefix(&rest, kPrefix) || by_token.size() >= kMaxEmbeddingsOfAFile) continue;
    const size_t dot = rest.find('.');
    if (dot == absl::string_view::npos) continue;
    const std::string token(rest.substr(0, dot));
    const absl::string_view key = rest.substr(dot + 1);
    EmbeddingTensors embedding = by_token[token];
    bool usable = TakeByEncoder(key, tensor, embedding);
    for (const absl::string_view one : kOneEncoder) {
      if (key != one) continue;
      embedding.clip_l.push_back(tensor);
      usable = true;
    }
    if (usable) by_token[token] = std::move(embedding);
  }
  std::erase_if(by_token, [](const auto& e) {
    return e.second.clip_l.size() > 1 || e.second.clip_g.size() > 1 ||
           (e.second.clip_l.empty() && e.second.clip_g.empty());
  });
  return Named(std::move(by_token));
}

}  // namespace latentd
