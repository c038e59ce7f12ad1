// What the sentencepiece plug-in offers, in plain C: the table that its one exported function returns.
//
// The distribution's libsentencepiece exports a protobuf of its own, of another version than the one that
// gRPC uses; in one symbol scope each calls into the other and the process dies before main. So the library
// is linked into a plug-in that is loaded with a scope of its own.
#ifndef LATENTD_FAMILIES_TOKENIZERS_SENTENCEPIECE_PLUGIN_H_
#define LATENTD_FAMILIES_TOKENIZERS_SENTENCEPIECE_PLUGIN_H_

#include <cstddef>

extern "C" {

struct LatentdSentencePieceApi {
  // Null when the bytes are no model. `destroy` ends it. REQUIRES: CheckSentencePieceModel took the bytes.
  void* (*create)(const char* bytes, size_t size);
  void (*destroy)(void* model);
  // Calls `take` for each id.
  void (*encode)(const void* model, const char* text, size_t size, void (*take)(void* context, int id),
                 void* context);
  int (*piece_count)(const void* model);
  int (*id_of)(const void* model, const char* piece, size_t size);
  int (*unknown_id)(const void* model);
};

const LatentdSentencePieceApi* latentd_sentencepiece_api();
}

inline constexpr char kSentencePieceEntry[] = "latentd_sentencepiece_api";
inline constexpr char kSentencePiecePlugin[] = "latentd_sentencepiece.so";

#endif  // LATENTD_FAMILIES_TOKENIZERS_SENTENCEPIECE_PLUGIN_H_
