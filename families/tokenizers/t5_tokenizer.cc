#include "families/tokenizers/t5_tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "cache/base/error.h"
#include "cache/base/text_file.h"
#include "families/tokenizers/added_tokens.h"
#include "families/tokenizers/sentencepiece_model.h"
#include "families/tokenizers/unicode.h"
#include "families/tokenizers/unigram_json.h"

namespace latentd {
namespace {

constexpr int64_t kMaxModelBytes = 64 << 20;
constexpr int64_t kPad = 0;
constexpr int64_t kExtraIds = 100;
constexpr absl::string_view kVerticalTab = "\v";

}  // namespace

struct T5Tokenizer::Impl {
  std::unique_ptr<const SentencePieceModel> model;
  AddedTokens added;
  int64_t eos = 1;
  bool drops_vertical_tabs = false;
};

T5Tokenizer::T5Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
T5Tokenizer::~T5Tokenizer() = default;

absl::StatusOr<std::unique_ptr<const T5Tokenizer>> T5Tokenizer::Load(const std::string& folder,
                                                                     int64_t vocabulary) {
  std::string path = folder + "/spiece.model";
  std::string bytes;
  if (std::error_code ec;
      !std::filesystem::exists(path, ec) && std::filesystem::exists(folder + "/tokenizer.json", ec)) {
    path = folder + "/tokenizer.json";
    ASSIGN_OR_RETURN(bytes, SentencePieceModelOf(path));
  } else {
    ASSIGN_OR_RETURN(bytes, ReadTextFile(path, kMaxModelBytes));
  }
  const std::string label = ShortPath(path);
  auto impl = std::make_unique<Impl>();
  absl::StatusOr<std::unique_ptr<const SentencePieceModel>> model = SentencePieceModel::Load(bytes);
  if (!model.ok()) return WithPrefix(model.status(), absl::StrCat(label, ": "));
  impl->model = *std::move(model);
  // The table of NMT's rules has no vertical tabs; without it they are white space like others.
  impl->drops_vertical_tabs = impl->model->Encode(std::string(kVerticalTab)).empty();
  const int64_t pieces = impl->model->size();

  ASSIGN_OR_RETURN(const TokenizerSettings settings, TokenizerSettings::Load(folder));
  // Control tokens written out in a text are those tokens, as in transformers.
  auto& tokens = impl->added.plain;
  auto add = [&](AddedToken token) -> int64_t {
    const AddedToken unknown = settings.Named("unk_token", "<unk>");
    const int64_t id = impl->model->IdOf(token.text);
    if (id != impl->model->unknown_id() || token.text == unknown.text) token.id = id;
    const bool known =
        std::any_of(tokens.begin(), tokens.end(), [&](const AddedToken& t) { return t.text == token.text; });
    if (token.id >= 0 && token.id < vocabulary && !known) tokens.push_back(token);
    return token.id;
  };
  for (const AddedToken& token : settings.added) add(token);
  const AddedToken eos = settings.Named("eos_token", "</s>");
  impl->eos = add(eos);
  if (impl->eos < 0 || impl->eos >= vocabulary) {
    return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE",
                     absl::StrCat(label, ": has no end token ", eos.text), {{"file", label}});
  }
  add(settings.Named("pad_token", "<pad>"));
  add(settings.Named("unk_token", "<unk>"));
  const bool has_sentinels =
      std::any_of(settings.added.begin(), settings.added.end(),
                  [](const AddedToken& t) { return absl::StartsWith(t.text, "<extra_id_"); });
  if (!has_sentinels) {
    // The sentinels stand behind the model's own pieces, in reverse.
    const int64_t extra_ids = settings.extra_ids >= 0 ? settings.extra_ids : kExtraIds;
    for (int64_t i = 0; i < extra_ids; ++i) {
      add({.text = absl::StrCat("<extra_id_", i, ">"), .id = pieces + extra_ids - 1 - i});
    }
  }
  if (pieces > vocabulary) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                     absl::StrCat(label, ": has ", pieces, " pieces, the model knows ", vocabulary),
                     {{"file", label}});
  }
  return std::unique_ptr<const T5Tokenizer>(new T5Tokenizer(std::move(impl)));
}

std::vector<int64_t> T5Tokenizer::Tokenize(absl::string_view text) const {
  std::vector<int64_t> ids;
  const std::string valid = ValidUtf8(text);
  const auto clean = [&](absl::string_view piece) {
    return CollapseWhitespace(impl_->drops_vertical_tabs ? absl::StrReplaceAll(piece, {{kVerticalTab, ""}})
                                                         : std::string(piece));
  };
  impl_->added.Read(
      valid, clean, [&](int64_t id) { ids.push_back(id); },
      [&](absl::string_view piece) {
        for (int id : impl_->model->Encode(std::string(piece))) ids.push_back(id);
      });
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
