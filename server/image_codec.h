// Pictures as files: PNG and JPEG from and to uint8 RGB.
//
// Stateless, thread-safe. The same pixels give the same file. What is decoded comes from clients and is taken
// for hostile: its size is checked from the header before anything is decoded.
#ifndef LATENTD_SERVER_IMAGE_CODEC_H_
#define LATENTD_SERVER_IMAGE_CODEC_H_

#include <cstdint>
#include <string>
#include <utility>
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

// Keys and values to write into a PNG; a value may be any UTF-8 text, a key is 1 to 79 Latin letters.
using PngTexts = std::vector<std::pair<std::string, std::string>>;

// `pixels` is [height, width, 3]. Errors: INVALID_ARGUMENT INVALID_IMAGE when it is not, or has no pixel;
// INTERNAL ENCODE_FAILED.
absl::StatusOr<std::string> EncodePng(absl::Span<const uint8_t> pixels, int width, int height,
                                      const PngTexts& texts = {});

// quality: 1 to 100; from 90 on colour is kept at full resolution.
absl::StatusOr<std::string> EncodeJpeg(absl::Span<const uint8_t> pixels, int width, int height, int quality);

// Upper bound of a file that EncodePng (without texts) or EncodeJpeg makes of that size, and of its pixels.
// Of JPEG it is one for all but noise.
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

// A PNG or JPEG file, told by its content, as RGB: grey is spread, alpha is dropped, 16 bits become 8. An
// orientation that a camera noted is not applied. Errors: INVALID_ARGUMENT INVALID_FIELD naming `field`, when
// the file is too large, of another kind, broken or cut short.
absl::StatusOr<RgbImage> DecodeImage(absl::string_view file, const DecodeLimits& limits,
                                     absl::string_view field);

// `image` made smaller by averaging, so that its longer side is at most `max_side`. Never larger.
RgbImage ShrinkTo(const RgbImage& image, int max_side);

}  // namespace latentd

#endif  // LATENTD_SERVER_IMAGE_CODEC_H_
