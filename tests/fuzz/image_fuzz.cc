// Pictures that clients send: sizes are checked from the header, and what is decoded has them. What they say
// beside.
#include <cstdint>
#include <cstdlib>

#include "server/media/image_codec.h"
#include "server/media/image_metadata.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view file(reinterpret_cast<const char*>(data), size);
  latentd::RecordIn(file);
  latentd::ExifDescription(file);  // as it comes: fuzzers find TIFF sooner than what TIFF is packed in
  const int orientation = latentd::ExifOrientation(file);
  if (orientation < 1 || orientation > 8) std::abort();
  const latentd::DecodeLimits limits = {.max_bytes = 1 << 20, .max_pixels = 1 << 16};
  const auto mask = latentd::DecodeImage(file, limits, "picture", latentd::AlphaUse::kMask);
  const auto image = latentd::DecodeImage(file, limits, "picture");
  if (mask.ok() != image.ok()) std::abort();
  if (!image.ok()) return 0;
  const int64_t pixels = int64_t{image->width} * image->height;
  if (image->width < 1 || image->height < 1 || pixels > 1 << 16) std::abort();
  if (static_cast<int64_t>(image->pixels.size()) != 3 * pixels) std::abort();
  latentd::ShrinkTo(*image, 16);
  return 0;
}
