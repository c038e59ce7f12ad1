// Weighted, blended and concatenated prompts as embeddings of a CLIP text encoder. Numbers are those of
// compel or, with weights that keep the mean, those of A1111.
//
// Knows no encoder: the caller passes one. Pure but for that; any thread that may call it.
#ifndef LATENTD_FAMILIES_PROMPT_PROMPT_CONDITIONING_H_
#define LATENTD_FAMILIES_PROMPT_PROMPT_CONDITIONING_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "families/prompt/prompt.h"
#include "families/prompt/prompt_windows.h"
#include "families/tokenizers/clip_tokenizer.h"

namespace latentd {

// Hidden states [1, tokens, dim] of one window of ids. `mask` has a 0 for every token that none may attend
// to, and is empty when all are seen.
using EncodeWindow = std::function<absl::StatusOr<at::Tensor>(const std::vector<int64_t>& ids,
                                                              const std::vector<int64_t>& mask)>;

// What a weight does.
enum class PromptWeights {
  // It moves a token's embedding away from the empty prompt's by that factor. A fragment with a weight below
  // 1 is also
  // blended with the prompt that the encoder sees without it: half and half at 0.5, gone at 0. compel.
  kAgainstEmpty,
  // It multiplies a token's embedding; then the whole window is scaled to the mean that it had. A1111's
  // "original"
  // emphasis (modules/sd_emphasis.py).
  kKeepMean,
};

// Embeddings [1, windows·tokens, dim] of a prompt, on the device and in the type of what `encode` gives.
// Errors: those of `encode` and of MakePromptWindows.
absl::StatusOr<at::Tensor> EncodePrompt(const ClipTokenizer& tokenizer, const ParsedPrompt& prompt,
                                        LongPrompts mode, PromptWeights weights, const EncodeWindow& encode,
                                        absl::string_view field);

// Brings embeddings of a prompt and its negative to one length, by windows of the empty prompt, for encoders
// that are called with both. `empty` is EncodePrompt's of an empty prompt.
void PadToSameLength(std::vector<at::Tensor>& embeddings, const at::Tensor& empty);

// The ids of a text as it was written, syntax and all, in one window; what is left over is cut off. Pooled
// embeddings (SDXL) are made of it: weights have no part in them, as in compel.
std::vector<int64_t> OneWindowOfIds(const ClipTokenizer& tokenizer, absl::string_view prompt);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_PROMPT_PROMPT_CONDITIONING_H_
