// T5's tokenizer: a SentencePiece unigram model; the end token is appended, padding is id 0.
// Gives the ids that transformers' T5Tokenizer gives.
//
// Immutable after Load; any thread.
#ifndef LATENTD_FAMILIES_TOKENIZERS_T5_TOKENIZER_H_
#define LATENTD_FAMILIES_TOKENIZERS_T5_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

class T5Tokenizer {
 public:
  // `folder` has spiece.model, or tokenizer.json; what else it may have is in added_tokens.h. `vocabulary` is
  // the number of ids that the model knows; added tokens beyond it are left out. Errors: NOT_FOUND
  // MISSING_FILE, DATA_LOSS CORRUPT_FILE, FAILED_PRECONDITION UNSUPPORTED_MODEL when the pieces alone are
  // more than that.
  static absl::StatusOr<std::unique_ptr<const T5Tokenizer>> Load(const std::string& folder,
                                                                 int64_t vocabulary);

  ~T5Tokenizer();

  // Ids of `text` and the end token, cut to and padded to `length`. REQUIRES: length >= 1.
  std::vector<int64_t> Encode(absl::string_view text, int64_t length) const;
  // Ids that the text alone has, however many.
  int64_t Count(absl::string_view text) const;

 private:
  std::vector<int64_t> Tokenize(absl::string_view text) const;

  struct Impl;
  explicit T5Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_TOKENIZERS_T5_TOKENIZER_H_
