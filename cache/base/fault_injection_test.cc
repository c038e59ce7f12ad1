#include "cache/base/fault_injection.h"

#include "cache/base/error.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

TEST(FaultInjection, NothingFailsAndNothingIsCountedWhenNothingIsArmed) {
  const int64_t before = FaultInjector::Passed(FaultPoint::kRead);
  EXPECT_TRUE(MaybeFail(FaultPoint::kRead, "x").ok());
  EXPECT_EQ(FaultInjector::Passed(FaultPoint::kRead), before);
}

TEST(FaultInjection, TheNthPassingFailsOnceAndOnlyAtItsPoint) {
  const int64_t before = FaultInjector::Passed(FaultPoint::kOpen);
  FaultInjector::Arm(FaultPoint::kOpen, 3);
  for (int i = 1; i <= 5; ++i) {
    EXPECT_EQ(MaybeFail(FaultPoint::kOpen, "x").ok(), i != 3) << i;
    EXPECT_TRUE(MaybeFail(FaultPoint::kRead, "x").ok());
  }
  EXPECT_EQ(FaultInjector::Passed(FaultPoint::kOpen), before + 5);
  EXPECT_TRUE(FaultInjector::Disarm());
  EXPECT_TRUE(MaybeFail(FaultPoint::kOpen, "x").ok());
}

TEST(FaultInjection, DisarmingTellsWhenTheFailureWasNotReached) {
  FaultInjector::Arm(FaultPoint::kRead, 2);
  EXPECT_TRUE(MaybeFail(FaultPoint::kRead, "x").ok());
  EXPECT_FALSE(FaultInjector::Disarm());
  EXPECT_TRUE(MaybeFail(FaultPoint::kRead, "x").ok());
}

TEST(FaultInjection, ACallTakesTheFailuresPlace) {
  int called = 0;
  FaultInjector::Call(FaultPoint::kRead, 2, [&] { ++called; });
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(MaybeFail(FaultPoint::kRead, "x").ok());
    EXPECT_EQ(called, i == 0 ? 0 : 1);
  }
  EXPECT_TRUE(FaultInjector::Disarm());
  FaultInjector::Arm(FaultPoint::kRead, 1);
  EXPECT_FALSE(MaybeFail(FaultPoint::kRead, "x").ok());
  EXPECT_TRUE(FaultInjector::Disarm());
}

TEST(FaultInjection, EveryPointHasTheErrorThatItHasInEarnest) {
  const struct {
    FaultPoint point;
    absl::StatusCode code;
    const char* reason;
  } kCases[] = {
      {FaultPoint::kReserve, absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED"},
      {FaultPoint::kAllocate, absl::StatusCode::kResourceExhausted, "DEVICE_OUT_OF_MEMORY"},
      {FaultPoint::kCopy, absl::StatusCode::kInternal, "COPY_FAILED"},
      {FaultPoint::kOpen, absl::StatusCode::kNotFound, "FILE_NOT_FOUND"},
      {FaultPoint::kRead, absl::StatusCode::kDataLoss, "FILE_TRUNCATED"},
      {FaultPoint::kWatch, absl::StatusCode::kResourceExhausted, "OUT_OF_WATCHES"},
      {FaultPoint::kThread, absl::StatusCode::kResourceExhausted, "NO_THREADS"},
      {FaultPoint::kWeight, absl::StatusCode::kInternal, "INFERENCE_FAILED"},
  };
  for (const auto& c : kCases) {
    FaultInjector::Arm(c.point, 1);
    const absl::Status status = MaybeFail(c.point, "tensor 7");
    EXPECT_EQ(status.code(), c.code);
    EXPECT_EQ(ErrorReason(status), c.reason);
    EXPECT_EQ(status.message(), "tensor 7: injected failure");
    EXPECT_TRUE(FaultInjector::Disarm());
  }
}

}  // namespace
}  // namespace latentd
