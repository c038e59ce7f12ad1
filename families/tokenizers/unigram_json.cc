#include "families/tokenizers/unigram_json.h"

#include <cstdint>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cache/base/error.h"
#include "families/config/json_config.h"

namespace latentd {
namespace {

constexpr int64_t kMaxTokenizerBytes = 64 << 20;

absl::Status NotRead(const std::string& label, absl::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                   absl::StrCat(label, ": ", what), {{"file", label}});
}

// Fields of sentencepiece_model.proto, in protobuf's wire format.
constexpr uint32_t kPieces = 1, kTrainer = 2, kNormalizer = 3;
constexpr uint32_t kText = 1, kScore = 2, kKind = 3;         // of a piece
constexpr uint64_t kNormal = 1, kUnknown = 2, kControl = 3;  // kinds
constexpr uint32_t kModelType = 3;                           // of the trainer
constexpr uint64_t kUnigram = 1;
constexpr uint32_t kName = 1, kTable = 2;  // of the normalizer, whose flags are true if left out

void PutVarint(uint64_t value, std::string& out) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}
void PutNumber(uint32_t field, uint64_t value, std::string& out) {
  PutVarint(field << 3, out);
  PutVarint(value, out);
}
void PutFloat(uint32_t field, float value, std::string& out) {
  PutVarint(field << 3 | 5, out);
  char bytes[4];
  std::memcpy(bytes, &value, 4);
  out.append(bytes, 4);
}
void PutText(uint32_t field, absl::string_view text, std::string& out) {
  PutVarint(field << 3 | 2, out);
  PutVarint(text.size(), out);
  absl::StrAppend(&out, text);
}

// The table of normalisations of {"type": "Precompiled", …}, which may stand among others that do what the
// SentencePiece library does by itself: white space is collapsed, and taken off the ends.
absl::Status FindTable(JsonConfig& normalizer, int depth, std::string& table) {
  constexpr int kMaxDepth = 4;
  const std::string type = normalizer.String("type", "");
  if (type == "Precompiled") {
    const std::string text = normalizer.String("precompiled_charsmap", "");
    if (!absl::Base64Unescape(text, &table))
      return NotRead(normalizer.label(), "precompiled_charsmap is no base64");
  } else if (type == "Sequence" && depth < kMaxDepth) {
    for (auto& [key, one] : normalizer.Objects("normalizers"))
      RETURN_IF_ERROR(FindTable(one, depth + 1, table));
  } else if (type == "Replace") {
    JsonConfig pattern = normalizer.Object("pattern");
    const bool spaces = pattern.String("Regex", "") == " {2,}";
    RETURN_IF_ERROR(pattern.status());
    if (!spaces) return NotRead(normalizer.label(), "replaces text, which is not done here");
  } else if (type != "" && type != "Strip") {
    return NotRead(normalizer.label(), absl::StrCat("normalises by ", type, ", which is not done here"));
  }
  return normalizer.status();
}

}  // namespace

absl::StatusOr<std::string> SentencePieceModelOf(const std::string& path) {
  ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path, kMaxTokenizerBytes));
  JsonConfig model = json.Object("model");
  const std::string type = model.String("type", "");
  if (type != "Unigram")
    return NotRead(json.label(), absl::StrCat("is a model of type ", type, ", not Unigram"));
  if (model.Bool("byte_fallback", false)) return NotRead(json.label(), "byte_fallback is not supported");
  const auto pieces = model.Scores("vocab");
  const int64_t unknown = model.Int("unk_id", 0, 0, 1 << 24);
  RETURN_IF_ERROR(model.status());

  std::set<std::string> controls;
  for (auto& [key, token] : json.Objects("added_tokens")) {
    controls.insert(token.String("content", ""));
    RETURN_IF_ERROR(token.status());
  }
  std::string table;
  JsonConfig normalizer = json.Object("normalizer");
  RETURN_IF_ERROR(FindTable(normalizer, 0, table));
  RETURN_IF_ERROR(json.status());

  std::string proto;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto& [text, score] = pieces[i];
    std::string piece;
    PutText(kText, text, piece);
    PutFloat(kScore, static_cast<float>(score), piece);
    PutNumber(kKind,
              static_cast<int64_t>(i) == unknown ? kUnknown
              : controls.count(text) != 0        ? kControl
                                                 : kNormal,
              piece);
    PutText(kPieces, piece, proto);
  }
  std::string trainer, own;
  PutNumber(kModelType, kUnigram, trainer);
  PutText(kTrainer, trainer, proto);
  PutText(kName, table.empty() ? "identity" : "nmt_nfkc", own);
  if (!table.empty()) PutText(kTable, table, own);
  PutText(kNormalizer, own, proto);
  return proto;
}

}  // namespace latentd
