// Prompts as SD's text encoders are given them: the syntax of weights, windows of tokens, pooled text.
//
// Pure; any thread.
#ifndef LATENTD_FAMILIES_SD_SD_TEXT_H_
#define LATENTD_FAMILIES_SD_SD_TEXT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "families/encoders/clip_text_model.h"
#include "families/prompt/prompt.h"
#include "families/tokenizers/clip_tokenizer.h"

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

// Tokens that a text has, without those that begin and end windows, and those of them that an encoder reads.
struct TextTokens {
  int64_t read = 0, total = 0;
};

// A text as an encoder is given it: parsed and tokenised once, a list of windows, and what is made of them.
// Immutable once it is planned. Lives no longer than its encoder.
class EncodableText {
 public:
  // Errors: INVALID_ARGUMENT INVALID_FIELD on the text's field, for what does not parse and for too many
  // windows.
  static absl::StatusOr<EncodableText> Make(const SdEncoder& encoder, SdText text);

  const std::string& text() const { return text_.text; }
  int64_t tokens() const { return tokens_; }  // of its hidden states
  const TextTokens& count() const { return count_; }

  // A call of the encoder.
  struct Window {
    std::vector<int64_t> ids;
    std::vector<int64_t> mask;  // as ClipTextModel has it
    bool pooled = false;        // the pooled row is wanted, too

    std::pair<std::vector<int64_t>, std::vector<int64_t>> key() const { return {ids, mask}; }
  };
  // By Window::key.
  using Encoded = std::map<std::pair<std::vector<int64_t>, std::vector<int64_t>>, ClipTextModel::Output>;

  // How it is encoded: to `length` tokens, continued by windows of the empty prompt where it has less of
  // them, with the pooled row or without. Before windows and Assemble. REQUIRES: length >= tokens().
  absl::Status Plan(int64_t length, bool pooled);
  // The calls that Assemble needs, each once.
  const std::vector<Window>& windows() const { return windows_; }
  // Hidden states [1, length, dim], and the pooled row where it is wanted. Where the outputs are. REQUIRES:
  // `encoded` has all of windows().
  absl::StatusOr<ClipTextModel::Output> Assemble(const Encoded& encoded) const;

 private:
  using Call = std::function<ClipTextModel::Output(const Window& window)>;

  EncodableText(const SdEncoder& encoder, SdText text) : encoder_(&encoder), text_(std::move(text)) {}
  absl::StatusOr<int64_t> CountWindows() const;
  TextTokens Count() const;
  std::vector<int64_t> PooledIds() const;
  // Whatever is made of windows, with `call` in place of the encoder.
  absl::StatusOr<ClipTextModel::Output> Encode(const Call& call) const;

  const SdEncoder* encoder_;
  SdText text_;
  ParsedPrompt prompt_;  // not of plain texts
  int64_t tokens_ = 0;
  TextTokens count_;
  int64_t length_ = 0;
  bool pooled_ = false;
  std::vector<Window> windows_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_TEXT_H_
