#include "server/machine_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace latentd {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

class MachineMemoryTest : public ::testing::Test {
 protected:
  MachineMemoryTest() : root_(::testing::TempDir() + "/machine_memory") {
    std::filesystem::remove_all(root_);
    Write("proc/meminfo", "MemTotal:       67108864 kB\nMemFree: 1 kB\n");
    Write("proc/self/cgroup", "0::/system.slice/latentd.service\n");
  }
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + "/" + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  const std::string root_;
};

TEST_F(MachineMemoryTest, WithoutCgroupLimitTheRamIsWhatMeminfoSays) {
  EXPECT_EQ(*MachineRamBytes(root_), 64 * kGiB);
}

TEST_F(MachineMemoryTest, AnUnlimitedGroupChangesNothing) {
  Write("sys/fs/cgroup/system.slice/latentd.service/memory.max", "max\n");
  EXPECT_EQ(*MachineRamBytes(root_), 64 * kGiB);
}

TEST_F(MachineMemoryTest, TheGroupsLimitCountsAsTheRam) {
  Write("sys/fs/cgroup/system.slice/latentd.service/memory.max", "17179869184\n");
  EXPECT_EQ(*MachineRamBytes(root_), 16 * kGiB);
}

TEST_F(MachineMemoryTest, ALimitOnAGroupFurtherUpCountsToo) {
  Write("sys/fs/cgroup/system.slice/memory.max", "8589934592\n");
  Write("sys/fs/cgroup/system.slice/latentd.service/memory.max", "17179869184\n");
  EXPECT_EQ(*MachineRamBytes(root_), 8 * kGiB);
}

TEST_F(MachineMemoryTest, InAContainerTheLimitStandsAtTheMountsRoot) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", "4294967296\n");
  EXPECT_EQ(*MachineRamBytes(root_), 4 * kGiB);
}

TEST_F(MachineMemoryTest, WithoutMeminfoItSaysSo) {
  std::filesystem::remove_all(root_);
  EXPECT_EQ(MachineRamBytes(root_).status().code(), absl::StatusCode::kInternal);
}

TEST(DefaultRamCap, IsHalfOfTheRamLessTwoGiB) { EXPECT_EQ(DefaultRamCap(64 * kGiB), 30 * kGiB); }

TEST(DefaultRamCap, IsAtLeastFourGiB) { EXPECT_EQ(DefaultRamCap(8 * kGiB), 4 * kGiB); }

TEST(DefaultRamCap, LeavesAQuarterOfASmallMachineAlone) { EXPECT_EQ(DefaultRamCap(2 * kGiB), 3 * kGiB / 2); }

}  // namespace
}  // namespace latentd
