#include "families/config/json_config.h"

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

JsonConfig Parse(absl::string_view text) { return *JsonConfig::Parse(text, "test.json"); }

TEST(JsonConfigTest, AbsentAndNullKeysTakeTheDefault) {
  JsonConfig json = Parse(R"({"a": null, "b": 3, "c": 2.5, "d": true, "e": "x", "f": [1, 2]})");
  EXPECT_EQ(json.Int("a", 7, 0, 10), 7);
  EXPECT_EQ(json.Int("b", 7, 0, 10), 3);
  EXPECT_EQ(json.Double("b", 7, 0, 10), 3.0);
  EXPECT_EQ(json.Double("c", 7, 0, 10), 2.5);
  EXPECT_TRUE(json.Bool("d", false));
  EXPECT_EQ(json.String("e", ""), "x");
  EXPECT_THAT(json.Ints("f", {}, 0, 10), ElementsAre(1, 2));
  EXPECT_FALSE(json.Has("a"));
  EXPECT_TRUE(json.Has("b"));
  EXPECT_TRUE(json.status().ok());
}

TEST(JsonConfigTest, NumbersThatOnlyPythonHasAreNull) {
  JsonConfig json =
      Parse(R"({"a": -Infinity, "b": [Infinity, 1], "c": NaN, "d": "a \"NaN\", Infinity", "e": -2})");
  EXPECT_FALSE(json.Has("a"));
  EXPECT_EQ(json.Double("a", 7, 0, 10), 7);
  EXPECT_FALSE(json.Has("c"));
  EXPECT_EQ(json.String("d", ""), "a \"NaN\", Infinity");
  EXPECT_EQ(json.Int("e", 0, -9, 9), -2);
  EXPECT_TRUE(json.status().ok());
  EXPECT_FALSE(JsonConfig::Parse(R"({"a": Infinite})", "test.json").ok());
}

TEST(JsonConfigTest, TheFirstErrorIsKeptAndNamesTheFileAndTheKey) {
  JsonConfig json = Parse(R"({"a": 11, "b": "text"})");
  EXPECT_EQ(json.Int("a", 7, 0, 10), 7);
  EXPECT_EQ(json.Int("b", 7, 0, 10), 7);
  EXPECT_EQ(ErrorReason(json.status()), "UNSUPPORTED_MODEL");
  EXPECT_THAT(std::string(json.status().message()), HasSubstr("test.json: a = 11"));
}

TEST(JsonConfigTest, WrongTypesAreCorruption) {
  for (const char* text : {R"({"a": "1"})", R"({"a": 1.5})", R"({"a": [1]})", R"({"a": true})"}) {
    JsonConfig json = Parse(text);
    json.Int("a", 0, 0, 10);
    EXPECT_EQ(ErrorReason(json.status()), "CORRUPT_FILE") << text;
  }
}

TEST(JsonConfigTest, HugeIntegersAreOutOfRangeNotWrappedAround) {
  JsonConfig json = Parse(R"({"a": 18446744073709551615})");
  EXPECT_EQ(json.Int("a", 7, -100, 100), 7);
  EXPECT_EQ(ErrorReason(json.status()), "UNSUPPORTED_MODEL");
}

TEST(JsonConfigTest, IntegersBeyondSignedOnesAreNoneInListsAndMapsEither) {
  JsonConfig json = Parse(R"({"a": [18446744073709551615]})");
  EXPECT_THAT(json.Ints("a", {7}, -100, 100), ElementsAre(7));
  EXPECT_EQ(ErrorReason(json.status()), "UNSUPPORTED_MODEL");
  JsonConfig map = Parse(R"({"a": {"k": 18446744073709551615}})");
  EXPECT_TRUE(map.IntMap("a").empty());
  EXPECT_EQ(ErrorReason(map.status()), "CORRUPT_FILE");
}

TEST(JsonConfigTest, AMessageShowsTheBeginningOfALongValue) {
  std::string text = "{\"a\": [1";
  for (int i = 0; i < 10'000; ++i) text += ",1";
  JsonConfig json = Parse(text + "]}");
  json.IntOrInts("a", 0, 2, 0, 10);
  EXPECT_EQ(ErrorReason(json.status()), "UNSUPPORTED_MODEL");
  EXPECT_LT(json.status().message().size(), 1000u);
}

TEST(JsonConfigTest, WhatIsNoObjectIsRefused) {
  for (const std::string& text :
       {std::string(""), std::string("[1]"), std::string("{\"a\": "), std::string("nul"), std::string("{}}"),
        "{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}"}) {
    EXPECT_EQ(ErrorReason(JsonConfig::Parse(text, "t").status()), "CORRUPT_FILE") << text;
  }
}

TEST(JsonConfigTest, TokensAndPairsComeInTwoSpellings) {
  JsonConfig json = Parse(R"({"a": "x", "b": {"content": "y"}, "m": ["p q", ["r", "s t"]], "v": {"k": 4}})");
  EXPECT_EQ(json.Token("a", ""), "x");
  EXPECT_EQ(json.Token("b", ""), "y");
  EXPECT_THAT(json.StringPairs("m"), ElementsAre(Pair("p", "q"), Pair("r", "s t")));
  EXPECT_THAT(json.IntMap("v"), ElementsAre(Pair("k", 4)));
  EXPECT_TRUE(json.status().ok());
}

TEST(JsonConfigTest, NestedNumbersAreReadRowByRow) {
  JsonConfig json = Parse(R"({"m": [[1, 2], [3, 4.5]], "bad": [["x"]]})");
  EXPECT_THAT(json.Doubles("m"), ElementsAre(1, 2, 3, 4.5));
  json.Doubles("bad");
  EXPECT_EQ(ErrorReason(json.status()), "CORRUPT_FILE");
}

TEST(JsonConfigTest, AMissingFileIsNotFoundAndShowsNoFullPath) {
  const absl::Status status = JsonConfig::Load("/no/such/folder/config.json").status();
  EXPECT_EQ(ErrorReason(status), "MISSING_FILE");
  EXPECT_THAT(std::string(status.message()), HasSubstr("folder/config.json"));
  EXPECT_THAT(std::string(status.message()), testing::Not(HasSubstr("/no/such")));
}

TEST(JsonConfigTest, AFolderIsNoFile) { EXPECT_FALSE(JsonConfig::Load("/tmp").ok()); }

}  // namespace
}  // namespace latentd
