#include <gif_lib.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/media/image_decoders.h"

namespace latentd {
namespace {

struct Source {
  absl::string_view rest;
};

int ReadGif(GifFileType* gif, GifByteType* data, int size) {
  auto* source = static_cast<Source*>(gif->UserData);
  const size_t take = std::min(static_cast<size_t>(std::max(size, 0)), source->rest.size());
  std::memcpy(data, source->rest.data(), take);
  source->rest.remove_prefix(take);
  return static_cast<int>(take);
}

// The library's object, with its end.
struct GifReader {
  Source source;
  int error = 0;
  GifFileType* gif;
  explicit GifReader(absl::string_view file) : source{file}, gif(DGifOpen(&source, ReadGif, &error)) {}
  ~GifReader() {
    if (gif != nullptr) DGifCloseFile(gif, nullptr);
  }
};

constexpr int kNone = NO_TRANSPARENT_COLOR;

// Goes to the first picture; `transparent` is its colour without paint.
bool FindPicture(GifFileType* gif, int& transparent) {
  transparent = kNone;
  GifRecordType type;
  while (DGifGetRecordType(gif, &type) == GIF_OK) {
    if (type == IMAGE_DESC_RECORD_TYPE) return DGifGetImageDesc(gif) == GIF_OK;
    if (type != EXTENSION_RECORD_TYPE) return false;
    int code = 0;
    GifByteType* data = nullptr;
    if (DGifGetExtension(gif, &code, &data) != GIF_OK) return false;
    while (data != nullptr) {
      GraphicsControlBlock control;
      if (code == GRAPHICS_EXT_FUNC_CODE && DGifExtensionToGCB(data[0], data + 1, &control) == GIF_OK) {
        transparent = control.TransparentColor;
      }
      if (DGifGetExtensionNext(gif, &data) != GIF_OK) return false;
    }
  }
  return false;
}

// The picture's rows in the order of the file: of an interlaced one every eighth first.
std::vector<int> RowOrder(int height, bool interlaced) {
  std::vector<int> rows;
  rows.reserve(static_cast<size_t>(height));
  if (!interlaced) {
    for (int y = 0; y < height; ++y) rows.push_back(y);
    return rows;
  }
  for (const auto& [first, step] : {std::pair{0, 8}, {4, 8}, {2, 4}, {1, 2}}) {
    for (int y = first; y < height; y += step) rows.push_back(y);
  }
  return rows;
}

}  // namespace

absl::StatusOr<DecodedImage> DecodeGif(const DecodeRequest& request) {
  GifReader reader(request.file);
  const auto broken = [&](const char* why) {
    return FieldError(request.field, absl::StrCat("broken GIF: ", why));
  };
  if (reader.gif == nullptr) return broken("its header cannot be read");
  GifFileType& gif = *reader.gif;
  RETURN_IF_ERROR(CheckImageSize(request, gif.SWidth, gif.SHeight));
  int transparent = kNone;
  if (!FindPicture(&gif, transparent)) return broken("it has no picture");
  const GifImageDesc& part = gif.Image;
  if (part.Width < 1 || part.Height < 1 || part.Left < 0 || part.Top < 0 ||
      part.Width > gif.SWidth - part.Left || part.Height > gif.SHeight - part.Top) {
    return broken("its first picture is not inside of its canvas");
  }
  const ColorMapObject* colours = part.ColorMap != nullptr ? part.ColorMap : gif.SColorMap;
  if (colours == nullptr) return broken("it has no palette");
  const auto colour = [&](int index) {
    return index < colours->ColorCount ? colours->Colors[index] : GifColorType{0, 0, 0};
  };

  DecodedImage out;
  out.image.width = gif.SWidth;
  out.image.height = gif.SHeight;
  const auto pixels = static_cast<size_t>(gif.SWidth) * static_cast<size_t>(gif.SHeight);
  const bool whole = part.Width == gif.SWidth && part.Height == gif.SHeight;
  out.image.pixels.resize(pixels * 3);
  if (request.alpha && (transparent != kNone || !whole)) out.alpha.assign(pixels, 0);
  if (!whole) {
    const GifColorType none = colour(transparent == kNone ? 0 : transparent);
    for (size_t i = 0; i < pixels; ++i) {
      out.image.pixels[3 * i] = none.Red;
      out.image.pixels[3 * i + 1] = none.Green;
      out.image.pixels[3 * i + 2] = none.Blue;
    }
  }
  std::vector<GifPixelType> line(static_cast<size_t>(part.Width));
  for (const int y : RowOrder(part.Height, part.Interlace)) {
    if (DGifGetLine(&gif, line.data(), part.Width) != GIF_OK) return broken("its pixels cannot be read");
    size_t at =
        static_cast<size_t>(part.Top + y) * static_cast<size_t>(gif.SWidth) + static_cast<size_t>(part.Left);
    for (const GifPixelType index : line) {
      const GifColorType rgb = colour(index);
      out.image.pixels[3 * at] = rgb.Red;
      out.image.pixels[3 * at + 1] = rgb.Green;
      out.image.pixels[3 * at + 2] = rgb.Blue;
      if (!out.alpha.empty()) out.alpha[at] = index == transparent ? 0 : 255;
      ++at;
    }
  }
  return out;
}

}  // namespace latentd
