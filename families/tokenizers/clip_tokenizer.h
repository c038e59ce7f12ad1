// CLIP's tokenizer: lower-cased text, split by a regular expression, byte-pair encoded with "</w>" at the
// end of a word. Gives the ids that transformers' CLIPTokenizer gives.
//
// Immutable after Load; any thread.
#ifndef LATENTD_FAMILIES_TOKENIZERS_CLIP_TOKENIZER_H_
#define LATENTD_FAMILIES_TOKENIZERS_CLIP_TOKENIZER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "families/tokenizers/added_tokens.h"

namespace latentd {

// The words that CLIP takes a cleaned-up text apart into; they point into it.
std::vector<absl::string_view> ClipWords(absl::string_view clean);

class ClipTokenizer {
 public:
  // `folder` has vocab.json and merges.txt, or tokenizer.json; what else it may have is in added_tokens.h.
  // Errors: NOT_FOUND MISSING_FILE, DATA_LOSS CORRUPT_FILE.
  static absl::StatusOr<std::unique_ptr<const ClipTokenizer>> Load(const std::string& folder);

  // Ids of `text` between the begin and end tokens, cut to and padded to `length`. REQUIRES: length >= 2.
  std::vector<int64_t> Encode(absl::string_view text, int64_t length) const;

  // Ids of `text` alone, as many as there are.
  std::vector<int64_t> Tokenize(absl::string_view text) const;

  int64_t begin_id() const { return bos_; }
  int64_t end_id() const { return eos_; }
  int64_t pad_id() const { return pad_; }
  // Whether a token ends a word, and whether it is one of `characters` (ASCII) as a word by itself.
  bool EndsWord(int64_t id) const { return word_ends_[static_cast<size_t>(id)]; }
  bool IsOneOf(int64_t id, absl::string_view characters) const;

  int64_t vocabulary_size() const { return vocabulary_size_; }
  // Tokens that the model was trained for; 77 where the config does not say.
  int64_t model_max_length() const { return model_max_length_; }

 private:
  struct Merge {
    int32_t rank;
    int32_t id;
  };
  using IdPair = std::pair<int32_t, int32_t>;

  ClipTokenizer() = default;
  absl::Status SetVocabulary(const std::vector<std::pair<std::string, int64_t>>& pairs,
                             const std::vector<std::pair<std::string, std::string>>& merges,
                             const std::string& label);
  // A token that stands in texts as it is. One that has no id, and that the vocabulary does not have, is
  // none.
  void Add(AddedToken token);
  // Ids of one word: text that no merge crosses.
  void EncodeWord(absl::string_view word, std::vector<int64_t>& ids) const;

  absl::flat_hash_map<std::string, int32_t> vocabulary_;
  absl::flat_hash_map<IdPair, Merge> merges_;
  std::vector<bool> word_ends_;               // by id
  std::array<int32_t, 256> byte_ids_{};       // of a byte inside a word
  std::array<int32_t, 256> last_byte_ids_{};  // of a byte that ends a word
  AddedTokens added_;                         // with begin, end, pad, unknown
  int32_t bos_ = 0, eos_ = 0, pad_ = 0, unknown_ = 0;
  int64_t vocabulary_size_ = 0;
  int64_t model_max_length_ = 77;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_TOKENIZERS_CLIP_TOKENIZER_H_
