// A parsed textual inversion file: vectors that take the place of a text encoder's token embeddings.
//
// Parsing knows no model. Which tensors of a file are meant is for embedding_tensors.h to say; each is
// [tokens, columns] or [columns].
//
// Vectors are kept in fp32 and in host memory. Immutable; cached like a LoRA, with its bytes counted in full.
#ifndef LATENTD_FAMILIES_ENCODERS_TEXT_EMBEDDING_H_
#define LATENTD_FAMILIES_ENCODERS_TEXT_EMBEDDING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/resource.h"
#include "cache/weights/weight_files.h"
#include "families/encoders/embedding_tensors.h"

namespace latentd {

// Whose vectors a file holds. A file for one encoder has them for the first.
enum class EmbeddingEncoder { kClipL, kClipG };
absl::string_view EmbeddingEncoderName(EmbeddingEncoder encoder);  // "clip_l"

// What a file's header tells of it.
struct TextEmbeddingShape {
  int64_t tokens = 0;
  int64_t clip_l = 0, clip_g = 0;  // columns of the vectors; 0: there are none

  int64_t columns(EmbeddingEncoder encoder) const {
    return encoder == EmbeddingEncoder::kClipL ? clip_l : clip_g;
  }
  // Of the vectors in memory.
  int64_t bytes() const { return tokens * (clip_l + clip_g) * int64_t{sizeof(float)}; }
  // The architecture that it seems to be for: "SD 1.x", "SD 2.x", "SDXL". Empty for other widths.
  absl::string_view family() const;
  // "clip_l 768, clip_g 1280".
  std::string ToString() const;
};

class TextEmbedding : public Resource {
 public:
  // Reads no values. Errors: INVALID_ARGUMENT INVALID_EMBEDDING for another shape or type of numbers, no
  // vectors, or more than kMaxEmbeddingTokens. REQUIRES: `tensors` are of the file.
  static absl::StatusOr<TextEmbeddingShape> Describe(const WeightFiles& files,
                                                     const EmbeddingTensors& tensors);

  // Errors: those of Describe, and INVALID_EMBEDDING for a value that is not finite; those of
  // WeightFiles::Check; CANCELLED.
  static absl::StatusOr<std::shared_ptr<const TextEmbedding>> Load(std::shared_ptr<const WeightFiles> files,
                                                                   const EmbeddingTensors& tensors,
                                                                   const LoadContext& context);

  const TextEmbeddingShape& shape() const { return shape_; }
  // [tokens, columns]; undefined where the file has none.
  const at::Tensor& vectors(EmbeddingEncoder encoder) const {
    return encoder == EmbeddingEncoder::kClipL ? clip_l_ : clip_g_;
  }

  // That it was read from. They hold none of its bytes, and no more of the file than its mapping.
  const std::shared_ptr<const WeightFiles>& files() const { return files_; }

  int64_t bytes() const override { return shape_.bytes(); }
  absl::Status Check() const override { return files_->Check(); }
  bool at_its_place() const override { return files_->at_its_place(); }
  // The encoder takes the rows to its device itself.
  absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device&, const std::vector<bool>&, const Resource*,
                                                         std::stop_token) const override {
    return absl::UnimplementedError("textual inversions stay in host memory");
  }

 private:
  TextEmbeddingShape shape_;
  at::Tensor clip_l_, clip_g_;                // copies
  std::shared_ptr<const WeightFiles> files_;  // tells whether they are still what the file holds
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_ENCODERS_TEXT_EMBEDDING_H_
