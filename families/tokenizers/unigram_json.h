// A unigram model as the tokenizers library writes it (tokenizer.json), for the SentencePiece library.
#ifndef LATENTD_FAMILIES_TOKENIZERS_UNIGRAM_JSON_H_
#define LATENTD_FAMILIES_TOKENIZERS_UNIGRAM_JSON_H_

#include <string>

#include "absl/status/statusor.h"

namespace latentd {

// The ModelProto that the file at `path` was made from, as far as it tells: pieces, scores, the table of
// normalisations. Such files are made from one in transformers, so that nothing is lost. Added tokens among
// the pieces are control pieces. Errors: those of JsonConfig::Load; FAILED_PRECONDITION UNSUPPORTED_MODEL for
// another kind of model, or a clean-up that a ModelProto does not have.
absl::StatusOr<std::string> SentencePieceModelOf(const std::string& path);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_TOKENIZERS_UNIGRAM_JSON_H_
