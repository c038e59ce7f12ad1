#include "cache/device.h"

#include "cache/error.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

TEST(Device, SpecsNameDevices) {
  RamBudget ram(100);
  EXPECT_EQ(&(*MakeDevice("cpu", &ram))->budget(), &ram);
  auto sim = *MakeDevice("sim:3=2MiB", &ram);
  EXPECT_EQ(sim->name(), "sim:3");
  EXPECT_EQ(sim->budget().stats().cap_bytes, 2 << 20);
  for (const char* bad : {"", "sim", "sim:0", "sim:=1GiB", "sim:-1=1GiB", "sim:0=much", "gpu"}) {
    EXPECT_EQ(MakeDevice(bad, &ram).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_EQ(MakeDevice("cuda:0", &ram).status().code(), absl::StatusCode::kUnimplemented);
}

TEST(Device, SizesHaveUnits) {
  EXPECT_EQ(*ParseBytes("123"), 123);
  EXPECT_EQ(*ParseBytes("1.5GiB"), 1610612736);
  EXPECT_EQ(*ParseBytes("2 MB"), 2'000'000);
  for (const char* bad : {"", "GiB", "1XB", "-1", "99999999999TiB"}) EXPECT_FALSE(ParseBytes(bad).ok()) << bad;
}

TEST(SimDevice, CountsWhatItGaveAndFailsWhenTold) {
  SimDevice sim("sim:0", 1000);
  {
    auto memory = *sim.Allocate(100);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % 64, 0u);
    EXPECT_EQ(sim.allocated_bytes(), 100);
  }
  EXPECT_EQ(sim.allocated_bytes(), 0);
  sim.FailAllocation(2);
  EXPECT_TRUE(sim.Allocate(1).ok());
  EXPECT_EQ(ErrorReason(sim.Allocate(1).status()), "DEVICE_OUT_OF_MEMORY");
  EXPECT_TRUE(sim.Allocate(1).ok());
  char from = 7, to = 0;
  sim.FailCopy(1);
  EXPECT_EQ(ErrorReason(sim.CopyIn(&to, &from, 1)), "COPY_FAILED");
  EXPECT_TRUE(sim.CopyIn(&to, &from, 1).ok());
  EXPECT_EQ(to, 7);
  sim.Lose();
  EXPECT_EQ(ErrorReason(sim.Allocate(1).status()), "DEVICE_LOST");
  EXPECT_EQ(ErrorReason(sim.CopyIn(&to, &from, 1)), "DEVICE_LOST");
}

}  // namespace
}  // namespace latentd
