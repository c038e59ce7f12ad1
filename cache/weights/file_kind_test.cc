#include "cache/weights/file_kind.h"

#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using std::string_literals::operator""s;
using testing::HasSubstr;

TEST(FileKindTest, WhatIsNoWeightsIsToldByItsFirstBytes) {
  const std::pair<std::string, FileKind> files[] = {
      {"", FileKind::kEmpty},
      {"PK\x03\x04\x14"s, FileKind::kPickle},
      {"\x80\x02}q\x00"s, FileKind::kPickle},
      {"\x80\x04\x95"s, FileKind::kPickle},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n", FileKind::kLfsPointer},
      {"<!DOCTYPE html><html>", FileKind::kWebPage},
      {"\n  <html lang=\"en\">", FileKind::kWebPage},
      {"\xef\xbb\xbf<HTML>", FileKind::kWebPage},
      {"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>", FileKind::kWebPage},
      {"{\"error\": \"gated\"}", FileKind::kJson},
      {"{}", FileKind::kJson},
      {"\x1f\x8b\x08\x00"s, FileKind::kArchive},
      {"7z\xbc\xaf\x27\x1c\x00"s, FileKind::kArchive},
      {"GGUF\x03\x00"s, FileKind::kGguf},
      {std::string(5000, 0), FileKind::kPartial},
      // Safetensors: eight bytes of length, and a header.
      {"\x40\x00\x00\x00\x00\x00\x00\x00{\"__metadata__\""s, FileKind::kUnknown},
      {"{\x00\x00\x00\x00\x00\x00\x00{\"a\""s, FileKind::kUnknown},
      {"<\x00\x00\x00\x00\x00\x00\x00{\"a\""s, FileKind::kUnknown},
  };
  for (const auto& [start, kind] : files) EXPECT_EQ(RecogniseFile(start), kind) << start.substr(0, 30);
}

TEST(FileKindTest, TheErrorSaysWhatItIsAndWhatToDo) {
  struct Row {
    std::string start, reason, says;
  };
  const Row rows[] = {
      {"", "CORRUPT_FILE", "is empty"},
      {"PK\x03\x04"s, "UNSAFE_FILE", "convert it to safetensors"},
      {"version https://git-lfs.github.com/spec/v1\n", "CORRUPT_FILE", "git lfs pull"},
      {"<html>", "CORRUPT_FILE", "web page"},
      {"{\"error\":1}", "CORRUPT_FILE", "JSON"},
      {"\x1f\x8b"s, "CORRUPT_FILE", "unpack"},
      {"GGUF", "UNSUPPORTED_FILE", "GGUF"},
      {std::string(16, 0), "CORRUPT_FILE", "zeros"},
  };
  for (const Row& row : rows) {
    const absl::Status status = CheckFileKind("x.safetensors", row.start);
    EXPECT_EQ(ErrorReason(status), row.reason) << row.says;
    EXPECT_THAT(std::string(status.message()), HasSubstr("x.safetensors "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(row.says));
    EXPECT_EQ(GetErrorDetails(status)["file"], "x.safetensors");
  }
  EXPECT_TRUE(CheckFileKind("x.safetensors", "\x40\x00\x00\x00\x00\x00\x00\x00{\""s).ok());
}

}  // namespace
}  // namespace latentd
