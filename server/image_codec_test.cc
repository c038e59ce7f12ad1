#include "server/image_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <png.h>

#include <cstdlib>
#include <random>

#include "absl/strings/escaping.h"
#include "cache/error.h"

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

TEST(PngCodec, WritesTextsOfAnyLanguage) {
  const RgbImage image = Gradient(8, 8);
  auto file = EncodePng(image.pixels, 8, 8, {{"parameters", "a red circle"}, {"prompt", "ein grüner Kreis"}});
  ASSERT_TRUE(file.ok());
  EXPECT_THAT(*file, HasSubstr(std::string("tEXtparameters\0a red circle", 27)));
  EXPECT_THAT(*file, HasSubstr("ein grüner Kreis"));
  EXPECT_TRUE(Decode(*file).ok());
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

TEST(JpegCodec, APictureOverTheLimitIsRefused) {
  auto status = Decode(Jpeg(Gradient(100, 100)), {.max_bytes = 1 << 20, .max_pixels = 9999}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("100×100 is over the limit of 9999 pixels"));
}

TEST(ImageCodec, AFileOverTheByteLimitIsNotLookedAt) {
  auto status = Decode(std::string(100, 'x'), {.max_bytes = 99, .max_pixels = 1}).status();
  EXPECT_EQ(status.message(), "params.init_image.data: a file of 100 bytes is over the limit of 99");
}

TEST(ImageCodec, OtherFilesAreRefused) {
  EXPECT_THAT(std::string(Decode("").status().message()), HasSubstr("is empty"));
  EXPECT_THAT(std::string(Decode("GIF89a").status().message()), HasSubstr("neither a PNG nor a JPEG"));
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
  }
}

}  // namespace
}  // namespace latentd
