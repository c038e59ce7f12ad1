// Whether a SentencePiece model can be given to the library, which trusts what it reads: its table of
// normalisations is a double array that is walked without bounds, and a broken one ends the process.
//
// Checked are the message's form; the pieces (number, length, text, kind, score); that it is a unigram model;
// and of each precompiled_charsmap every state that a text can lead to: that all units and texts that are
// looked at lie in the table, that no walk goes round in a circle, and that no more rules begin alike than
// the library has room for. Sources: sentencepiece_model.proto and the format of darts-clone's double arrays.
//
// Pure; any thread.
#ifndef LATENTD_FAMILIES_TOKENIZERS_SENTENCEPIECE_CHECK_H_
#define LATENTD_FAMILIES_TOKENIZERS_SENTENCEPIECE_CHECK_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace latentd {

// `bytes`: a serialised ModelProto. Takes time that grows with its size. Errors, with messages to put a
// file's name before: DATA_LOSS CORRUPT_FILE; FAILED_PRECONDITION UNSUPPORTED_MODEL for models of another
// kind than unigram.
absl::Status CheckSentencePieceModel(absl::string_view bytes);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_TOKENIZERS_SENTENCEPIECE_CHECK_H_
