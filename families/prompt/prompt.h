// Prompts with weights, as people write them for Stable Diffusion: text → what is to be encoded, with which
// weight, and how results are put together.
//
//   kPlain   the text is the text
//   kCompel  word++  word--  (a b)1.3  (a b)+  "a b"-  (a b).attend(1.3)   nested weights multiply
//            ("a", "b").blend(0.7, 0.3[, no_normalize])   ("a", "b").and([1, 0.5])   \( \) \" are themselves
//   kA1111   (x) 1.1   [x] 1/1.1   (x:1.3)   (x:-0.5)   BREAK begins a window   \( \) \[ \] \\ are
//   themselves,
//            any other backslash goes; what changes from step to step, and AND, are taken apart before
//            (prompt_schedule.h)
//
// Each + is a factor of 1.1 and each − one of 0.9. What does not parse is text, as by those programs: "(:" is
// a face. So are the marks that stand for textual inversions (embedding_triggers.h), and LoRA tags but in
// A1111's syntax, where "<lora:x:0.8>" would be an order.
//
// Pure; any thread.
#ifndef LATENTD_FAMILIES_PROMPT_PROMPT_H_
#define LATENTD_FAMILIES_PROMPT_PROMPT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

enum class PromptSyntax { kPlain, kCompel, kA1111 };

// Text that has one weight. It is tokenized by itself.
struct PromptFragment {
  std::string text;
  double weight = 1;
  bool begins_window = false;  // BREAK stood before it

  friend bool operator==(const PromptFragment&, const PromptFragment&) = default;
};

// At least one fragment; a lone empty one is the empty prompt.
using PromptText = std::vector<PromptFragment>;

// One text, or several whose embeddings are blended.
struct PromptPart {
  std::vector<PromptText> texts;
  std::vector<double> blend;  // a share for each text; of one text: 1
  bool normalize = true;      // shares are divided by their sum
  double weight = 1;          // against the empty prompt: .and()'s

  friend bool operator==(const PromptPart&, const PromptPart&) = default;
};

// Parts are encoded each by itself, and concatenated along the tokens.
struct ParsedPrompt {
  std::vector<PromptPart> parts;

  friend bool operator==(const ParsedPrompt&, const ParsedPrompt&) = default;
};

// What a weight may be.
inline constexpr double kMaxPromptWeight = 100;
inline constexpr int kMaxPromptNesting = 64;

// Errors: INVALID_ARGUMENT INVALID_FIELD on `field`, for .swap() and LoRAs inside compel's prompts, LoRA tags
// in A1111's, counts of weights that do not fit, text after a blend or conjunction, weights out of [0,
// kMaxPromptWeight] (A1111: ±kMaxPromptWeight) and brackets deeper than kMaxPromptNesting.
absl::StatusOr<ParsedPrompt> ParsePrompt(absl::string_view prompt, PromptSyntax syntax,
                                         absl::string_view field);

// Each syntax; called by ParsePrompt, which checks weights. Errors as there.
absl::StatusOr<ParsedPrompt> ParseCompelPrompt(absl::string_view prompt, absl::string_view field);
absl::StatusOr<ParsedPrompt> ParseA1111Prompt(absl::string_view prompt, absl::string_view field);

// A prompt of one part with one text.
ParsedPrompt SinglePrompt(PromptText text);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_PROMPT_PROMPT_H_
