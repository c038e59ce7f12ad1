#include "families/text/t5_tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "families/config/json_config.h"
#include "families/text/sentencepiece_model.h"
#include "families/text/unicode.h"

namespace latentd {
namespace {

constexpr int64_t kMaxModelBytes = 64 << 20;
constexpr int64_t kPad = 0;

}  // namespace

struct T5Tokenizer::Impl {
  std::unique_ptr<const SentencePieceModel> model;
  std::vector<std::string> specials;
  std::vector<int64_t> special_ids;
  int64_t eos = 1;
};

T5Tokenizer::T5Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
T5Tokenizer::~T5Tokenizer() = default;

absl::StatusOr<std::unique_ptr<const T5Tokenizer>> T5Tokenizer::Load(const std::string& folder,
                                                                     int64_t vocabulary) {
  const std::string path = folder + "/spiece.model";
  const std::string label = ShortPath(path);
  ASSIGN_OR_RETURN(const std::string bytes, ReadTextFile(path, kMaxModelBytes));
  auto impl = std::make_unique<Impl>();
  absl::StatusOr<std::unique_ptr<const SentencePieceModel>> model = SentencePieceModel::Load(bytes);
  if (!model.ok()) return WithPrefix(model.status(), absl::StrCat(label, ": "));
  impl->model = *std::move(model);
  const int64_t pieces = impl->model->size();
  if (pieces > vocabulary) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                     absl::StrCat(label, ": has ", pieces, " pieces, the model knows ", vocabulary),
                     {{"file", label}});
  }

  int64_t extra_ids = 100;
  std::string eos = "</s>", pad = "<pad>", unknown = "<unk>";
  const std::string config_path = folder + "/tokenizer_config.json";
  if (std::error_code ec; std::filesystem::exists(config_path, ec)) {
    ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(config_path));
    extra_ids = json.Int("extra_ids", extra_ids, 0, 1000);
    eos = json.Token("eos_token", eos);
    pad = json.Token("pad_token", pad);
    unknown = json.Token("unk_token", unknown);
    RETURN_IF_ERROR(json.status());
  }
  // Control tokens written out in a text are those tokens, as in transformers.
  auto add = [&](const std::string& token) {
    const int id = impl->model->IdOf(token);
    if (id != impl->model->unknown_id() || token == unknown) {
      impl->specials.push_back(token);
      impl->special_ids.push_back(id);
    }
    return id;
  };
  impl->eos = add(eos);
  if (impl->specials.empty()) {
    return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE",
                     absl::StrCat(label, ": has no end token ", eos), {{"file", label}});
  }
  add(pad);
  add(unknown);
  // The sentinels stand behind the model's own pieces, in reverse.
  for (int64_t i = 0; i < extra_ids; ++i) {
    const int64_t id = pieces + extra_ids - 1 - i;
    if (id >= vocabulary) continue;
    impl->specials.push_back(absl::StrCat("<extra_id_", i, ">"));
    impl->special_ids.push_back(id);
  }
  return std::unique_ptr<const T5Tokenizer>(new T5Tokenizer(std::move(impl)));
}

std::vector<int64_t> T5Tokenizer::Tokenize(absl::string_view text) const {
  std::vector<int64_t> ids;
  const std::string valid = ValidUtf8(text);
  for (const TextPiece& piece : SplitAtTokens(valid, impl_->specials)) {
    if (piece.special >= 0) {
      ids.push_back(impl_->special_ids[static_cast<size_t>(piece.special)]);
      continue;
    }
    const std::string clean = CollapseWhitespace(piece.text);
    for (int id : impl_->model->Encode(clean)) ids.push_back(id);
  }
  return ids;
}

int64_t T5Tokenizer::Count(absl::string_view text) const {
  return static_cast<int64_t>(Tokenize(text).size());
}

std::vector<int64_t> T5Tokenizer::Encode(absl::string_view text, int64_t length) const {
  std::vector<int64_t> ids = Tokenize(text);
  const auto limit = static_cast<size_t>(length);
  if (ids.size() > limit - 1) ids.resize(limit - 1);
  ids.push_back(impl_->eos);
  ids.resize(limit, kPad);
  return ids;
}

}  // namespace latentd
