// BMP is a table of sizes and rows of pixels: no library is worth it.
#include <array>
#include <optional>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/media/image_decoders.h"

namespace latentd {
namespace {

constexpr uint32_t kRgb = 0, kBitFields = 3, kAlphaBitFields = 6;
constexpr size_t kFileHeader = 14, kCoreHeader = 12, kInfoHeader = 40;

// Where in a pixel a channel's bits are, and what makes eight of them.
struct Channel {
  uint32_t mask = 0;
  int shift = 0, bits = 0;

  static Channel Of(uint32_t mask) {
    Channel channel{mask};
    if (mask == 0) return channel;
    while ((mask >> channel.shift & 1) == 0) ++channel.shift;
    while (channel.shift + channel.bits < 32 && (mask >> (channel.shift + channel.bits) & 1) != 0)
      ++channel.bits;
    return channel;
  }
  // One run of bits.
  bool good() const { return mask == 0 || (mask >> shift >> (bits - 1)) == 1; }

  uint8_t Value(uint32_t pixel) const {
    if (mask == 0) return 0;
    const uint64_t value = (pixel & mask) >> shift;
    const uint64_t most = (uint64_t{1} << bits) - 1;
    return static_cast<uint8_t>(value * 255 / most);
  }
};

struct Layout {
  int64_t width = 0, height = 0;
  bool from_top = false;
  int bits = 0;
  std::array<Channel, 4> channels;  // red, green, blue, alpha
  size_t palette_at = 0, palette_size = 0, palette_entry = 4;
  size_t pixels_at = 0;
};

class BmpReader {
 public:
  explicit BmpReader(const DecodeRequest& request) : request_(request), file_(request.file) {}

  absl::StatusOr<DecodedImage> Read() {
    RETURN_IF_ERROR(ReadHeader());
    RETURN_IF_ERROR(CheckImageSize(request_, layout_.width, layout_.height));
    const auto width = static_cast<size_t>(layout_.width), height = static_cast<size_t>(layout_.height);
    const size_t row_bytes = (width * static_cast<size_t>(layout_.bits) + 31) / 32 * 4;
    if (layout_.pixels_at > file_.size() || row_bytes > (file_.size() - layout_.pixels_at) / height) {
      return Broken("it is cut short");
    }
    DecodedImage out;
    out.image.width = static_cast<int>(width);
    out.image.height = static_cast<int>(height);
    out.image.pixels.resize(width * height * 3);
    if (request_.alpha && layout_.channels[3].mask != 0) out.alpha.resize(width * height);
    for (size_t y = 0; y < height; ++y) {
      const size_t row = layout_.pixels_at + row_bytes * (layout_.from_top ? y : height - 1 - y);
      for (size_t x = 0; x < width; ++x) SetPixel(out, y * width + x, row, x);
    }
    return out;
  }

 private:
  absl::Status Broken(absl::string_view why) const {
    return FieldError(request_.field, absl::StrCat("broken BMP: ", why));
  }

  // 0 beyond the end of the file.
  uint32_t Number(size_t at, size_t bytes) const {
    if (at > file_.size() || bytes > file_.size() - at) return 0;
    uint32_t value = 0;
    for (size_t i = bytes; i > 0; --i) value = value << 8 | static_cast<uint8_t>(file_[at + i - 1]);
    return value;
  }

  absl::Status ReadHeader() {
    const size_t header = Number(kFileHeader, 4);
    layout_.pixels_at = Number(10, 4);
    if (file_.size() < kFileHeader + kCoreHeader || header > file_.size() - kFileHeader) {
      return Broken("it is cut short");
    }
    if (header == kCoreHeader) {
      layout_.width = Number(18, 2);
      layout_.height = Number(20, 2);
      layout_.bits = static_cast<int>(Number(24, 2));
      return SetPixelFormat(header, kRgb);
    }
    if (header < kInfoHeader) return Broken(absl::StrCat("a header of ", header, " bytes"));
    layout_.width = static_cast<int32_t>(Number(18, 4));
    layout_.height = static_cast<int32_t>(Number(22, 4));
    layout_.bits = static_cast<int>(Number(28, 2));
    layout_.from_top = layout_.height < 0;
    if (layout_.from_top) layout_.height = -layout_.height;
    return SetPixelFormat(header, Number(30, 4));
  }

  absl::Status SetPixelFormat(size_t header, uint32_t compression) {
    const int bits = layout_.bits;
    if (compression != kRgb && compression != kBitFields && compression != kAlphaBitFields) {
      return FieldError(request_.field, absl::StrCat("a compressed BMP (kind ", compression,
                                                     "); save it without compression, or as PNG"));
    }
    if (bits == 1 || bits == 4 || bits == 8) {
      if (compression != kRgb) return Broken("a palette and masks");
      const size_t stated = header >= kInfoHeader ? Number(46, 4) : 0;
      layout_.palette_entry = header == kCoreHeader ? 3 : 4;
      layout_.palette_at = kFileHeader + header;
      layout_.palette_size = stated > 0 && stated < (size_t{1} << bits) ? stated : size_t{1} << bits;
      if (layout_.palette_size * layout_.palette_entry > file_.size() - layout_.palette_at) {
        return Broken("its palette is cut short");
      }
      return absl::OkStatus();
    }
    if (bits != 16 && bits != 24 && bits != 32) {
      return FieldError(request_.field,
                        absl::StrCat("a BMP of ", bits, " bits a pixel; 1, 4, 8, 16, 24 and 32 are read"));
    }
    SetMasks(header, compression);
    for (const Channel& channel : layout_.channels) {
      if (!channel.good()) return Broken("masks with holes");
    }
    return absl::OkStatus();
  }

  void SetMasks(size_t header, uint32_t compression) {
    std::array<uint32_t, 4> masks = {0xff0000, 0xff00, 0xff, 0};
    if (layout_.bits == 16) masks = {0x7c00, 0x3e0, 0x1f, 0};
    if (compression != kRgb && layout_.bits != 24) {
      // Behind the shortest header, or in the longer ones at the same place.
      const size_t at = kFileHeader + kInfoHeader;
      for (size_t i = 0; i < 3; ++i) masks[i] = Number(at + 4 * i, 4);
      const bool has_alpha = header >= 56 || compression == kAlphaBitFields;
      masks[3] = has_alpha ? Number(at + 12, 4) : 0;
    }
    for (size_t i = 0; i < 4; ++i) layout_.channels[i] = Channel::Of(masks[i]);
  }

  // REQUIRES: the row is inside of the file.
  void SetPixel(DecodedImage& out, size_t index, size_t row, size_t x) const {
    uint8_t* rgb = &out.image.pixels[3 * index];
    const auto bits = static_cast<size_t>(layout_.bits);
    if (bits <= 8) {
      const size_t bit = x * bits;
      const auto byte = static_cast<uint8_t>(file_[row + bit / 8]);
      const size_t entry = byte >> (8 - bits - bit % 8) & ((1u << bits) - 1);
      if (entry >= layout_.palette_size) return;  // black
      const size_t at = layout_.palette_at + entry * layout_.palette_entry;
      for (size_t c = 0; c < 3; ++c) rgb[c] = static_cast<uint8_t>(file_[at + 2 - c]);
      return;
    }
    const uint32_t pixel = Number(row + x * bits / 8, bits / 8);
    for (size_t c = 0; c < 3; ++c) rgb[c] = layout_.channels[c].Value(pixel);
    if (!out.alpha.empty()) out.alpha[index] = layout_.channels[3].Value(pixel);
  }

  const DecodeRequest& request_;
  const absl::string_view file_;
  Layout layout_;
};

}  // namespace

absl::StatusOr<DecodedImage> DecodeBmp(const DecodeRequest& request) { return BmpReader(request).Read(); }

}  // namespace latentd
