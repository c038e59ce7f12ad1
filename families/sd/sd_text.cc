#include "families/sd/sd_text.h"

#include <algorithm>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/prompt/embedding_triggers.h"
#include "families/prompt/prompt_conditioning.h"
#include "families/prompt/prompt_windows.h"

namespace latentd {
namespace {

LongPrompts ModeOf(const SdText& text) {
  switch (text.syntax) {
    case PromptSyntax::kPlain:
      return LongPrompts::kTruncate;
    case PromptSyntax::kCompel:
      return LongPrompts::kWindows;
    case PromptSyntax::kA1111:
      return LongPrompts::kCommas;
  }
  return LongPrompts::kTruncate;
}

}  // namespace

absl::StatusOr<PromptSyntax> ParsePromptSyntax(absl::string_view name) {
  for (const auto& [known, syntax] :
       {std::pair<absl::string_view, PromptSyntax>{"plain", PromptSyntax::kPlain},
        {"compel", PromptSyntax::kCompel},
        {"a1111", PromptSyntax::kA1111}}) {
    if (name == known) return syntax;
  }
  return FieldError(
      "params.prompt_syntax",
      absl::StrCat("\"", name, "\" is not known; there are \"plain\", \"compel\" and \"a1111\""));
}

absl::StatusOr<EncodableText> EncodableText::Make(const SdEncoder& encoder, SdText text) {
  EncodableText made(encoder, std::move(text));
  ASSIGN_OR_RETURN(made.prompt_, ParsePrompt(made.text_.text, made.text_.syntax, made.text_.field));
  ASSIGN_OR_RETURN(made.tokens_, made.CountWindows());
  made.count_ = made.Count();
  return made;
}

absl::StatusOr<int64_t> EncodableText::CountWindows() const {
  int64_t tokens = 0;
  for (const PromptPart& part : prompt_.parts) {
    int64_t longest = 0;
    for (const PromptText& one : part.texts) {
      ASSIGN_OR_RETURN(const PromptWindows windows,
                       MakePromptWindows(*encoder_->tokenizer, one, ModeOf(text_), text_.field));
      longest = std::max(longest, static_cast<int64_t>(windows.ids.size()));
    }
    tokens += longest;
  }
  const int64_t most = kMaxPromptWindows * encoder_->tokenizer->model_max_length();
  if (tokens <= most) return tokens;
  return FieldError(text_.field, absl::StrCat("makes ", tokens, " tokens; at most ", most, " are taken"));
}

TextTokens EncodableText::Count() const {
  TextTokens tokens;
  for (const PromptPart& part : prompt_.parts) {
    for (const PromptText& one : part.texts) {
      for (const PromptFragment& fragment : one) {
        tokens.total += static_cast<int64_t>(TokenizeMarked(*encoder_->tokenizer, fragment.text).size());
      }
    }
  }
  constexpr int64_t kBeginAndEnd = 2;
  const int64_t window = encoder_->tokenizer->model_max_length() - kBeginAndEnd;
  tokens.read = ModeOf(text_) == LongPrompts::kTruncate ? std::min(tokens.total, window) : tokens.total;
  return tokens;
}

// The window that the pooled row is of: all of the text as compel has it, the first window as A1111 has it.
std::vector<int64_t> EncodableText::PooledIds() const {
  if (text_.syntax != PromptSyntax::kA1111) return OneWindowOfIds(*encoder_->tokenizer, text_.text);
  // That it makes windows was seen by Make.
  PromptWindows windows =
      MakePromptWindows(*encoder_->tokenizer, prompt_.parts[0].texts[0], ModeOf(text_), text_.field).value();
  windows.ids.resize(static_cast<size_t>(windows.size));
  return std::move(windows.ids);
}

absl::StatusOr<ClipTextModel::Output> EncodableText::Encode(const Call& call) const {
  const ClipTokenizer& tokenizer = *encoder_->tokenizer;
  ClipTextModel::Output output;
  if (text_.syntax == PromptSyntax::kPlain) {
    output = call({OneWindowOfIds(tokenizer, text_.text), {}, pooled_});
  } else {
    const PromptWeights weights =
        text_.syntax == PromptSyntax::kA1111 ? PromptWeights::kKeepMean : PromptWeights::kAgainstEmpty;
    const EncodeWindow encode = [&](const std::vector<int64_t>& ids,
                                    const std::vector<int64_t>& mask) -> absl::StatusOr<at::Tensor> {
      return call({ids, mask}).hidden;
    };
    ASSIGN_OR_RETURN(output.hidden,
                     EncodePrompt(tokenizer, prompt_, ModeOf(text_), weights, encode, text_.field));
    if (pooled_) output.pooled = call({PooledIds(), {}, true}).pooled;
  }
  if (const int64_t missing = length_ - output.hidden.size(1); missing > 0) {
    const at::Tensor empty = call({EmptyPromptWindow(tokenizer).ids, {}}).hidden;
    output.hidden = at::cat({output.hidden, empty.repeat({1, missing / empty.size(1), 1})}, 1);
  }
  return output;
}

absl::Status EncodableText::Plan(int64_t length, bool pooled) {
  const c10::InferenceMode inference;
  length_ = length;
  pooled_ = pooled;
  windows_.clear();
  const Call note = [&](const Window& window) {
    const auto known = std::find_if(windows_.begin(), windows_.end(),
                                    [&](const Window& one) { return one.key() == window.key(); });
    if (known == windows_.end()) {
      windows_.push_back(window);
    } else {
      known->pooled = known->pooled || window.pooled;
    }
    // One column is enough to go through the arithmetic.
    const at::Tensor hidden = at::ones({1, static_cast<int64_t>(window.ids.size()), 1});
    return ClipTextModel::Output{hidden, hidden};
  };
  return Encode(note).status();
}

absl::StatusOr<ClipTextModel::Output> EncodableText::Assemble(const Encoded& encoded) const {
  return Encode([&](const Window& window) { return encoded.at(window.key()); });
}

}  // namespace latentd
