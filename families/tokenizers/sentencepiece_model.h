// The sentencepiece library, from its plug-in (sentencepiece_plugin.h says why).
//
// Immutable after Load; any thread.
#ifndef LATENTD_FAMILIES_TOKENIZERS_SENTENCEPIECE_MODEL_H_
#define LATENTD_FAMILIES_TOKENIZERS_SENTENCEPIECE_MODEL_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace latentd {

class SentencePieceModel {
 public:
  // Errors: those of CheckSentencePieceModel, which comes before the library sees anything of `bytes`;
  // DATA_LOSS CORRUPT_FILE when the library refuses them; INTERNAL PLUGIN_MISSING when the plug-in is not
  // installed.
  static absl::StatusOr<std::unique_ptr<const SentencePieceModel>> Load(const std::string& bytes);
  ~SentencePieceModel();

  std::vector<int> Encode(const std::string& text) const;
  int size() const;
  // The id of a piece; the unknown id when there is none.
  int IdOf(const std::string& piece) const;
  int unknown_id() const;

 private:
  explicit SentencePieceModel(void* model) : model_(model) {}
  void* const model_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_TOKENIZERS_SENTENCEPIECE_MODEL_H_
