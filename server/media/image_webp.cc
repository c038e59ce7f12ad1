#include <webp/decode.h>
#include <webp/encode.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/media/image_decoders.h"
#include "server/media/image_metadata.h"

namespace latentd {
namespace {

const uint8_t* Bytes(absl::string_view text) { return reinterpret_cast<const uint8_t*>(text.data()); }

void AppendLittle(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

void AppendChunk(std::string& out, absl::string_view type, absl::string_view data) {
  absl::StrAppend(&out, type);
  AppendLittle(out, data.size(), 4);
  absl::StrAppend(&out, data);
  if (data.size() % 2 != 0) out += '\0';
}

// A plain WebP file in the extended form, which has place for EXIF.
std::string WithExif(absl::string_view file, int width, int height, absl::string_view exif) {
  constexpr int kHasExif = 0x08;
  std::string header;
  AppendLittle(header, kHasExif, 4);
  AppendLittle(header, static_cast<uint64_t>(width - 1), 3);
  AppendLittle(header, static_cast<uint64_t>(height - 1), 3);
  std::string chunks = "WEBP";
  AppendChunk(chunks, "VP8X", header);
  absl::StrAppend(&chunks, file.substr(12));
  AppendChunk(chunks, "EXIF", exif);
  std::string out;
  AppendChunk(out, "RIFF", chunks);
  return out;
}

}  // namespace

absl::StatusOr<std::string> EncodeWebp(absl::Span<const uint8_t> pixels, int width, int height, int quality,
                                       const PictureNotes& notes) {
  RETURN_IF_ERROR(CheckRgbPixels(pixels, width, height));
  uint8_t* data = nullptr;
  const size_t size =
      WebPEncodeRGB(pixels.data(), width, height, 3 * width, static_cast<float>(quality), &data);
  const std::unique_ptr<uint8_t, void (*)(void*)> owned(data, WebPFree);
  if (size == 0) {
    return MakeError(absl::StatusCode::kInternal, "ENCODE_FAILED",
                     absl::StrCat("cannot encode ", width, "×", height, " pixels as WebP"));
  }
  const absl::string_view file(reinterpret_cast<const char*>(data), size);
  if (notes.empty()) return std::string(file);
  return WithExif(file, width, height, MakeExif(notes.record, notes.parameters));
}

absl::StatusOr<DecodedImage> DecodeWebp(const DecodeRequest& request) {
  WebPBitstreamFeatures features;
  const auto broken = [&] { return FieldError(request.field, "broken WebP: its pixels cannot be read"); };
  if (WebPGetFeatures(Bytes(request.file), request.file.size(), &features) != VP8_STATUS_OK) return broken();
  if (features.has_animation) {
    return FieldError(request.field, "an animated WebP file; give one with a single picture");
  }
  RETURN_IF_ERROR(CheckImageSize(request, features.width, features.height));
  DecodedImage out;
  out.image.width = features.width;
  out.image.height = features.height;
  const auto pixels = static_cast<size_t>(features.width) * static_cast<size_t>(features.height);
  out.image.pixels.resize(pixels * 3);
  if (!request.alpha || !features.has_alpha) {
    if (WebPDecodeRGBInto(Bytes(request.file), request.file.size(), out.image.pixels.data(), pixels * 3,
                          features.width * 3) == nullptr) {
      return broken();
    }
    return out;
  }
  std::vector<uint8_t> rgba(pixels * 4);
  if (WebPDecodeRGBAInto(Bytes(request.file), request.file.size(), rgba.data(), rgba.size(),
                         features.width * 4) == nullptr) {
    return broken();
  }
  out.alpha.resize(pixels);
  for (size_t i = 0; i < pixels; ++i) {
    for (size_t c = 0; c < 3; ++c) out.image.pixels[3 * i + c] = rgba[4 * i + c];
    out.alpha[i] = rgba[4 * i + 3];
  }
  return out;
}

}  // namespace latentd
