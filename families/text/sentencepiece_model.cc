#include "families/text/sentencepiece_model.h"

#include <sentencepiece_processor.h>

#include <utility>

namespace latentd {

struct SentencePieceModel::Impl {
  sentencepiece::SentencePieceProcessor processor;
};

SentencePieceModel::SentencePieceModel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SentencePieceModel::~SentencePieceModel() = default;

std::unique_ptr<const SentencePieceModel> SentencePieceModel::Load(const std::string& bytes) {
  auto impl = std::make_unique<Impl>();
  if (bytes.empty() || !impl->processor.LoadFromSerializedProto(bytes).ok()) return nullptr;
  return std::unique_ptr<const SentencePieceModel>(new SentencePieceModel(std::move(impl)));
}

std::vector<int> SentencePieceModel::Encode(const std::string& text) const {
  return impl_->processor.EncodeAsIds(text);
}
int SentencePieceModel::size() const { return impl_->processor.GetPieceSize(); }
int SentencePieceModel::IdOf(const std::string& piece) const { return impl_->processor.PieceToId(piece); }
int SentencePieceModel::unknown_id() const { return impl_->processor.unk_id(); }

}  // namespace latentd
