// Pictures that clients send: sizes are checked from the header, and what is decoded has them.
#include <cstdint>
#include <cstdlib>

#include "server/image_codec.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view file(reinterpret_cast<const char*>(data), size);
  const auto image = latentd::DecodeImage(file, {.max_bytes = 1 << 20, .max_pixels = 1 << 16}, "picture");
  if (!image.ok()) return 0;
  const int64_t pixels = int64_t{image->width} * image->height;
  if (image->width < 1 || image->height < 1 || pixels > 1 << 16) std::abort();
  if (static_cast<int64_t>(image->pixels.size()) != 3 * pixels) std::abort();
  latentd::ShrinkTo(*image, 16);
  return 0;
}
