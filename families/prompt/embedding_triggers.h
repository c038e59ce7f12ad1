// Where prompts name textual inversions, and how their vectors get from there into windows of tokens.
//
//   <name>           InvokeAI's way. What names none is text: "<lora:x:1>", "<3"
//   embedding:name   ComfyUI's way. Says that there is one
//
// A name is letters, digits and ._-/ as in the catalog. What prompts are written in (prompt.h) does not
// matter: names are found first and give way to marks, which are like letters to every syntax, and like
// nothing that a valid text can hold. A mark stands for some rows of one table, which the encoder is given
// with the ids.
//
// Pure; any thread.
#ifndef LATENTD_FAMILIES_PROMPT_EMBEDDING_TRIGGERS_H_
#define LATENTD_FAMILIES_PROMPT_EMBEDDING_TRIGGERS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "families/tokenizers/clip_tokenizer.h"

namespace latentd {

// Vectors of one file: as many tokens as a window of 77 has between its begin and end.
inline constexpr int64_t kMaxEmbeddingTokens = 75;
// Files that one request may name.
inline constexpr size_t kMaxPromptEmbeddings = 64;

struct EmbeddingTrigger {
  size_t begin = 0, size = 0;  // bytes of the prompt: "<cat>"
  std::string name;            // "cat"
  bool known = false;          // false only for embedding:name
};

// In order. `known`: whether there is an embedding of that name. A full stop or signs of weight at the end of
// embedding:name belong to it only where an embedding is called that: "embedding:cat--", "embedding:cat.". A
// number behind "embedding:" is the weight of a word, unless an embedding is called that.
std::vector<EmbeddingTrigger> FindEmbeddingTriggers(absl::string_view prompt,
                                                    absl::FunctionRef<bool(absl::string_view)> known);

// Rows of the table that stand for one embedding: row `first` and those behind it.
struct EmbeddingRows {
  int64_t first = 0, count = 0;
};

// The prompt with marks in place of triggers. `rows` by name; other names stay text. REQUIRES: counts and
// ends are at most kMaxEmbeddingTokens and kMaxEmbeddingTokens · kMaxPromptEmbeddings.
std::string MarkEmbeddings(absl::string_view prompt,
                           const std::map<std::string, EmbeddingRows, std::less<>>& rows);

// Ids from here on are rows of the table: kFirstRowId + row. No vocabulary reaches so far.
inline constexpr int64_t kFirstRowId = int64_t{1} << 32;

struct PromptToken {
  int64_t id = 0;
  bool continues = false;  // a row of an embedding, behind its first
};

// Ids of a text with marks, or of one without: the tokenizer's, and rows.
std::vector<PromptToken> TokenizeMarked(const ClipTokenizer& tokenizer, absl::string_view text);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_PROMPT_EMBEDDING_TRIGGERS_H_
