#include "server/runtime/machine_memory.h"

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

TEST(DefaultRamCap, FollowsTheMachineAndItsGpus) {
  const struct {
    int64_t ram;
    std::vector<int64_t> gpus;
    int64_t cap;
    const char* rule;
  } rows[] = {
      {64, {}, 30, "half"},        {128, {}, 32, "32 GiB without"}, {8, {}, 4, "at least"},
      {64, {24}, 21, "GPUs hold"}, {64, {24, 24}, 30, "half"},      {512, {80, 80}, 154, "GPUs hold"},
      {64, {2}, 4, "at least"},    {16, {24}, 6, "half"},           {5, {24}, 3, "three quarters"},
  };
  for (const auto& row : rows) {
    std::vector<int64_t> gpus;
    for (int64_t gpu : row.gpus) gpus.push_back(gpu * kGiB);
    const RamCap cap = DefaultRamCap(row.ram * kGiB, gpus);
    EXPECT_EQ(cap.bytes / kGiB, row.cap) << row.ram;
    EXPECT_THAT(cap.rule, ::testing::HasSubstr(row.rule)) << row.ram;
  }
}

}  // namespace
}  // namespace latentd
