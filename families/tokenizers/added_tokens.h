// What the files of a tokenizer's folder say beside its vocabulary: which tokens begin and end a text, and
// which stand in a text as they are. Read as transformers reads them, from whatever version wrote the folder.
//
//   tokenizer_config.json      names (bos_token, …), and added_tokens_decoder: all added tokens by id
//   special_tokens_map.json    names; they count where the config has no added_tokens_decoder
//   added_tokens.json          added tokens by text; the same
//   tokenizer.json             added_tokens: the same
//
// Immutable after Load; any thread.
#ifndef LATENTD_FAMILIES_TOKENIZERS_ADDED_TOKENS_H_
#define LATENTD_FAMILIES_TOKENIZERS_ADDED_TOKENS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

// A token that is found in a text before the text is taken apart.
struct AddedToken {
  std::string text;
  int64_t id = -1;                               // -1: that of the vocabulary
  bool takes_left = false, takes_right = false;  // the white space beside it goes with it
  bool whole_word = false;                       // only where no letter stands beside it
  bool normalized = false;  // looked for in the text as it is after clean-up, in which it is cleaned up, too
};

// A piece of text between tokens, or one of them.
struct TextPiece {
  absl::string_view text;
  int token = -1;  // index of the token that this is, or -1
};

// Cuts `text` at the tokens: of two that start at one place, the longer counts. Empty pieces are left out.
// The pieces point into `text`.
std::vector<TextPiece> SplitAtTokens(absl::string_view text, const std::vector<AddedToken>& tokens);

struct AddedTokens {
  std::vector<AddedToken> plain, normalized;  // the latter with cleaned-up texts

  // Shows `token` the ids of the tokens in `given`, and `text` what is between them, cleaned up, in order.
  // `clean` is the tokenizer's clean-up.
  void Read(absl::string_view given, const std::function<std::string(absl::string_view)>& clean,
            const std::function<void(int64_t)>& token,
            const std::function<void(absl::string_view)>& text) const;
};

struct TokenizerSettings {
  // Missing files are none. `folder` is the tokenizer's. Errors: those of JsonConfig; DATA_LOSS CORRUPT_FILE
  // for ids out of range and for more tokens than any tokenizer has.
  static absl::StatusOr<TokenizerSettings> Load(const std::string& folder);

  // "bos_token", …: what the files say, or `otherwise`.
  AddedToken Named(const std::string& name, const std::string& otherwise) const;

  std::map<std::string, AddedToken> named;
  std::vector<AddedToken> added;  // in order of id
  double model_max_length = 0;    // 0: it does not say
  int64_t extra_ids = -1;         // the same
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_TOKENIZERS_ADDED_TOKENS_H_
