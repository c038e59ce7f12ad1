// The sentencepiece library behind a small wall: its header declares a std::string_view of its own in
// namespace absl, so it cannot share a translation unit with Abseil. Hence no absl types here.
//
// Immutable after Load; any thread.
#ifndef LATENTD_FAMILIES_TEXT_SENTENCEPIECE_MODEL_H_
#define LATENTD_FAMILIES_TEXT_SENTENCEPIECE_MODEL_H_

#include <memory>
#include <string>
#include <vector>

namespace latentd {

class SentencePieceModel {
 public:
  // Null when `bytes` are no model.
  static std::unique_ptr<const SentencePieceModel> Load(const std::string& bytes);
  ~SentencePieceModel();

  std::vector<int> Encode(const std::string& text) const;
  int size() const;
  // The id of a piece; the unknown id when there is none.
  int IdOf(const std::string& piece) const;
  int unknown_id() const;

 private:
  struct Impl;
  explicit SentencePieceModel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_TEXT_SENTENCEPIECE_MODEL_H_
