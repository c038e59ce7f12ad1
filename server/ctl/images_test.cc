#include "server/ctl/images.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cache/base/error.h"
#include "cache/base/sha256.h"

namespace latentd::ctl {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

v1::JobEvent Header(int index, const std::string& data) {
  v1::JobEvent event;
  event.mutable_image_header()->set_index(index);
  event.mutable_image_header()->set_size(static_cast<int64_t>(data.size()));
  event.mutable_image_header()->set_sha256(Sha256Hex(data));
  return event;
}

v1::JobEvent Chunk(int index, int64_t offset, const std::string& data) {
  v1::JobEvent event;
  event.mutable_image_chunk()->set_index(index);
  event.mutable_image_chunk()->set_offset(offset);
  event.mutable_image_chunk()->set_data(data);
  return event;
}

TEST(CtlImages, ChunksMakeUpTheFile) {
  ImageReceiver receiver;
  EXPECT_FALSE(receiver.OnEvent(Header(0, "abcdef"))->has_value());
  EXPECT_FALSE(receiver.OnEvent(Chunk(0, 0, "abc"))->has_value());
  auto image = receiver.OnEvent(Chunk(0, 3, "def"));
  ASSERT_TRUE(image.ok() && image->has_value());
  EXPECT_EQ((*image)->data, "abcdef");
  EXPECT_TRUE(receiver.Finish().ok());
}

TEST(CtlImages, AWrongChecksumIsDamage) {
  ImageReceiver receiver;
  ASSERT_TRUE(receiver.OnEvent(Header(0, "abc")).ok());
  EXPECT_EQ(ErrorReason(receiver.OnEvent(Chunk(0, 0, "abd")).status()), "DAMAGED_DATA");
}

TEST(CtlImages, ChunksOutOfPlaceAreDamage) {
  for (const auto& chunk : {Chunk(0, 1, "a"), Chunk(1, 0, "a"), Chunk(0, 0, "abcd"), Chunk(0, 0, "")}) {
    ImageReceiver receiver;
    ASSERT_TRUE(receiver.OnEvent(Header(0, "abc")).ok());
    EXPECT_EQ(ErrorReason(receiver.OnEvent(chunk).status()), "DAMAGED_DATA") << chunk.ShortDebugString();
  }
}

TEST(CtlImages, AFileThatDoesNotEndIsDamage) {
  ImageReceiver receiver;
  ASSERT_TRUE(receiver.OnEvent(Header(0, "abc")).ok());
  ASSERT_TRUE(receiver.OnEvent(Chunk(0, 0, "ab")).ok());
  EXPECT_EQ(ErrorReason(receiver.Finish()), "DAMAGED_DATA");
  EXPECT_EQ(ErrorReason(receiver.OnEvent(Header(1, "abc")).status()), "DAMAGED_DATA");
}

TEST(CtlImages, TwoPixelsMakeOneCharacter) {
  const RgbImage image{1, 3, {1, 2, 3, 4, 5, 6, 7, 8, 9}};
  EXPECT_THAT(DrawHalfBlocks(image, 80, 24),
              ElementsAre("\x1b[38;2;1;2;3m\x1b[48;2;4;5;6m▀\x1b[0m", "\x1b[38;2;7;8;9m▀\x1b[0m"));
}

TEST(CtlImages, APictureFitsIntoTheTerminal) {
  const RgbImage wide{200, 100, std::vector<uint8_t>(200 * 100 * 3)};
  EXPECT_THAT(DrawHalfBlocks(wide, 80, 24), SizeIs(20));
  const RgbImage high{100, 200, std::vector<uint8_t>(200 * 100 * 3)};
  EXPECT_THAT(DrawHalfBlocks(high, 80, 24), SizeIs(24));
}

TEST(CtlImages, ASmallPictureIsEnlargedByAWholeNumber) {
  const RgbImage image{2, 1, {1, 1, 1, 2, 2, 2}};
  const RgbImage large = EnlargeToFit(image, 5, 24);
  EXPECT_EQ(large.width, 4);
  EXPECT_EQ(large.height, 2);
  EXPECT_EQ(large.pixels, (std::vector<uint8_t>{1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2,  //
                                                1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2}));
}

}  // namespace
}  // namespace latentd::ctl
