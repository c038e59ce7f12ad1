#include "cache/weights/shard_index.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

class ShardIndexTest : public testing::Test {
 protected:
  ShardIndexTest() : path_(absl::StrCat(testing::TempDir(), "/shard_index_test.", getpid(), ".json")) {}
  ~ShardIndexTest() override { std::filesystem::remove(path_); }
  absl::StatusOr<std::vector<std::string>> Read(const std::string& text) {
    std::ofstream(path_) << text;
    return ReadShardIndex(path_);
  }

  const std::string path_;
};

TEST_F(ShardIndexTest, NamesEachFileOnce) {
  EXPECT_THAT(
      *Read(
          R"({"metadata": {}, "weight_map": {"b": "2.safetensors", "a": "1.safetensors", "c": "1.safetensors"}})"),
      testing::ElementsAre("1.safetensors", "2.safetensors"));
}

TEST_F(ShardIndexTest, WhatIsNoIndexIsCorrupt) {
  for (const char* text :
       {"", "[]", "3", "null", "\"weight_map\"", "{}", R"({"weight_map": []})", R"({"weight_map": {}})",
        R"({"weight_map": {"a": 1}})", R"({"weight_map": {"a": "../1.safetensors"}})",
        R"({"weight_map": {"a": ".1.safetensors"}})", R"({"weight_map": {"a": "1.bin"}})",
        R"({"weight_map": {"a": "1.safetensors\u0000.safetensors"}})"}) {
    EXPECT_EQ(ErrorReason(Read(text).status()), "CORRUPT_FILE") << text;
  }
}

TEST_F(ShardIndexTest, WhatIsNoFileDoesNotHang) {
  EXPECT_EQ(ErrorReason(ReadShardIndex(path_).status()), "MISSING_FILE");
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_EQ(ErrorReason(ReadShardIndex(path_).status()), "CORRUPT_FILE");
}

}  // namespace
}  // namespace latentd
