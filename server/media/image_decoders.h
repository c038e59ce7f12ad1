// For image_codec.cc: a decoder for each format that has a library or a file of its own.
//
// All check the size that a header states before they take memory for pixels, and name `field` in errors.
#ifndef LATENTD_SERVER_MEDIA_IMAGE_DECODERS_H_
#define LATENTD_SERVER_MEDIA_IMAGE_DECODERS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/media/image_codec.h"

namespace latentd {

struct DecodedImage {
  RgbImage image;
  std::vector<uint8_t> alpha;  // [height, width], where it was asked for and the file has one; else empty
};

struct DecodeRequest {
  absl::string_view file;
  DecodeLimits limits;
  absl::string_view field;
  bool alpha = false;  // is wanted, too
};

// Of a picture and each part of it. `max_pixels` of the limits.
absl::Status CheckImageSize(const DecodeRequest& request, int64_t width, int64_t height);

// Still pictures, with losses or without. An animation is refused by name.
absl::StatusOr<DecodedImage> DecodeWebp(const DecodeRequest& request);

// The first picture of it, on the canvas; what it does not cover and what is transparent has the colour 0 of
// its palette.
absl::StatusOr<DecodedImage> DecodeGif(const DecodeRequest& request);

// 1, 4, 8, 16, 24 and 32 bits a pixel, with masks, from top or bottom. Compressed ones are refused by name.
// Alpha counts where a mask is stated for it.
absl::StatusOr<DecodedImage> DecodeBmp(const DecodeRequest& request);

}  // namespace latentd

#endif  // LATENTD_SERVER_MEDIA_IMAGE_DECODERS_H_
