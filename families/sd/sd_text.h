// Prompts as SD's text encoders are given them: the syntax of weights, windows of tokens, pooled text.
//
// Pure but for the encoder's call; any thread, each with a view of its own.
#ifndef LATENTD_FAMILIES_SD_SD_TEXT_H_
#define LATENTD_FAMILIES_SD_SD_TEXT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "families/encoders/clip_text_model.h"
#include "families/prompt/prompt.h"
#include "families/tokenizers/clip_tokenizer.h"
#include "patcher/weight_view.h"

namespace latentd {

struct SdEncoder {
  std::string component;  // "text_encoder", "text_encoder_2"
  std::shared_ptr<const ClipTextModel> model;
  std::shared_ptr<const ClipTokenizer> tokenizer;
};

// "plain" (what is longer than the encoder reads is cut off, as by diffusers), "compel" and "a1111" (as many
// windows as it takes). Errors: INVALID_ARGUMENT INVALID_FIELD on params.prompt_syntax.
absl::StatusOr<PromptSyntax> ParsePromptSyntax(absl::string_view name);

struct SdText {
  std::string text;  // may hold marks of embeddings (embedding_triggers.h)
  PromptSyntax syntax = PromptSyntax::kPlain;
  absl::string_view field;  // for errors: "params.prompt"
};

// Tokens of the text's hidden states. Errors: INVALID_FIELD on the text's field, for what does not parse and
// for too many windows.
absl::StatusOr<int64_t> TokensOf(const SdEncoder& encoder, const SdText& text);

// Tokens that a text has, without those that begin and end windows, and those of them that the encoder is
// given. Errors: as TokensOf.
struct TextTokens {
  int64_t read = 0, total = 0;
};
absl::StatusOr<TextTokens> CountTextTokens(const SdEncoder& encoder, const SdText& text);

// Hidden states [1, tokens, dim], continued by windows of the empty prompt where the text has less of them,
// and the pooled row where the tap asks for one. On the view's device. `rows` [n, dim], in host memory: what
// the text's marks stand for. REQUIRES: tokens >= TokensOf(encoder, text).
absl::StatusOr<ClipTextModel::Output> EncodeText(const SdEncoder& encoder, const WeightView& w,
                                                 const SdText& text, const ClipTap& tap, int64_t tokens,
                                                 const at::Tensor& rows = {});

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_TEXT_H_
