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

// The window that the pooled embedding is of: all of the text as compel has it, the first window as A1111 has
// it.
absl::StatusOr<std::vector<int64_t>> PooledIds(const ClipTokenizer& tokenizer, const SdText& text,
                                               const ParsedPrompt& prompt) {
  if (text.syntax != PromptSyntax::kA1111) return OneWindowOfIds(tokenizer, text.text);
  ASSIGN_OR_RETURN(PromptWindows windows,
                   MakePromptWindows(tokenizer, prompt.parts[0].texts[0], ModeOf(text), text.field));
  windows.ids.resize(static_cast<size_t>(windows.size));
  return std::move(windows.ids);
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

absl::StatusOr<int64_t> TokensOf(const SdEncoder& encoder, const SdText& text) {
  ASSIGN_OR_RETURN(const ParsedPrompt prompt, ParsePrompt(text.text, text.syntax, text.field));
  int64_t tokens = 0;
  for (const PromptPart& part : prompt.parts) {
    int64_t longest = 0;
    for (const PromptText& one : part.texts) {
      ASSIGN_OR_RETURN(const PromptWindows windows,
                       MakePromptWindows(*encoder.tokenizer, one, ModeOf(text), text.field));
      longest = std::max(longest, static_cast<int64_t>(windows.ids.size()));
    }
    tokens += longest;
  }
  const int64_t most = kMaxPromptWindows * encoder.tokenizer->model_max_length();
  if (tokens <= most) return tokens;
  return FieldError(text.field, absl::StrCat("makes ", tokens, " tokens; at most ", most, " are taken"));
}

absl::StatusOr<TextTokens> CountTextTokens(const SdEncoder& encoder, const SdText& text) {
  ASSIGN_OR_RETURN(const ParsedPrompt prompt, ParsePrompt(text.text, text.syntax, text.field));
  TextTokens tokens;
  for (const PromptPart& part : prompt.parts) {
    for (const PromptText& one : part.texts) {
      for (const PromptFragment& fragment : one) {
        tokens.total += static_cast<int64_t>(TokenizeMarked(*encoder.tokenizer, fragment.text).size());
      }
    }
  }
  constexpr int64_t kBeginAndEnd = 2;
  const int64_t window = encoder.tokenizer->model_max_length() - kBeginAndEnd;
  tokens.read = ModeOf(text) == LongPrompts::kTruncate ? std::min(tokens.total, window) : tokens.total;
  return tokens;
}

absl::StatusOr<ClipTextModel::Output> EncodeText(const SdEncoder& encoder, const WeightView& w,
                                                 const SdText& text, const ClipTap& tap, int64_t tokens,
                                                 const at::Tensor& rows) {
  const ClipTextModel& model = *encoder.model;
  const ClipTokenizer& tokenizer = *encoder.tokenizer;
  ClipTap hidden_only = tap;
  hidden_only.pooled = false;
  ClipTextModel::Output output;
  if (text.syntax == PromptSyntax::kPlain) {
    output = model(w, OneWindowOfIds(tokenizer, text.text), tap, {}, rows);
  } else {
    ASSIGN_OR_RETURN(const ParsedPrompt prompt, ParsePrompt(text.text, text.syntax, text.field));
    const EncodeWindow encode = [&](const std::vector<int64_t>& ids,
                                    const std::vector<int64_t>& mask) -> absl::StatusOr<at::Tensor> {
      return model(w, ids, hidden_only, mask, rows).hidden;
    };
    const PromptWeights weights =
        text.syntax == PromptSyntax::kA1111 ? PromptWeights::kKeepMean : PromptWeights::kAgainstEmpty;
    ASSIGN_OR_RETURN(output.hidden,
                     EncodePrompt(tokenizer, prompt, ModeOf(text), weights, encode, text.field));
    if (tap.pooled) {
      ASSIGN_OR_RETURN(const std::vector<int64_t> ids, PooledIds(tokenizer, text, prompt));
      output.pooled = model(w, ids, tap, {}, rows).pooled;
    }
  }
  if (const int64_t missing = tokens - output.hidden.size(1); missing > 0) {
    const at::Tensor empty = model(w, EmptyPromptWindow(tokenizer).ids, hidden_only).hidden;
    output.hidden = at::cat({output.hidden, empty.repeat({1, missing / empty.size(1), 1})}, 1);
  }
  return output;
}

}  // namespace latentd
