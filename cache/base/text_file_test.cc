#include "cache/base/text_file.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class TextFileTest : public testing::Test {
 protected:
  TextFileTest() : folder_(absl::StrCat(testing::TempDir(), "/text_file_test.", getpid())) {
    std::filesystem::create_directories(folder_);
  }
  ~TextFileTest() override { std::filesystem::remove_all(folder_); }
  std::string Path(const std::string& name) const { return absl::StrCat(folder_, "/", name); }

  const std::string folder_;
};

TEST_F(TextFileTest, IsReadWhole) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{4096}, size_t{3'000'000}}) {
    const std::string text(size, 'x');
    std::ofstream(Path("a")) << text;
    EXPECT_EQ(*ReadTextFile(Path("a"), 3'000'000), text);
  }
}

TEST_F(TextFileTest, ALinkIsFollowed) {
  std::ofstream(Path("a")) << "text";
  std::filesystem::create_symlink("a", Path("b"));
  EXPECT_EQ(*ReadTextFile(Path("b"), 100), "text");
}

TEST_F(TextFileTest, OneThatIsTooLargeIsRefusedWithoutBeingRead) {
  std::ofstream(Path("a")) << "12345";
  EXPECT_TRUE(ReadTextFile(Path("a"), 5).ok());
  EXPECT_EQ(ErrorReason(ReadTextFile(Path("a"), 4).status()), "CORRUPT_FILE");
  ASSERT_EQ(truncate(Path("a").c_str(), int64_t{1} << 40), 0);  // sparse; more than any memory
  EXPECT_EQ(ErrorReason(ReadTextFile(Path("a"), 1000).status()), "CORRUPT_FILE");
}

// Each of these would hang, or read without end, where it is opened and read like a file.
TEST_F(TextFileTest, WhatIsNoFileIsAnErrorAtOnce) {
  ASSERT_EQ(mkfifo(Path("fifo").c_str(), 0600), 0);
  std::filesystem::create_directory(Path("folder"));
  std::filesystem::create_symlink("/dev/zero", Path("device"));
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, Path("socket").c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  for (const char* name : {"fifo", "folder", "device", "socket"}) {
    const absl::Status status = ReadTextFile(Path(name), 1000).status();
    EXPECT_EQ(ErrorReason(status), "CORRUPT_FILE") << name;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no regular file"));
  }
  close(fd);
}

TEST_F(TextFileTest, AMissingOneIsNotFoundAndShowsNoFullPath) {
  std::filesystem::create_symlink("itself", Path("itself"));
  for (const char* name : {"none", "none/none", "itself"}) {
    const absl::Status status = ReadTextFile(Path(name), 100).status();
    EXPECT_EQ(ErrorReason(status), "MISSING_FILE") << name;
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr(testing::TempDir())));
  }
}

TEST_F(TextFileTest, IsReplacedWhole) {
  ASSERT_EQ(mkfifo(Path("a.new").c_str(), 0600), 0);  // left there by somebody
  for (const std::string text : {"one", "", "three"}) {
    EXPECT_TRUE(ReplaceTextFile(Path("a"), text).ok());
    EXPECT_EQ(*ReadTextFile(Path("a"), 100), text);
  }
  EXPECT_FALSE(std::filesystem::exists(Path("a.new")));
}

TEST_F(TextFileTest, WhatCannotBeReplacedStays) {
  std::filesystem::create_directories(Path("folder/x"));
  EXPECT_EQ(ErrorReason(ReplaceTextFile(Path("folder"), "text")), "WRITE_FAILED");
  EXPECT_FALSE(std::filesystem::exists(Path("folder.new")));
  EXPECT_TRUE(std::filesystem::exists(Path("folder/x")));
  EXPECT_EQ(ErrorReason(ReplaceTextFile(Path("none/a"), "text")), "WRITE_FAILED");
  std::filesystem::create_directories(Path("b.new"));
  EXPECT_EQ(ErrorReason(ReplaceTextFile(Path("b"), "text")), "WRITE_FAILED");
}

}  // namespace
}  // namespace latentd
