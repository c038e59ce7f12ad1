#include "server/media/image_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <png.h>

#include <array>
#include <cstdio>
#include <cstdlib>

// Wants the two above.
#include <jpeglib.h>

#include <random>

#include "absl/strings/escaping.h"
#include "cache/base/error.h"
#include "server/media/image_metadata.h"

namespace latentd {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr DecodeLimits kLimits{.max_bytes = 1 << 20, .max_pixels = 1 << 20};

RgbImage Gradient(int width, int height) {
  RgbImage image{width, height, {}};
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      image.pixels.push_back(static_cast<uint8_t>(x * 255 / width));
      image.pixels.push_back(static_cast<uint8_t>(y * 255 / height));
      image.pixels.push_back(128);
    }
  }
  return image;
}

std::string Png(const RgbImage& image) { return *EncodePng(image.pixels, image.width, image.height); }
std::string Jpeg(const RgbImage& image) { return *EncodeJpeg(image.pixels, image.width, image.height, 95); }

absl::StatusOr<RgbImage> Decode(absl::string_view file, DecodeLimits limits = kLimits) {
  return DecodeImage(file, limits, "params.init_image.data");
}

// A PNG of any pixel format, through libpng's simplified interface.
std::string PngOfFormat(png_uint_32 format, int width, int height, const void* pixels) {
  png_image image = {};
  image.version = PNG_IMAGE_VERSION;
  image.width = width;
  image.height = height;
  image.format = format;
  png_alloc_size_t size = 0;
  EXPECT_TRUE(png_image_write_to_memory(&image, nullptr, &size, 0, pixels, 0, nullptr));
  std::string out(size, '\0');
  EXPECT_TRUE(png_image_write_to_memory(&image, out.data(), &size, 0, pixels, 0, nullptr));
  return out;
}

TEST(PngCodec, GivesThePixelsBack) {
  const RgbImage image = Gradient(33, 17);
  auto back = Decode(Png(image));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->width, 33);
  EXPECT_EQ(back->height, 17);
  EXPECT_EQ(back->pixels, image.pixels);
}

TEST(PngCodec, TheSamePixelsGiveTheSameFile) { EXPECT_EQ(Png(Gradient(40, 40)), Png(Gradient(40, 40))); }

TEST(PngCodec, WritesNotesOfAnyLanguage) {
  const RgbImage image = Gradient(8, 8);
  auto file = EncodePng(image.pixels, 8, 8, {.record = "{\"a\":1}", .parameters = "ein grüner Kreis"});
  ASSERT_TRUE(file.ok());
  EXPECT_THAT(*file, HasSubstr(std::string("tEXtlatentd\0{\"a\":1}", 19)));
  EXPECT_THAT(*file, HasSubstr("ein grüner Kreis"));
  EXPECT_EQ(RecordIn(*file), "{\"a\":1}");
  EXPECT_EQ(Decode(*file)->pixels, image.pixels);
}

// Each format, and records of all lengths around what one comment holds.
TEST(ImageCodec, GivesTheRecordBack) {
  const RgbImage image = Gradient(16, 8);
  for (const size_t size : {1, 3, 4, 5, 100, 65524, 65525, 65526, 65533, 200000}) {
    const PictureNotes notes = {.record = std::string(size, 'x'), .parameters = "夜, 𝄞"};
    const auto png = EncodePng(image.pixels, 16, 8, notes);
    const auto jpeg = EncodeJpeg(image.pixels, 16, 8, 95, notes);
    const auto webp = EncodeWebp(image.pixels, 16, 8, 95, notes);
    const auto plain = EncodeWebp(image.pixels, 16, 8, 95);
    for (const auto* file : {&png, &jpeg, &webp}) {
      ASSERT_TRUE(file->ok()) << file->status();
      EXPECT_EQ(RecordIn(**file), notes.record);
      EXPECT_LE(static_cast<int64_t>((*file)->size()), MaxFileBytes(16, 8) + MaxNotesBytes(notes));
      EXPECT_TRUE(Decode(**file, {.max_bytes = 1 << 20, .max_pixels = 1 << 20}).ok());
    }
    EXPECT_EQ(Decode(*webp)->pixels, Decode(*plain)->pixels);
    // Some readers take one zero off the end of the description, and no more: it has one, of whatever length.
    const absl::string_view exif = ExifOf(*webp);
    constexpr size_t kCountOfFirstEntry = 8 + 2 + 4;
    uint32_t count = 0;
    for (size_t i = 0; i < 4; ++i) count = count << 8 | static_cast<uint8_t>(exif.at(kCountOfFirstEntry + i));
    EXPECT_EQ(count, std::max<size_t>(size + 1, 5));
  }
}

TEST(ImageCodec, AFileWithoutARecordHasNone) {
  const RgbImage image = Gradient(8, 8);
  for (const auto& file : {EncodePng(image.pixels, 8, 8), EncodeJpeg(image.pixels, 8, 8, 90),
                           EncodeWebp(image.pixels, 8, 8, 90)}) {
    EXPECT_EQ(RecordIn(*file), std::nullopt);
  }
  EXPECT_EQ(RecordIn(""), std::nullopt);
  EXPECT_EQ(RecordIn("RIFF....WEBPEXIF"), std::nullopt);
}

TEST(ImageCodec, ARecordThatIsCutShortAnywhereIsNoneOrAPart) {
  const RgbImage image = Gradient(8, 8);
  const PictureNotes notes = {.record = std::string(50, 'x'), .parameters = "y"};
  for (const auto& file : {EncodePng(image.pixels, 8, 8, notes), EncodeJpeg(image.pixels, 8, 8, 90, notes),
                           EncodeWebp(image.pixels, 8, 8, 90, notes)}) {
    for (size_t size = 0; size < file->size(); ++size) {
      const auto record = RecordIn(file->substr(0, size));
      if (record) {
        EXPECT_TRUE(record == notes.record) << size;
      }
    }
  }
}

TEST(PngCodec, SpreadsGrey) {
  const uint8_t grey[] = {0, 100, 200, 255};
  auto image = Decode(PngOfFormat(PNG_FORMAT_GRAY, 2, 2, grey));
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(image->pixels, (std::vector<uint8_t>{0, 0, 0, 100, 100, 100, 200, 200, 200, 255, 255, 255}));
}

TEST(PngCodec, DropsAlphaAndKeepsTheColour) {
  const uint8_t pixels[] = {10, 20, 30, 0, 40, 50, 60, 255};
  auto image = Decode(PngOfFormat(PNG_FORMAT_RGBA, 2, 1, pixels));
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(image->pixels, (std::vector<uint8_t>{10, 20, 30, 40, 50, 60}));
}

TEST(PngCodec, MakesEightBitsOfSixteen) {
  const png_uint_16 pixels[] = {0, 0x8080, 0xffff};
  auto image = Decode(PngOfFormat(PNG_FORMAT_LINEAR_Y | PNG_FORMAT_FLAG_COLOR, 1, 1, pixels));
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(image->pixels, (std::vector<uint8_t>{0, 0x80, 0xff}));
}

TEST(PngCodec, ReadsPalettes) {
  const uint8_t map[] = {1, 2, 3, 4, 5, 6};
  const uint8_t indices[] = {1, 0};
  png_image png = {};
  png.version = PNG_IMAGE_VERSION;
  png.width = 2, png.height = 1, png.format = PNG_FORMAT_RGB_COLORMAP, png.colormap_entries = 2;
  std::string file(1000, '\0');
  png_alloc_size_t size = file.size();
  ASSERT_TRUE(png_image_write_to_memory(&png, file.data(), &size, 0, indices, 0, map));
  auto image = Decode(absl::string_view(file).substr(0, size));
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(image->pixels, (std::vector<uint8_t>{4, 5, 6, 1, 2, 3}));
}

TEST(PngCodec, AFileThatIsCutShortAnywhereIsAnError) {
  const std::string file = Png(Gradient(20, 20));
  for (size_t size = 0; size < file.size(); ++size) {
    auto image = Decode(file.substr(0, size));
    EXPECT_EQ(ErrorReason(image.status()), "INVALID_FIELD") << size;
  }
}

TEST(PngCodec, AFlippedByteInThePixelsIsAnError) {
  std::string file = Png(Gradient(20, 20));
  file[file.find("IDAT") + 20] ^= 0x40;
  EXPECT_THAT(std::string(Decode(file).status().message()), HasSubstr("broken PNG"));
}

TEST(PngCodec, AHugePictureIsRefusedFromItsHeader) {
  std::string file = Png(Gradient(8, 8));
  // Width and height of IHDR; the checksum is wrong then, so libpng may say that first.
  file[16] = 0x00, file[17] = 0x00, file[18] = 0x7f, file[19] = static_cast<char>(0xff);
  EXPECT_FALSE(Decode(file).ok());
  auto status = Decode(Png(Gradient(100, 100)), {.max_bytes = 1 << 20, .max_pixels = 9999}).status();
  EXPECT_EQ(status.message(),
            "params.init_image.data: a picture of 100×100 is over the limit of 9999 pixels");
  EXPECT_EQ(GetErrorDetails(status).at("field"), "params.init_image.data");
}

TEST(JpegCodec, GivesThePixelsBackNearly) {
  const RgbImage image = Gradient(64, 48);
  auto back = Decode(Jpeg(image));
  ASSERT_TRUE(back.ok()) << back.status();
  ASSERT_EQ(back->pixels.size(), image.pixels.size());
  int worst = 0;
  for (size_t i = 0; i < image.pixels.size(); ++i) {
    worst = std::max(worst, std::abs(int{back->pixels[i]} - int{image.pixels[i]}));
  }
  EXPECT_LE(worst, 6);
}

TEST(JpegCodec, TheSamePixelsGiveTheSameFile) { EXPECT_EQ(Jpeg(Gradient(40, 40)), Jpeg(Gradient(40, 40))); }

TEST(JpegCodec, AFileThatIsCutShortAnywhereIsAnError) {
  const std::string file = Jpeg(Gradient(32, 32));
  for (size_t size = 0; size + 2 < file.size(); ++size) {
    EXPECT_FALSE(Decode(file.substr(0, size)).ok()) << size;
  }
}

TEST(JpegCodec, ReadsGrey) {
  // 8×8 of mid grey, one component.
  std::string file;
  ASSERT_TRUE(
      absl::Base64Unescape("/9j/4AAQSkZJRgABAQAAAQABAAD/"
                           "2wBDAAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB"
                           "AQEBAQEBAQEBAQH/wAALCAAIAAgBAREA/8QAFQABAQAAAAAAAAAAAAAAAAAAAAr/"
                           "xAAUEAEAAAAAAAAAAAAAAAAAAAAA/9oACAEBAAA/"
                           "AL+AD//Z",
                           &file));
  auto image = Decode(file);
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(image->width, 8);
  EXPECT_EQ(image->pixels.size(), 8u * 8 * 3);
}

// As Adobe's programs write them: ink inverted, with a marker that says so; in CMYK or YCCK.
std::string InkJpeg(J_COLOR_SPACE space, int size, std::array<uint8_t, 4> ink) {
  jpeg_compress_struct jpeg = {};
  jpeg_error_mgr error;
  jpeg.err = jpeg_std_error(&error);
  jpeg_create_compress(&jpeg);
  unsigned char* data = nullptr;
  unsigned long bytes = 0;
  jpeg_mem_dest(&jpeg, &data, &bytes);
  jpeg.image_width = jpeg.image_height = static_cast<JDIMENSION>(size);
  jpeg.input_components = 4;
  jpeg.in_color_space = JCS_CMYK;
  jpeg_set_defaults(&jpeg);
  jpeg_set_colorspace(&jpeg, space);
  jpeg_set_quality(&jpeg, 100, TRUE);
  jpeg_start_compress(&jpeg, TRUE);
  std::vector<uint8_t> row;
  for (int x = 0; x < size; ++x) {
    for (const uint8_t value : ink) row.push_back(static_cast<uint8_t>(255 - value));
  }
  JSAMPROW rows = row.data();
  while (jpeg.next_scanline < jpeg.image_height) jpeg_write_scanlines(&jpeg, &rows, 1);
  jpeg_finish_compress(&jpeg);
  jpeg_destroy_compress(&jpeg);
  std::string file(reinterpret_cast<const char*>(data), bytes);
  std::free(data);
  return file;
}

TEST(JpegCodec, InkBecomesLight) {
  // Of cyan, magenta, yellow and black; what Pillow's convert("RGB") makes of them.
  const std::vector<std::pair<std::array<uint8_t, 4>, std::array<int, 3>>> colours = {
      {{0, 0, 0, 0}, {255, 255, 255}},
      {{255, 0, 0, 0}, {0, 255, 255}},
      {{0, 255, 255, 0}, {255, 0, 0}},
      {{0, 0, 0, 255}, {0, 0, 0}},
      {{60, 120, 180, 40}, {164, 114, 63}}};
  for (const J_COLOR_SPACE space : {JCS_CMYK, JCS_YCCK}) {
    for (const auto& [ink, rgb] : colours) {
      const auto image = Decode(InkJpeg(space, 16, ink));
      ASSERT_TRUE(image.ok()) << image.status();
      for (size_t c = 0; c < 3; ++c) EXPECT_NEAR(image->pixels[3 * 40 + c], rgb[c], 3) << space << " " << c;
    }
  }
}

TEST(JpegCodec, APictureOverTheLimitIsRefused) {
  auto status = Decode(Jpeg(Gradient(100, 100)), {.max_bytes = 1 << 20, .max_pixels = 9999}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("100×100 is over the limit of 9999 pixels"));
}

// A picture of 3 × 2 whose pixels are numbered 0 to 5, as it is seen; the order is that of Pillow's
// exif_transpose.
TEST(TurnUpright, EachOrientationAsPillowHasIt) {
  const std::vector<std::pair<int, std::vector<int>>> seen = {
      {1, {0, 1, 2, 3, 4, 5}}, {2, {2, 1, 0, 5, 4, 3}}, {3, {5, 4, 3, 2, 1, 0}}, {4, {3, 4, 5, 0, 1, 2}},
      {5, {0, 3, 1, 4, 2, 5}}, {6, {3, 0, 4, 1, 5, 2}}, {7, {5, 2, 4, 1, 3, 0}}, {8, {2, 5, 1, 4, 0, 3}}};
  for (const auto& [orientation, order] : seen) {
    RgbImage image{3, 2, {}};
    for (uint8_t i = 0; i < 6; ++i) image.pixels.insert(image.pixels.end(), 3, i);
    const RgbImage out = TurnUpright(image, orientation);
    EXPECT_EQ(out.width, orientation < 5 ? 3 : 2) << orientation;
    std::vector<int> got;
    for (size_t i = 0; i < 6; ++i) got.push_back(out.pixels[3 * i]);
    EXPECT_EQ(got, order) << orientation;
  }
}

TEST(ImageCodec, AnAlphaThatIsUsedIsTheMask) {
  const uint8_t pixels[] = {10, 20, 30, 0, 40, 50, 60, 128, 70, 80, 90, 255};
  const std::string file = PngOfFormat(PNG_FORMAT_RGBA, 3, 1, pixels);
  auto mask = DecodeImage(file, kLimits, "params.mask_image.data", AlphaUse::kMask);
  ASSERT_TRUE(mask.ok()) << mask.status();
  EXPECT_EQ(mask->pixels, (std::vector<uint8_t>{0, 0, 0, 128, 128, 128, 255, 255, 255}));
  const uint8_t opaque[] = {10, 20, 30, 255, 40, 50, 60, 255};
  mask = DecodeImage(PngOfFormat(PNG_FORMAT_RGBA, 2, 1, opaque), kLimits, "m", AlphaUse::kMask);
  EXPECT_EQ(mask->pixels, (std::vector<uint8_t>{10, 20, 30, 40, 50, 60}));
}

TEST(ImageCodec, AFileOverTheByteLimitIsNotLookedAt) {
  auto status = Decode(std::string(100, 'x'), {.max_bytes = 99, .max_pixels = 1}).status();
  EXPECT_EQ(status.message(), "params.init_image.data: a file of 100 bytes is over the limit of 99");
}

TEST(ImageCodec, OtherFilesAreRefused) {
  EXPECT_THAT(std::string(Decode("").status().message()), HasSubstr("is empty"));
  EXPECT_THAT(std::string(Decode("GIF89a").status().message()), HasSubstr("broken GIF"));
  EXPECT_FALSE(Decode("\xff\xd8\xff").ok());
  EXPECT_FALSE(Decode("\x89PNG\r\n\x1a\n").ok());
}

TEST(ImageCodec, PixelsThatAreNotTheSizeAreRefused) {
  EXPECT_EQ(ErrorReason(EncodePng(std::vector<uint8_t>(5), 2, 1).status()), "INVALID_IMAGE");
  EXPECT_EQ(ErrorReason(EncodePng({}, 0, 0).status()), "INVALID_IMAGE");
  EXPECT_EQ(ErrorReason(EncodeJpeg(std::vector<uint8_t>(3), -1, -1, 90).status()), "INVALID_IMAGE");
}

TEST(ShrinkTo, AveragesAndKeepsTheShape) {
  const RgbImage image{4, 2, {0, 0, 0, 10, 10, 10, 20, 20, 20, 30, 30, 30,  //
                              0, 0, 0, 10, 10, 10, 20, 20, 20, 30, 30, 30}};
  const RgbImage small = ShrinkTo(image, 2);
  EXPECT_EQ(small.width, 2);
  EXPECT_EQ(small.height, 1);
  EXPECT_EQ(small.pixels, (std::vector<uint8_t>{5, 5, 5, 25, 25, 25}));
}

TEST(ShrinkTo, NeverEnlarges) { EXPECT_EQ(ShrinkTo(Gradient(4, 4), 100).width, 4); }

// What is promised for a file is enough, whatever is in the picture.
TEST(EncodePng, NoiseIsNoLargerThanWhatIsPromisedForIt) {
  std::mt19937 random(3);
  for (const auto& [width, height] :
       {std::pair{1, 1}, {64, 64}, {1, 777}, {777, 1}, {500, 333}, {1024, 768}}) {
    std::vector<uint8_t> pixels(static_cast<size_t>(3 * width * height));
    for (uint8_t& value : pixels) value = static_cast<uint8_t>(random());
    const auto png = EncodePng(pixels, width, height);
    ASSERT_TRUE(png.ok()) << png.status();
    EXPECT_LE(static_cast<int64_t>(png->size()), MaxFileBytes(width, height)) << width << " x " << height;
    EXPECT_GE(static_cast<int64_t>(png->size()), 3 * width * height);  // noise it is
    const auto jpeg = EncodeJpeg(pixels, width, height, 95);
    ASSERT_TRUE(jpeg.ok()) << jpeg.status();
    EXPECT_LE(static_cast<int64_t>(jpeg->size()), MaxFileBytes(width, height)) << width << " x " << height;
    const auto webp = EncodeWebp(pixels, width, height, 95);
    ASSERT_TRUE(webp.ok()) << webp.status();
    EXPECT_LE(static_cast<int64_t>(webp->size()), MaxFileBytes(width, height)) << width << " x " << height;
  }
}

}  // namespace
}  // namespace latentd
