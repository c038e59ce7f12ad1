// Weighted prompts as windows of tokens that a CLIP text encoder takes. Pure; any thread.
#ifndef LATENTD_FAMILIES_PROMPT_PROMPT_WINDOWS_H_
#define LATENTD_FAMILIES_PROMPT_PROMPT_WINDOWS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "families/prompt/prompt.h"
#include "families/tokenizers/clip_tokenizer.h"

namespace latentd {

enum class LongPrompts {
  kTruncate,  // one window; what is left over is dropped
  kWindows,  // as many windows as it takes, cut as compel does: after the last full stop that is in a window;
             // else after the last of ,;:. or the last word there
  kCommas,  // the same, cut as A1111 does: after a comma among the last 20 tokens, else where the window ends
};

// More windows than this are refused: each is a call of the encoder, and tokens for every attention of the
// model.
inline constexpr int64_t kMaxPromptWindows = 32;

// Windows one after the other: begin, at most size − 2 tokens, end, padding.
struct PromptWindows {
  int64_t size = 77;
  std::vector<int64_t> ids;     // a whole number of windows; rows of embeddings are from kFirstRowId on
  std::vector<double> weights;  // of each id; 1 for begin, end and padding
  // Where each fragment's tokens are: first and last position, with all that lies between. Absent: it has
  // none.
  struct Span {
    int64_t first = 0, last = 0;
  };
  std::vector<std::optional<Span>> spans;

  int64_t count() const { return static_cast<int64_t>(ids.size()) / size; }
};

// Embeddings end no word, and only those that do not fit into one window together with no word between them
// are cut apart, never one of them. Texts may hold marks (embedding_triggers.h). Windows have the tokenizer's
// model_max_length. Errors: INVALID_ARGUMENT INVALID_FIELD on `field` for a prompt of more than
// kMaxPromptWindows.
absl::StatusOr<PromptWindows> MakePromptWindows(const ClipTokenizer& tokenizer, const PromptText& text,
                                                LongPrompts mode, absl::string_view field);

// The empty prompt's window.
PromptWindows EmptyPromptWindow(const ClipTokenizer& tokenizer);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_PROMPT_PROMPT_WINDOWS_H_
