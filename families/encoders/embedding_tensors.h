// Which tensors of a file are textual inversions, and what the file calls them. From names and shapes alone.
//
//   clip_l, clip_g                    for SDXL's two encoders; also one of them alone
//   text_encoders_0, text_encoders_1  the same, as diffusers' trainer names them
//   string_to_param.*                 for one encoder, as A1111 has it in pickles; string_to_token.* is not
//   one tensor of any other name      for one encoder: "emb_params", or diffusers' "<trigger>"
//   several of other names            one textual inversion each, by that name without brackets: "<cat>",
//   "<dog>".
//                                     For two encoders "NAME.clip_l" and "NAME.clip_g". "NAME", "NAME_1",
//                                     "NAME_2" … of one vector each are one of several vectors, as in
//                                     diffusers' tokenizers
//
// A LoRA file names those that it brings with it "bundle_emb.NAME.clip_l" and so on (kohya, OneTrainer,
// A1111).
#ifndef LATENTD_FAMILIES_ENCODERS_EMBEDDING_TENSORS_H_
#define LATENTD_FAMILIES_ENCODERS_EMBEDDING_TENSORS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/weights/weight_files.h"

namespace latentd {

// One textual inversion of a file.
struct EmbeddingTensors {
  std::string name;  // empty where the file has no other
  // Names of the tensors with its vectors, in order; empty: there are none for that encoder.
  std::vector<std::string> clip_l, clip_g;
};

// Those of a file that holds nothing else, in order of name. Tensors of whole numbers are left alone. Errors:
// INVALID_ARGUMENT INVALID_EMBEDDING when there is none, or more than kMaxEmbeddingsOfAFile.
absl::StatusOr<std::vector<EmbeddingTensors>> EmbeddingsOf(const WeightFiles& files);
inline constexpr size_t kMaxEmbeddingsOfAFile = 256;

// Those that a LoRA file brings with it, in order of name; without those for other encoders alone.
std::vector<EmbeddingTensors> BundledEmbeddings(const WeightFiles& files);

// INVALID_ARGUMENT INVALID_EMBEDDING.
absl::Status InvalidEmbedding(absl::string_view what);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_ENCODERS_EMBEDDING_TENSORS_H_
