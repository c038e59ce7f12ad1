#include "cache/base/bounded_json.h"

#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using ::testing::HasSubstr;

std::string Problem(absl::string_view text, const JsonLimits& limits = {}) {
  const absl::Status status = ParseBoundedJson(text, limits).status();
  EXPECT_EQ(ErrorReason(status), status.ok() ? "" : "CORRUPT_FILE");
  return std::string(status.message());
}

TEST(BoundedJson, IsParsed) {
  EXPECT_EQ(*ParseBoundedJson(R"({"a": [1, "x", null]})"), nlohmann::json({{"a", {1, "x", nullptr}}}));
  EXPECT_EQ(*ParseBoundedJson("3"), 3);
}

TEST(BoundedJson, WhatIsNoneIsRefused) {
  for (const char* text : {"", "{", "[1,]", "{} {}", "nul", "\"\xff\"", "\xef\xbb\xbf", "1e"}) {
    EXPECT_THAT(Problem(text), HasSubstr("no JSON")) << text;
  }
}

// What json.dumps of Python makes of {"a": float("inf"), …}.
TEST(BoundedJson, NumbersThatPythonAloneWritesAreNull) {
  const auto json =
      ParseBoundedJson(R"({"a": -Infinity, "b": [NaN, Infinity, -1], "c": "NaN \" -Infinity"})");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->dump(), R"({"a":null,"b":[null,null,-1],"c":"NaN \" -Infinity"})");
  EXPECT_THAT(Problem("[Nan]"), HasSubstr("no JSON"));
}

TEST(BoundedJson, DepthAndValuesAreBounded) {
  EXPECT_EQ(Problem("[[[]]]", {.max_depth = 3}), "");
  EXPECT_THAT(Problem("[[[[]]]]", {.max_depth = 3}), HasSubstr("deeply"));
  EXPECT_THAT(Problem(std::string(10'000'000, '[')), HasSubstr("deeply"));
  EXPECT_EQ(Problem("[1,[2,3]]", {.max_values = 5}), "");
  EXPECT_THAT(Problem("[1,[2,3,4]]", {.max_values = 5}), HasSubstr("values"));
}

// A parser that looks through what it has built at the end of every object takes hours for this.
TEST(BoundedJson, ManyObjectsInOneTakeNoLongerThanOtherText) {
  std::string text = "{";
  for (int i = 0; i < 300'000; ++i) absl::StrAppend(&text, i > 0 ? "," : "", "\"", i, "\":{}");
  text += "}";
  EXPECT_EQ(ParseBoundedJson(text)->size(), 300'000u);
}

}  // namespace
}  // namespace latentd
