#include "families/tokenizers/sentencepiece_plugin.h"

#include <sentencepiece_processor.h>

#include <exception>
#include <memory>
#include <new>
#include <string>

namespace {

using Processor = sentencepiece::SentencePieceProcessor;

const Processor& Get(const void* model) { return *static_cast<const Processor*>(model); }

void* Create(const char* bytes, size_t size) {
  try {
    auto processor = std::make_unique<Processor>();
    if (size == 0 || !processor->LoadFromSerializedProto({bytes, size}).ok()) return nullptr;
    return processor.release();
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception&) {  // what the library's own double arrays throw
    return nullptr;
  }
}

void Destroy(void* model) { delete static_cast<Processor*>(model); }

void Encode(const void* model, const char* text, size_t size, void (*take)(void*, int), void* context) {
  for (int id : Get(model).EncodeAsIds({text, size})) take(context, id);
}

int PieceCount(const void* model) { return Get(model).GetPieceSize(); }
int IdOf(const void* model, const char* piece, size_t size) { return Get(model).PieceToId({piece, size}); }
int UnknownId(const void* model) { return Get(model).unk_id(); }

}  // namespace

const LatentdSentencePieceApi* latentd_sentencepiece_api() {
  static const LatentdSentencePieceApi api = {Create, Destroy, Encode, PieceCount, IdOf, UnknownId};
  return &api;
}
