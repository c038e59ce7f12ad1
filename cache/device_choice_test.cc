#include "cache/device_choice.h"

#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

const CudaGpus kTwo = {{"5a0e1f2c-0000-1111-2222-333344445555", "5b0e1f2c-0000-1111-2222-333344445555"}, ""};
const CudaGpus kNone = {{}, "there is no NVIDIA driver"};

TEST(DeviceChoice, AutoIsEveryGpuInTheDriversOrder) {
  const auto choice = ChooseDevices({"auto"}, kTwo);
  ASSERT_TRUE(choice.ok());
  EXPECT_THAT(choice->specs, ElementsAre("cuda:0", "cuda:1"));
  EXPECT_THAT(choice->reason, AllOf(HasSubstr("auto"), HasSubstr("GPU-5a0e"), HasSubstr("GPU-5b0e")));
}

TEST(DeviceChoice, AutoIsTheCpuWhereThereIsNoGpuAndSaysWhy) {
  const auto choice = ChooseDevices({"auto"}, kNone);
  ASSERT_TRUE(choice.ok());
  EXPECT_THAT(choice->specs, ElementsAre("cpu"));
  EXPECT_THAT(choice->reason, HasSubstr("there is no NVIDIA driver"));
}

TEST(DeviceChoice, NamedDevicesStayWhatTheyAre) {
  const auto choice = ChooseDevices({"cpu", "sim:0=1GiB"}, kTwo);
  ASSERT_TRUE(choice.ok());
  EXPECT_THAT(choice->specs, ElementsAre("cpu", "sim:0=1GiB"));
  EXPECT_TRUE(WantsAutoDevices({"auto"}));
  EXPECT_FALSE(WantsAutoDevices({"cpu", "cuda:0"}));
}

TEST(DeviceChoice, AutoStandsAlone) {
  for (const auto& both : {std::vector<std::string>{"auto", "cpu"}, {"cuda:0", "auto"}, {"auto", "auto"}}) {
    EXPECT_EQ(ChooseDevices(both, kTwo).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(DeviceChoice, AUuidOrItsUniqueBeginningFindsAGpu) {
  EXPECT_EQ(*FindGpu("GPU-5b0e1f2c-0000-1111-2222-333344445555", kTwo), 1);
  EXPECT_EQ(*FindGpu("GPU-5a", kTwo), 0);
  EXPECT_EQ(*FindGpu("gpu-5B", kTwo), 1);
  EXPECT_EQ(*FindGpu("MIG-5b", kTwo), 1);
}

TEST(DeviceChoice, AUuidOfNoneOrOfSeveralIsAnErrorThatNamesThoseThatThereAre) {
  for (const char* uuid : {"GPU-5", "GPU-", "GPU-77", "GPU-a0e"}) {
    const absl::Status status = FindGpu(uuid, kTwo).status();
    EXPECT_EQ(ErrorReason(status), "DEVICE_NOT_FOUND") << uuid;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(uuid), HasSubstr("GPU-5b0e1f2c"))) << uuid;
  }
  EXPECT_THAT(std::string(FindGpu("GPU-5", kTwo).status().message()), HasSubstr("more than one"));
  EXPECT_THAT(std::string(FindGpu("GPU-5", kNone).status().message()), HasSubstr("no NVIDIA driver"));
}

TEST(DeviceChoice, OnlyWhatLooksLikeAUuidIsOne) {
  for (const char* yes : {"GPU-1", "gpu-1", "MIG-1"}) EXPECT_TRUE(IsGpuUuid(yes)) << yes;
  for (const char* no : {"0", "GPU", "", "x"}) EXPECT_FALSE(IsGpuUuid(no)) << no;
}

}  // namespace
}  // namespace latentd
