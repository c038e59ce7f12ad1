// Pictures as files: PNG, JPEG and WebP from and to uint8 RGB; GIF and BMP to it.
//
// Stateless, thread-safe. The same pixels give the same file. What is decoded comes from clients and is taken
// for hostile: its size is checked from the header before anything is decoded.
#ifndef LATENTD_SERVER_MEDIA_IMAGE_CODEC_H_
#define LATENTD_SERVER_MEDIA_IMAGE_CODEC_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace latentd {

struct RgbImage {
  int width = 0;
  int height = 0;
  std::vector<uint8_t> pixels;  // [height, width, 3]
};

// What a file says beside its pixels; see GenerateParams.picture_metadata in proto/. Empty texts are left
// out.
struct PictureNotes {
  std::string record;      // JSON, ASCII
  std::string parameters;  // UTF-8

  bool empty() const { return record.empty() && parameters.empty(); }
};

// All of them: `pixels` is [height, width, 3]. Errors: INVALID_ARGUMENT INVALID_IMAGE when it is not, or has
// no pixel; INTERNAL ENCODE_FAILED.
absl::StatusOr<std::string> EncodePng(absl::Span<const uint8_t> pixels, int width, int height,
                                      const PictureNotes& notes = {});

// quality: 1 to 100; from 90 on colour is kept at full resolution. Parameters of more than 65533 bytes, which
// no comment can hold, are left out.
absl::StatusOr<std::string> EncodeJpeg(absl::Span<const uint8_t> pixels, int width, int height, int quality,
                                       const PictureNotes& notes = {});

// quality: 0 to 100. Sides of at most 16383.
absl::StatusOr<std::string> EncodeWebp(absl::Span<const uint8_t> pixels, int width, int height, int quality,
                                       const PictureNotes& notes = {});

// Upper bound of the bytes by which notes make a file longer.
inline int64_t MaxNotesBytes(const PictureNotes& notes) {
  if (notes.empty()) return 0;
  const auto record = static_cast<int64_t>(notes.record.size());
  return record + record / 1024 + 2 * static_cast<int64_t>(notes.parameters.size()) + 1024;
}

// The record in a file that one of these made. Absent: it has none.
std::optional<std::string> RecordIn(absl::string_view file);

// Upper bound of a file without notes that is made of a picture of that size, and of its pixels. Of JPEG and
// WebP it is one for all but noise.
inline int64_t MaxFileBytes(int64_t width, int64_t height) {
  // What cannot be compressed is stored: by zlib with 5 bytes for each 16 KiB, in chunks of 8 KiB with 12,
  // behind a byte for each row.
  const int64_t raw = (3 * width + 1) * height;
  return raw + raw / 64 + 4096;
}

struct DecodeLimits {
  int64_t max_bytes = 0;   // of the file
  int64_t max_pixels = 0;  // width × height
};

enum class AlphaUse {
  kDrop,  // the colours are kept as they are
  kMask,  // where any pixel is not opaque, alpha takes the place of the colours, as grey
};

// A PNG, JPEG, WebP, GIF (its first picture) or BMP file, told by its content, as RGB: grey is spread, 16
// bits become 8, CMYK becomes RGB as by Pillow, and what EXIF says was held otherwise is turned upright.
// Errors: INVALID_ARGUMENT INVALID_FIELD naming `field`, when the file is too large, of another kind, broken
// or cut short; more pixels than allowed are refused before there is memory for them.
absl::StatusOr<RgbImage> DecodeImage(absl::string_view file, const DecodeLimits& limits,
                                     absl::string_view field, AlphaUse alpha = AlphaUse::kDrop);

// The picture as it is seen when it was held as EXIF's orientation says, 1 to 8; 1 is as it is.
RgbImage TurnUpright(RgbImage image, int orientation);

// Whether so many bytes are width × height RGB pixels. Errors: INVALID_ARGUMENT INVALID_IMAGE.
absl::Status CheckRgbPixels(absl::Span<const uint8_t> pixels, int width, int height);

// `image` made smaller by averaging, so that its longer side is at most `max_side`. Never larger.
RgbImage ShrinkTo(const RgbImage& image, int max_side);

}  // namespace latentd

#endif  // LATENTD_SERVER_MEDIA_IMAGE_CODEC_H_
