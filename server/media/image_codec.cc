// Both C libraries report errors by longjmp. So each of them is used in functions that own nothing with a
// destructor between setjmp and the call: all buffers belong to the caller.
#include "server/media/image_codec.h"

#include <jerror.h>
#include <jpeglib.h>
#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "server/media/image_decoders.h"
#include "server/media/image_metadata.h"

namespace latentd {
namespace {

// A side longer than this is no picture; keeps all arithmetic on sizes far from overflow.
constexpr int64_t kMaxSide = 65500;

// A progressive JPEG may hold any number of scans, each as costly as a picture.
constexpr int kMaxJpegScans = 200;

constexpr size_t kMessageSize = JMSG_LENGTH_MAX;

// The texts that notes are written as.
constexpr char kRecordKey[] = "latentd", kParametersKey[] = "parameters";
constexpr absl::string_view kRecordComment = "latentd:";
constexpr size_t kMaxComment = 65533;

absl::Status EncodeFailed(const char* message) {
  return MakeError(absl::StatusCode::kInternal, "ENCODE_FAILED", absl::StrCat("cannot encode: ", message));
}

// ---- PNG ----

struct PngError {
  char message[kMessageSize] = "";
};

void OnPngError(png_structp png, png_const_charp message) {
  auto* error = static_cast<PngError*>(png_get_error_ptr(png));
  std::strncpy(error->message, message, kMessageSize - 1);
  png_longjmp(png, 1);
}

void OnPngWarning(png_structp, png_const_charp) {}

void AppendPng(png_structp png, png_bytep data, size_t size) {
  static_cast<std::string*>(png_get_io_ptr(png))->append(reinterpret_cast<const char*>(data), size);
}

void FlushPng(png_structp) {}

bool WritePng(png_structp png, png_infop info, absl::Span<const uint8_t> pixels, int width, int height,
              png_text* texts, int text_count, std::string* out) {
  if (setjmp(png_jmpbuf(png)) != 0) return false;
  png_set_write_fn(png, out, AppendPng, FlushPng);
  png_set_IHDR(png, info, width, height, 8, PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  png_set_compression_level(png, 6);
  if (text_count > 0) png_set_text(png, info, texts, text_count);
  png_write_info(png, info);
  for (int y = 0; y < height; ++y) png_write_row(png, pixels.data() + static_cast<size_t>(y) * width * 3);
  png_write_end(png, info);
  return true;
}

struct PngSource {
  absl::string_view rest;
};

void ReadPngBytes(png_structp png, png_bytep data, size_t size) {
  auto* source = static_cast<PngSource*>(png_get_io_ptr(png));
  if (size > source->rest.size()) png_error(png, "the file is cut short");
  std::memcpy(data, source->rest.data(), size);
  source->rest.remove_prefix(size);
}

bool ReadPngHeader(png_structp png, png_infop info, PngSource* source) {
  if (setjmp(png_jmpbuf(png)) != 0) return false;
  png_set_user_limits(png, kMaxSide, kMaxSide);
  png_set_chunk_cache_max(png, 64);
  png_set_chunk_malloc_max(png, 1 << 20);
  // A damaged text or colour profile does not matter, but damaged pixels do.
  png_set_crc_action(png, PNG_CRC_ERROR_QUIT, PNG_CRC_WARN_DISCARD);
  png_set_read_fn(png, source, ReadPngBytes);
  png_read_info(png, info);
  return true;
}

bool ReadPngPixels(png_structp png, png_infop info, bool alpha, uint8_t* pixels, size_t row_bytes) {
  if (setjmp(png_jmpbuf(png)) != 0) return false;
  png_set_expand(png);
  png_set_scale_16(png);
  png_set_gray_to_rgb(png);
  if (!alpha) png_set_strip_alpha(png);
  const int passes = png_set_interlace_handling(png);
  png_read_update_info(png, info);
  if (png_get_rowbytes(png, info) != row_bytes) png_error(png, "unusual pixel format");
  const png_uint_32 height = png_get_image_height(png, info);
  for (int pass = 0; pass < passes; ++pass) {
    for (png_uint_32 y = 0; y < height; ++y) png_read_row(png, pixels + y * row_bytes, nullptr);
  }
  png_read_end(png, nullptr);
  return true;
}

// The library's two objects, with their end.
struct PngReader {
  PngError error;
  png_structp png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &error, OnPngError, OnPngWarning);
  png_infop info = png != nullptr ? png_create_info_struct(png) : nullptr;
  ~PngReader() { png_destroy_read_struct(&png, &info, nullptr); }
};

struct PngWriter {
  PngError error;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, &error, OnPngError, OnPngWarning);
  png_infop info = png != nullptr ? png_create_info_struct(png) : nullptr;
  ~PngWriter() { png_destroy_write_struct(&png, &info); }
};

bool HasAlpha(png_structp png, png_infop info) {
  return (png_get_color_type(png, info) & PNG_COLOR_MASK_ALPHA) != 0 ||
         png_get_valid(png, info, PNG_INFO_tRNS) != 0;
}

// RGBA → RGB and alpha.
void SplitAlpha(const std::vector<uint8_t>& rgba, DecodedImage& out) {
  const size_t pixels = rgba.size() / 4;
  out.image.pixels.resize(pixels * 3);
  out.alpha.resize(pixels);
  for (size_t i = 0; i < pixels; ++i) {
    std::copy_n(&rgba[4 * i], 3, &out.image.pixels[3 * i]);
    out.alpha[i] = rgba[4 * i + 3];
  }
}

absl::StatusOr<DecodedImage> DecodePng(const DecodeRequest& request) {
  PngReader reader;
  if (reader.info == nullptr) return absl::ResourceExhaustedError("no memory for a PNG reader");
  PngSource source{request.file};
  const auto broken = [&] {
    return FieldError(request.field, absl::StrCat("broken PNG: ", reader.error.message));
  };
  if (!ReadPngHeader(reader.png, reader.info, &source)) return broken();
  const int64_t width = png_get_image_width(reader.png, reader.info);
  const int64_t height = png_get_image_height(reader.png, reader.info);
  RETURN_IF_ERROR(CheckImageSize(request, width, height));
  DecodedImage out;
  out.image.width = static_cast<int>(width);
  out.image.height = static_cast<int>(height);
  const bool alpha = request.alpha && HasAlpha(reader.png, reader.info);
  const int64_t row_bytes = width * (alpha ? 4 : 3);
  std::vector<uint8_t> pixels(static_cast<size_t>(row_bytes * height));
  if (!ReadPngPixels(reader.png, reader.info, alpha, pixels.data(), static_cast<size_t>(row_bytes)))
    return broken();
  if (alpha) {
    SplitAlpha(pixels, out);
  } else {
    out.image.pixels = std::move(pixels);
  }
  return out;
}

// ---- JPEG ----

struct JpegError {
  jpeg_error_mgr base;  // first, so that the library's pointer to it is one to this
  jmp_buf jump;
  char message[kMessageSize];
};

[[noreturn]] void OnJpegError(j_common_ptr codec) {
  auto* error = reinterpret_cast<JpegError*>(codec->err);
  codec->err->format_message(codec, error->message);
  std::longjmp(error->jump, 1);
}

// level < 0: the data are damaged, and the library would go on with grey pixels.
void OnJpegMessage(j_common_ptr codec, int level) {
  if (level < 0 && codec->err->msg_code != JWRN_EXTRANEOUS_DATA) OnJpegError(codec);
}

void InitJpegError(JpegError* error) {
  jpeg_std_error(&error->base);
  error->base.error_exit = OnJpegError;
  error->base.emit_message = OnJpegMessage;
  error->message[0] = '\0';
}

void OnJpegProgress(j_common_ptr codec) {
  if (!codec->is_decompressor) return;
  auto* reader = reinterpret_cast<j_decompress_ptr>(codec);
  if (reader->input_scan_number > kMaxJpegScans) ERREXIT(reader, JERR_BAD_PROGRESSION);
}

bool ReadJpegHeader(j_decompress_ptr jpeg, JpegError* error, absl::string_view file) {
  if (setjmp(error->jump) != 0) return false;
  jpeg_create_decompress(jpeg);
  jpeg_mem_src(jpeg, reinterpret_cast<const unsigned char*>(file.data()), file.size());
  jpeg_read_header(jpeg, TRUE);
  return true;
}

// `pixels`: three channels, or the four of CMYK.
bool ReadJpegPixels(j_decompress_ptr jpeg, JpegError* error, uint8_t* pixels) {
  if (setjmp(error->jump) != 0) return false;
  const bool cmyk = jpeg->num_components == 4;
  jpeg->out_color_space = cmyk ? JCS_CMYK : JCS_RGB;
  jpeg->dct_method = JDCT_ISLOW;
  jpeg_start_decompress(jpeg);
  const size_t row_bytes = static_cast<size_t>(jpeg->output_width) * (cmyk ? 4 : 3);
  while (jpeg->output_scanline < jpeg->output_height) {
    JSAMPROW row = pixels + jpeg->output_scanline * row_bytes;
    jpeg_read_scanlines(jpeg, &row, 1);
  }
  jpeg_finish_decompress(jpeg);
  return true;
}

bool WriteJpeg(j_compress_ptr jpeg, JpegError* error, absl::Span<const uint8_t> pixels, int width, int height,
               int quality, const std::vector<std::string>* comments, unsigned char** out,
               unsigned long* size) {
  if (setjmp(error->jump) != 0) return false;
  jpeg_create_compress(jpeg);
  jpeg_mem_dest(jpeg, out, size);
  jpeg->image_width = width;
  jpeg->image_height = height;
  jpeg->input_components = 3;
  jpeg->in_color_space = JCS_RGB;
  jpeg_set_defaults(jpeg);
  jpeg_set_quality(jpeg, quality, TRUE);
  jpeg->dct_method = JDCT_ISLOW;
  if (quality >= 90) jpeg->comp_info[0].h_samp_factor = jpeg->comp_info[0].v_samp_factor = 1;
  jpeg_start_compress(jpeg, TRUE);
  for (size_t i = 0; i < comments->size(); ++i) {
    jpeg_write_marker(jpeg, JPEG_COM, reinterpret_cast<const JOCTET*>((*comments)[i].data()),
                      static_cast<unsigned>((*comments)[i].size()));
  }
  while (jpeg->next_scanline < jpeg->image_height) {
    JSAMPROW row = const_cast<JSAMPROW>(pixels.data() + static_cast<size_t>(jpeg->next_scanline) * width * 3);
    jpeg_write_scanlines(jpeg, &row, 1);
  }
  jpeg_finish_compress(jpeg);
  return true;
}

struct JpegReader {
  JpegError error;
  jpeg_decompress_struct jpeg = {};
  jpeg_progress_mgr progress = {};
  JpegReader() {
    InitJpegError(&error);
    jpeg.err = &error.base;
    progress.progress_monitor = OnJpegProgress;
  }
  ~JpegReader() { jpeg_destroy_decompress(&jpeg); }
};

struct JpegWriter {
  JpegError error;
  jpeg_compress_struct jpeg = {};
  unsigned char* data = nullptr;
  unsigned long size = 0;
  JpegWriter() {
    InitJpegError(&error);
    jpeg.err = &error.base;
  }
  ~JpegWriter() {
    jpeg_destroy_compress(&jpeg);
    std::free(data);
  }
};

// As Pillow does it: ink is what is missing from 255, as Adobe's programs write it and nearly everybody else.
std::vector<uint8_t> RgbOfInvertedCmyk(const std::vector<uint8_t>& cmyk) {
  const auto share = [](int a, int b) {  // a · b / 255, rounded
    const int product = a * b + 128;
    return ((product >> 8) + product) >> 8;
  };
  std::vector<uint8_t> rgb(cmyk.size() / 4 * 3);
  for (size_t i = 0; i < cmyk.size() / 4; ++i) {
    const int light = cmyk[4 * i + 3];
    for (size_t c = 0; c < 3; ++c) {
      rgb[3 * i + c] = static_cast<uint8_t>(std::max(0, light - share(255 - cmyk[4 * i + c], light)));
    }
  }
  return rgb;
}

absl::StatusOr<DecodedImage> DecodeJpeg(const DecodeRequest& request) {
  JpegReader reader;
  const auto broken = [&] {
    return FieldError(request.field, absl::StrCat("broken JPEG: ", reader.error.message));
  };
  if (!ReadJpegHeader(&reader.jpeg, &reader.error, request.file)) return broken();
  RETURN_IF_ERROR(CheckImageSize(request, reader.jpeg.image_width, reader.jpeg.image_height));
  const int channels = reader.jpeg.num_components;
  if (channels != 1 && channels != 3 && channels != 4) {
    return FieldError(request.field,
                      absl::StrCat("a JPEG of ", channels, " colour channels; convert it to RGB"));
  }
  reader.jpeg.progress = &reader.progress;
  DecodedImage out;
  out.image.width = static_cast<int>(reader.jpeg.image_width);
  out.image.height = static_cast<int>(reader.jpeg.image_height);
  std::vector<uint8_t> pixels(static_cast<size_t>(out.image.width) * static_cast<size_t>(out.image.height) *
                              (channels == 4 ? 4 : 3));
  if (!ReadJpegPixels(&reader.jpeg, &reader.error, pixels.data())) return broken();
  out.image.pixels = channels == 4 ? RgbOfInvertedCmyk(pixels) : std::move(pixels);
  return out;
}

// What is longer than a comment comes in several; the parameters last, since readers that know one comment
// take that.
std::vector<std::string> JpegComments(const PictureNotes& notes) {
  std::vector<std::string> comments;
  const size_t piece = kMaxComment - kRecordComment.size();
  for (size_t at = 0; at < notes.record.size(); at += piece) {
    comments.push_back(absl::StrCat(kRecordComment, notes.record.substr(at, piece)));
  }
  if (!notes.parameters.empty() && notes.parameters.size() <= kMaxComment)
    comments.push_back(notes.parameters);
  return comments;
}

absl::StatusOr<DecodedImage> DecodeByKind(const DecodeRequest& request) {
  const absl::string_view file = request.file;
  if (IsPng(file)) return DecodePng(request);
  if (IsJpeg(file)) return DecodeJpeg(request);
  if (IsWebp(file)) return DecodeWebp(request);
  if (absl::StartsWith(file, "GIF8")) return DecodeGif(request);
  if (absl::StartsWith(file, "BM")) return DecodeBmp(request);
  return FieldError(request.field, file.empty() ? "is empty" : "is none of PNG, JPEG, WebP, GIF and BMP");
}

}  // namespace

absl::Status CheckRgbPixels(absl::Span<const uint8_t> pixels, int width, int height) {
  if (width <= 0 || height <= 0 || width > kMaxSide || height > kMaxSide ||
      pixels.size() != static_cast<size_t>(width) * static_cast<size_t>(height) * 3) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_IMAGE",
                     absl::StrCat(pixels.size(), " bytes are not ", width, "×", height, " RGB pixels"));
  }
  return absl::OkStatus();
}

absl::Status CheckImageSize(const DecodeRequest& request, int64_t width, int64_t height) {
  if (width <= 0 || height <= 0 || width > kMaxSide || height > kMaxSide ||
      width * height > request.limits.max_pixels) {
    return FieldError(request.field,
                      absl::StrCat("a picture of ", width, "×", height, " is over the limit of ",
                                   request.limits.max_pixels, " pixels"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> EncodePng(absl::Span<const uint8_t> pixels, int width, int height,
                                      const PictureNotes& notes) {
  RETURN_IF_ERROR(CheckRgbPixels(pixels, width, height));
  std::vector<png_text> entries;
  char empty[] = "";
  for (const auto& [key, value] :
       {std::pair<const char*, const std::string&>{kParametersKey, notes.parameters},
        {kRecordKey, notes.record}}) {
    if (value.empty()) continue;
    png_text entry = {};
    const bool ascii = std::all_of(value.begin(), value.end(), [](unsigned char c) { return c < 0x80; });
    entry.compression = ascii ? PNG_TEXT_COMPRESSION_NONE : PNG_ITXT_COMPRESSION_NONE;
    entry.key = const_cast<char*>(key);
    entry.text = const_cast<char*>(value.c_str());
    (ascii ? entry.text_length : entry.itxt_length) = value.size();
    entry.lang = entry.lang_key = empty;
    entries.push_back(entry);
  }
  PngWriter writer;
  std::string out;
  if (writer.info == nullptr || !WritePng(writer.png, writer.info, pixels, width, height, entries.data(),
                                          static_cast<int>(entries.size()), &out)) {
    return EncodeFailed(writer.error.message);
  }
  return out;
}

absl::StatusOr<std::string> EncodeJpeg(absl::Span<const uint8_t> pixels, int width, int height, int quality,
                                       const PictureNotes& notes) {
  RETURN_IF_ERROR(CheckRgbPixels(pixels, width, height));
  const std::vector<std::string> comments = JpegComments(notes);
  JpegWriter writer;
  if (!WriteJpeg(&writer.jpeg, &writer.error, pixels, width, height, quality, &comments, &writer.data,
                 &writer.size)) {
    return EncodeFailed(writer.error.message);
  }
  return std::string(reinterpret_cast<const char*>(writer.data), writer.size);
}

std::optional<std::string> RecordIn(absl::string_view file) {
  if (IsWebp(file)) return ExifDescription(ExifOf(file));
  const absl::string_view key(kRecordKey, sizeof kRecordKey);  // with the zero that ends it
  std::optional<std::string> record;
  for (const ImageChunk& chunk : ImageChunks(file)) {
    absl::string_view data = chunk.data;
    if (chunk.type == "tEXt" && absl::ConsumePrefix(&data, key)) return std::string(data);
    if (chunk.type == "COM" && absl::ConsumePrefix(&data, kRecordComment)) {
      record = absl::StrCat(record.value_or(""), data);
    }
  }
  return record;
}

absl::StatusOr<RgbImage> DecodeImage(absl::string_view file, const DecodeLimits& limits,
                                     absl::string_view field, AlphaUse alpha) {
  if (static_cast<int64_t>(file.size()) > limits.max_bytes) {
    return FieldError(
        field, absl::StrCat("a file of ", file.size(), " bytes is over the limit of ", limits.max_bytes));
  }
  ASSIGN_OR_RETURN(DecodedImage decoded, DecodeByKind({file, limits, field, alpha == AlphaUse::kMask}));
  if (std::any_of(decoded.alpha.begin(), decoded.alpha.end(), [](uint8_t a) { return a != 255; })) {
    for (size_t i = 0; i < decoded.alpha.size(); ++i) {
      std::fill_n(&decoded.image.pixels[3 * i], 3, decoded.alpha[i]);
    }
  }
  return TurnUpright(std::move(decoded.image), ExifOrientation(ExifOf(file)));
}

RgbImage TurnUpright(RgbImage image, int orientation) {
  if (orientation <= 1 || orientation > 8) return image;
  // Rows and columns change places from 5 on; what is right or below comes first then.
  const bool swapped = orientation >= 5;
  const bool from_right = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const bool from_below = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  RgbImage out{swapped ? image.height : image.width, swapped ? image.width : image.height, {}};
  out.pixels.resize(image.pixels.size());
  size_t at = 0;
  for (int y = 0; y < out.height; ++y) {
    for (int x = 0; x < out.width; ++x) {
      int from_x = swapped ? y : x, from_y = swapped ? x : y;
      if (from_right) from_x = image.width - 1 - from_x;
      if (from_below) from_y = image.height - 1 - from_y;
      const size_t from =
          3 * (static_cast<size_t>(from_y) * static_cast<size_t>(image.width) + static_cast<size_t>(from_x));
      std::copy_n(&image.pixels[from], 3, &out.pixels[at]);
      at += 3;
    }
  }
  return out;
}

RgbImage ShrinkTo(const RgbImage& image, int max_side) {
  const int longer = std::max(image.width, image.height);
  if (longer <= max_side) return image;
  RgbImage out;
  out.width = std::max<int64_t>(1, int64_t{image.width} * max_side / longer);
  out.height = std::max<int64_t>(1, int64_t{image.height} * max_side / longer);
  out.pixels.resize(static_cast<size_t>(out.width) * out.height * 3);
  for (int y = 0; y < out.height; ++y) {
    const int y0 = int64_t{y} * image.height / out.height, y1 = int64_t{y + 1} * image.height / out.height;
    for (int x = 0; x < out.width; ++x) {
      const int x0 = int64_t{x} * image.width / out.width, x1 = int64_t{x + 1} * image.width / out.width;
      int64_t sum[3] = {};
      for (int v = y0; v < y1; ++v) {
        for (int u = x0; u < x1; ++u) {
          const uint8_t* pixel = &image.pixels[(static_cast<size_t>(v) * image.width + u) * 3];
          for (int c = 0; c < 3; ++c) sum[c] += pixel[c];
        }
      }
      const int64_t count = int64_t{y1 - y0} * (x1 - x0);
      for (int c = 0; c < 3; ++c) {
        out.pixels[(static_cast<size_t>(y) * out.width + x) * 3 + c] =
            static_cast<uint8_t>((sum[c] + count / 2) / count);
      }
    }
  }
  return out;
}

}  // namespace latentd
