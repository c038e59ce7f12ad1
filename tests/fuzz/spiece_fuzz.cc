// spiece.model: what passes the check is loaded by the library and reads texts.
#include <cstdint>
#include <string>

#include "families/tokenizers/sentencepiece_model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  const auto model = latentd::SentencePieceModel::Load(bytes);
  if (!model.ok()) return 0;
  for (const std::string& text :
       {std::string("a photo of \uff41\uff42\u2460 \ufb01 e\u0301\u0323 \ufdfa<x><y><z>"),
        std::string(100, 'a'), std::string("\0\xff\xc3", 3), bytes.substr(0, 1000)}) {
    (*model)->Encode(text);
  }
  return 0;
}
