#include "cache/base/utf8.h"

#include <vector>

#include "gtest/gtest.h"

namespace latentd {
namespace {

TEST(Utf8, CharactersAreTakenOffOneByOne) {
  absl::string_view text = "a\u00e9\u20ac\U0001F600";
  std::vector<int32_t> codes;
  while (!text.empty()) codes.push_back(TakeCharacter(text));
  EXPECT_EQ(codes, (std::vector<int32_t>{'a', 0xE9, 0x20AC, 0x1F600}));
}

TEST(Utf8, InvalidBytesAreReplacedEachByItself) {
  EXPECT_EQ(ValidUtf8("a\xff\xc3"), "a\ufffd\ufffd");
  EXPECT_EQ(ValidUtf8("\xed\xa0\x80"), "\ufffd\ufffd\ufffd");            // a surrogate
  EXPECT_EQ(ValidUtf8("\xc0\xaf"), "\ufffd\ufffd");                      // overlong
  EXPECT_EQ(ValidUtf8("\xe0\x80\xaf"), "\ufffd\ufffd\ufffd");            // overlong
  EXPECT_EQ(ValidUtf8("\xf4\x90\x80\x80"), "\ufffd\ufffd\ufffd\ufffd");  // beyond U+10FFFF
  EXPECT_EQ(ValidUtf8(absl::string_view("a\0b", 3)), std::string("a\0b", 3));
}

TEST(Utf8, TextIsCutBetweenCharacters) {
  const std::string text = "a\u00e9\u20ac\U0001F600";  // 1, 2, 3, 4 bytes
  for (size_t most = 0; most <= text.size() + 1; ++most) {
    const absl::string_view cut = CutUtf8(text, most);
    EXPECT_LE(cut.size(), most);
    EXPECT_EQ(ValidUtf8(cut), cut) << most;
    EXPECT_TRUE(cut.size() + 4 > most || cut == text) << most;
  }
  EXPECT_EQ(CutUtf8(std::string(100, '\x80'), 50).size(), 47u);
}

TEST(Utf8, WhatMovesACursorOrHidesOrTurnsTextIsUnsafe) {
  for (const int32_t code :
       {-1,     0x00,   0x1B,   0x7F,   0x80,   0x9B,   0x9D,   0x9F,   0xAD,   0x61C,   0x200B,
        0x200E, 0x2028, 0x202A, 0x202E, 0x2060, 0x2066, 0x2069, 0xFEFF, 0xFFFE, 0x1FFFF, 0xE0041}) {
    EXPECT_TRUE(IsUnsafeToShow(code)) << code;
  }
  for (const int32_t code : {0x20, 0x7E, 0xA0, 0xE9, 0x5D0, 0x627, 0x20AC, 0x3042, 0xFFFD, 0x1F600}) {
    EXPECT_FALSE(IsUnsafeToShow(code)) << code;
  }
}

TEST(Utf8, WhatIsUnsafeIsEscapedAsInJson) {
  EXPECT_EQ(EscapeUnsafe("a\nb\tc\x1b[1m\x7f \u009b\u202e\U000e0041\xff é\u20ac\U0001F600"),
            "a\\nb\\tc\\x1b[1m\\u007f \\u009b\\u202e\\udb40\\udc41\\xff é\u20ac\U0001F600");
}

}  // namespace
}  // namespace latentd
