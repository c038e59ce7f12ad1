#include "cache/device.h"

#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "cache/cache_test_util.h"
#include "cache/cuda_plugin.h"
#include "gtest/gtest.h"

// So that an absurd allocation fails under a sanitizer as it does elsewhere, and does not end the process.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace latentd {
namespace {

TEST(Device, SpecsNameDevices) {
  RamBudget ram(100);
  EXPECT_EQ(&(*MakeDevice("cpu", &ram))->budget(), &ram);
  auto sim = *MakeDevice("sim:3=2MiB,bandwidth=1GiB,fail_allocation=0,fail_copy=2,lose_after=9", &ram);
  EXPECT_EQ(sim->name(), "sim:3");
  EXPECT_EQ(sim->index(), 3);
  EXPECT_EQ(sim->kind(), DeviceKind::kSim);
  EXPECT_FALSE(sim->uses_host_memory());
  EXPECT_EQ(sim->budget().stats().cap_bytes, 2 << 20);
  char from = 1, to = 0;
  EXPECT_TRUE(sim->CopyIn(&to, &from, 1).ok());
  EXPECT_EQ(ErrorReason(sim->CopyIn(&to, &from, 1)), "COPY_FAILED");
}

TEST(Device, SpecsThatMakeNoSenseAreRefusedWithTheSpelling) {
  RamBudget ram(100);
  for (const char* bad :
       {"", "sim", "sim:0", "sim:=1GiB", "sim:-1=1GiB", "sim:0=much", "gpu", "sim:0=1GiB,colour=red",
        "sim:0=1GiB,bandwidth=fast", "sim:0=1GiB,fail_copy=x", "sim:0=1GiB,lose_after=-1", "sim:0=1GiB,"}) {
    EXPECT_EQ(MakeDevice(bad, &ram).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(Device, CudaSpecsAreReadAndADeviceThatIsNotThereIsAnError) {
  RamBudget ram(100);
  for (const char* bad : {"cuda:", "cuda:x", "cuda:-1", "cuda:0=", "cuda:0=much", "cuda:0=0", "cuda=1GiB",
                          "cuda0", "cuda:GPU-5a=much", "cuda:gpu"}) {
    EXPECT_EQ(MakeDevice(bad, &ram).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  const int count = CudaDeviceCount();
  for (const std::string& spec :
       {std::string("cuda:999"), absl::StrCat("cuda:", count, "=1GiB"), std::string("cuda:GPU-no-such")}) {
    const absl::Status status = MakeDevice(spec, &ram).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << spec;
    EXPECT_EQ(ErrorReason(status), "DEVICE_NOT_FOUND") << spec;
  }
  for (const char* spec : {"cuda", "cuda:0", "cuda:0=1GiB"}) {
    EXPECT_EQ(MakeDevice(spec, &ram).ok(), count > 0) << spec;
  }
}

TEST(Device, SizesHaveUnits) {
  EXPECT_EQ(*ParseBytes("123"), 123);
  EXPECT_EQ(*ParseBytes("1.5GiB"), 1610612736);
  EXPECT_EQ(*ParseBytes("2 MB"), 2'000'000);
  for (const char* bad : {"", "GiB", "1XB", "-1", "99999999999TiB"})
    EXPECT_FALSE(ParseBytes(bad).ok()) << bad;
}

TEST(Device, EveryKindHasAName) {
  std::set<absl::string_view> names;
  for (DeviceKind kind : {DeviceKind::kCpu, DeviceKind::kSim, DeviceKind::kCuda})
    names.insert(DeviceKindName(kind));
  EXPECT_EQ(names, (std::set<absl::string_view>{"cpu", "sim", "cuda"}));
  EXPECT_EQ(DeviceKindName(static_cast<DeviceKind>(99)), "");
}

TEST(CpuDevice, GivesCountedAlignedMemoryAndCopies) {
  RamBudget ram(100);
  CpuDevice cpu(&ram);
  EXPECT_TRUE(cpu.uses_host_memory());
  EXPECT_TRUE(cpu.Check().ok());
  cpu.BindThread();
  cpu.ReleaseUnused();
  {
    auto memory = *cpu.Allocate(65);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % kDeviceAlignment, 0u);
    EXPECT_EQ(cpu.allocated_bytes(), 128);
    auto stream = *cpu.NewCopyStream();
    const char from = 7;
    EXPECT_EQ(*stream->Begin({{memory.get(), &from, 1}}), 1u);
    EXPECT_TRUE(stream->Await(1).ok());
    EXPECT_EQ(*static_cast<char*>(memory.get()), 7);
    FaultInjector::Arm(FaultPoint::kCopy, 1);
    EXPECT_EQ(ErrorReason(stream->Begin({{memory.get(), &from, 1}}).status()), "COPY_FAILED");
    EXPECT_TRUE(FaultInjector::Disarm());
    EXPECT_EQ(ErrorReason(stream->Await(1)), "COPY_FAILED");  // from then on
    EXPECT_EQ(ErrorReason(stream->Begin({}).status()), "COPY_FAILED");
  }
  EXPECT_EQ(cpu.allocated_bytes(), 0);
  FaultInjector::Arm(FaultPoint::kAllocate, 1);
  EXPECT_EQ(ErrorReason(cpu.Allocate(1).status()), "DEVICE_OUT_OF_MEMORY");
  EXPECT_TRUE(FaultInjector::Disarm());
}

TEST(SimDevice, CountsWhatItGaveAndFailsWhenTold) {
  SimDevice sim({.index = 0, .memory_bytes = 1000});
  {
    auto memory = *sim.Allocate(100);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % 64, 0u);
    EXPECT_EQ(sim.allocated_bytes(), 128);
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
  EXPECT_TRUE(sim.Check().ok());
  sim.Lose();
  EXPECT_EQ(ErrorReason(sim.Allocate(1).status()), "DEVICE_LOST");
  EXPECT_EQ(ErrorReason(sim.CopyIn(&to, &from, 1)), "DEVICE_LOST");
  EXPECT_EQ(ErrorReason(sim.NewCopyStream().status()), "DEVICE_LOST");
  EXPECT_EQ(ErrorReason(sim.Check()), "DEVICE_LOST");
}

TEST(SimDevice, WhatAnAllocationOfAnAbsurdSizeGetsIsAnError) {
  SimDevice sim({.index = 0, .memory_bytes = 1000});
  EXPECT_EQ(ErrorReason(sim.Allocate(int64_t{1} << 60).status()), "DEVICE_OUT_OF_MEMORY");
  RamBudget ram(100);
  EXPECT_EQ(ErrorReason(CpuDevice(&ram).Allocate(int64_t{1} << 60).status()), "DEVICE_OUT_OF_MEMORY");
}

TEST(SimDevice, FaultsCanComeFromItsOptions) {
  SimDevice sim({.index = 0, .memory_bytes = 1000, .fail_allocation = 2, .fail_copy = 1});
  EXPECT_TRUE(sim.Allocate(1).ok());
  EXPECT_EQ(ErrorReason(sim.Allocate(1).status()), "DEVICE_OUT_OF_MEMORY");
  char from = 7, to = 0;
  EXPECT_EQ(ErrorReason(sim.CopyIn(&to, &from, 1)), "COPY_FAILED");
  EXPECT_TRUE(sim.CopyIn(&to, &from, 1).ok());
}

TEST(SimDevice, IsLostAtTheNthAllocationOrCopyAndStaysLost) {
  SimDevice sim({.index = 0, .memory_bytes = 1000, .lose_after = 3});
  char from = 7, to = 0;
  EXPECT_TRUE(sim.Allocate(1).ok());
  EXPECT_TRUE(sim.CopyIn(&to, &from, 1).ok());
  EXPECT_TRUE(sim.Check().ok());
  EXPECT_EQ(ErrorReason(sim.Allocate(1).status()), "DEVICE_LOST");
  EXPECT_EQ(ErrorReason(sim.CopyIn(&to, &from, 1)), "DEVICE_LOST");
  EXPECT_EQ(ErrorReason(sim.Check()), "DEVICE_LOST");
}

TEST(SimDevice, ACopyTakesAtLeastTheTimeOfItsBandwidth) {
  SimDevice sim({.index = 0, .memory_bytes = 1 << 20, .bandwidth = 1e6});
  const std::vector<char> from(2000);
  std::vector<char> to(2000);
  const absl::Time start = absl::Now();
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(sim.CopyIn(to.data(), from.data(), 2000).ok());
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(20) - absl::Milliseconds(1));
}

TEST(SimDevice, AllCopiesShareOneBus) {
  SimDevice sim({.index = 0, .memory_bytes = 1 << 20, .bandwidth = 1e6});
  const std::vector<char> from(10'000);
  std::vector<char> to(10'000), to2(10'000);
  const absl::Time start = absl::Now();
  std::thread other([&] { EXPECT_TRUE(sim.CopyIn(to2.data(), from.data(), 10'000).ok()); });
  EXPECT_TRUE(sim.CopyIn(to.data(), from.data(), 10'000).ok());
  other.join();
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(19));
}

TEST(SimDevice, AStreamCopiesInOrderAndNumbersItsCopies) {
  SimDevice sim({.index = 0, .memory_bytes = 1000});
  auto stream = *sim.NewCopyStream();
  const char first[2] = {1, 2}, second = 3;
  char to[2] = {0, 0};
  for (int round = 0; round < 1000; ++round) {
    // Both write to[1]; the later one wins.
    const uint64_t a = *stream->Begin({{&to[0], &first[0], 1}, {&to[1], &first[1], 1}});
    const uint64_t b = *stream->Begin({{&to[1], &second, 1}});
    ASSERT_EQ(a, 2u * round + 1);
    ASSERT_EQ(b, a + 1);
    ASSERT_TRUE(stream->Await(b).ok());
    ASSERT_EQ(to[0], 1);
    ASSERT_EQ(to[1], 3);
    ASSERT_TRUE(stream->Await(a).ok());
  }
}

TEST(SimDevice, AStreamsErrorComesAtTheWaitAndStays) {
  SimDevice sim({.index = 0, .memory_bytes = 1000, .fail_copy = 2});
  auto stream = *sim.NewCopyStream();
  const char from = 1;
  char to = 0;
  EXPECT_TRUE(stream->Await(*stream->Begin({{&to, &from, 1}})).ok());
  const auto second = stream->Begin({{&to, &from, 1}});
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(ErrorReason(stream->Await(*second)), "COPY_FAILED");
  EXPECT_EQ(ErrorReason(stream->Begin({{&to, &from, 1}}).status()), "COPY_FAILED");
  EXPECT_EQ(ErrorReason(stream->Await(1)), "COPY_FAILED");
}

TEST(SimDevice, AStreamsEndWaitsForWhatWasBegun) {
  SimDevice sim({.index = 0, .memory_bytes = 1 << 20, .bandwidth = 1e6});
  const std::vector<char> from(5000, 9);
  std::vector<char> to(5000, 0);
  {
    auto stream = *sim.NewCopyStream();
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream->Begin({{to.data(), from.data(), 5000}}).ok());
  }
  EXPECT_EQ(to, from);
}

TEST(SimDevice, AStreamAndMemoryCanOutliveTheDevice) {
  auto sim = std::make_unique<SimDevice>(SimDevice::Options{.index = 0, .memory_bytes = 1000});
  auto stream = *sim->NewCopyStream();
  auto memory = *sim->Allocate(64);
  sim = nullptr;
  const char from = 5;
  EXPECT_TRUE(stream->Await(*stream->Begin({{memory.get(), &from, 1}})).ok());
  EXPECT_EQ(*static_cast<char*>(memory.get()), 5);
}

TEST(SimDevice, ForeignBytesLowerWhatThereIs) {
  SimDevice sim({.index = 0, .memory_bytes = 1000});
  sim.SetForeignBytes(400);
  EXPECT_EQ(ErrorReason(sim.budget().TryReserve({.bytes = 601, .owner = "a", .what = "test"}).status()),
            "BUDGET_EXHAUSTED");
  auto fits = sim.budget().TryReserve({.bytes = 600, .owner = "a", .what = "test"});
  EXPECT_TRUE(fits.ok());
  std::thread waiter(
      [&] { EXPECT_TRUE(sim.budget().Reserve({.bytes = 300, .owner = "b", .what = "test"}).ok()); });
  WaitUntil([&] { return sim.budget().stats().waiting == 1; });
  sim.SetForeignBytes(0);
  waiter.join();
}

}  // namespace
}  // namespace latentd
