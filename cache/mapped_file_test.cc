#include "cache/mapped_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "cache/error.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

class MappedFileTest : public testing::Test {
 protected:
  void SetUp() override {
    folder = testing::TempDir() + "/mapped_" + std::to_string(getpid());
    std::filesystem::create_directories(folder);
    path = folder + "/weights";
    std::ofstream(path) << std::string(1 << 16, 'x');
  }
  void TearDown() override { std::filesystem::remove_all(folder); }
  std::string folder, path;
};

TEST_F(MappedFileTest, AFileThatIsCutShortIsMarkedAndTheProcessLives) {
  auto file = *MappedFile::Open(path);
  EXPECT_EQ(file->data()[0], 'x');
  ASSERT_EQ(truncate(path.c_str(), 0), 0);
  volatile uint8_t byte = file->data()[40'000];
  EXPECT_EQ(byte, 0);
  EXPECT_TRUE(file->truncated());
}

TEST_F(MappedFileTest, AnotherMappingIsNotBlamed) {
  std::ofstream(folder + "/other") << std::string(1 << 16, 'y');
  auto file = *MappedFile::Open(path);
  auto other = *MappedFile::Open(folder + "/other");
  ASSERT_EQ(truncate(path.c_str(), 0), 0);
  volatile uint8_t byte = file->data()[5000];
  (void)byte;
  EXPECT_TRUE(file->truncated());
  EXPECT_FALSE(other->truncated());
}

TEST_F(MappedFileTest, WhatIsNoRegularFileIsRefused) {
  EXPECT_EQ(ErrorReason(MappedFile::Open(folder).status()), "UNSAFE_FILE");
  EXPECT_EQ(ErrorReason(MappedFile::Open("/dev/zero").status()), "UNSAFE_FILE");
  ASSERT_EQ(mkfifo((folder + "/fifo").c_str(), 0600), 0);
  EXPECT_EQ(ErrorReason(MappedFile::Open(folder + "/fifo").status()), "UNSAFE_FILE");
  ASSERT_EQ(symlink(path.c_str(), (folder + "/link").c_str()), 0);
  EXPECT_EQ(ErrorReason(MappedFile::Open(folder + "/link").status()), "UNSAFE_FILE");
  EXPECT_EQ(ErrorReason(MappedFile::Open(folder + "/none").status()), "FILE_NOT_FOUND");
}

TEST_F(MappedFileTest, AReplacedFileHasAnotherIdentity) {
  const std::string before = (*MappedFile::Open(path))->identity();
  std::ofstream(folder + "/new") << std::string(1 << 16, 'z');
  std::filesystem::rename(folder + "/new", path);
  EXPECT_NE((*MappedFile::Open(path))->identity(), before);
}

TEST_F(MappedFileTest, AnEmptyFileHasNoBytes) {
  std::ofstream(path, std::ios::trunc);
  EXPECT_EQ((*MappedFile::Open(path))->size(), 0);
}

}  // namespace
}  // namespace latentd
