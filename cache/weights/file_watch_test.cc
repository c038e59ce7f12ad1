#include "cache/weights/file_watch.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace latentd {
namespace {

using Seen = FileWatch::Seen;

class FileWatchTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "/watch_" + std::to_string(getpid());
    std::ofstream(path_) << "x";
  }
  void TearDown() override { std::filesystem::remove(path_); }

  std::unique_ptr<FileWatch> Watch() const {
    const int fd = open(path_.c_str(), O_RDONLY);
    auto watch = FileWatch::Create(fd);
    close(fd);
    return watch;
  }
  void Append() const { std::ofstream(path_, std::ios::app) << "y"; }

  std::string path_;
};

TEST_F(FileWatchTest, SeesWritesAndNothingElse) {
  const auto watch = Watch();
  ASSERT_NE(watch, nullptr);
  EXPECT_EQ(watch->seen(), Seen::kNothing);
  chmod(path_.c_str(), 0600);
  std::ifstream(path_).get();
  EXPECT_EQ(watch->seen(), Seen::kNothing);
  Append();
  EXPECT_EQ(watch->seen(), Seen::kWrites);
  EXPECT_EQ(watch->seen(), Seen::kWrites);
}

TEST_F(FileWatchTest, AWatchSeesWhatComesAfterItAlone) {
  const auto first = Watch();
  Append();
  const auto second = Watch();
  EXPECT_EQ(first->seen(), Seen::kWrites);
  EXPECT_EQ(second->seen(), Seen::kNothing);
  Append();
  EXPECT_EQ(second->seen(), Seen::kWrites);
}

TEST_F(FileWatchTest, OneOfTwoWatchesOfAFileMayEnd) {
  auto first = Watch();
  const auto second = Watch();
  first.reset();
  EXPECT_EQ(second->seen(), Seen::kNothing);
  Append();
  EXPECT_EQ(second->seen(), Seen::kWrites);
}

// The kernel ends a watch with its file.
TEST_F(FileWatchTest, AWatchWhoseFileIsNoMoreKnowsNothing) {
  const auto watch = Watch();
  std::filesystem::remove(path_);
  EXPECT_EQ(watch->seen(), Seen::kUnknown);
}

TEST_F(FileWatchTest, ManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const auto watch = Watch();
        ASSERT_NE(watch, nullptr);
        Append();
        EXPECT_EQ(watch->seen(), Seen::kWrites);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace latentd
