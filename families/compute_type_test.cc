#include "families/compute_type.h"

#include "ATen/Context.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

// A GPU with or without bf16; it does nothing.
class FakeGpu : public Device {
 public:
  explicit FakeGpu(bool bf16) : Device("cuda:0", DeviceKind::kCuda, 0, nullptr), bf16_(bf16) {}
  bool computes_bf16() const override { return bf16_; }
  absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t) override { return absl::UnimplementedError(""); }
  absl::Status CopyIn(void*, const void*, int64_t) override { return absl::UnimplementedError(""); }
  absl::StatusOr<std::unique_ptr<CopyStream>> NewCopyStream() override {
    return absl::UnimplementedError("");
  }
  int64_t allocated_bytes() const override { return 0; }

 private:
  const bool bf16_;
};

TEST(ComputeType, FollowsFromDeviceAndComponent) {
  const FakeGpu ampere(true), turing(false);
  EXPECT_EQ(ComputeTypeFor("auto", ampere, /*leaves_fp16=*/false), ComputeType::kBf16);
  EXPECT_EQ(ComputeTypeFor("auto", ampere, /*leaves_fp16=*/true), ComputeType::kBf16);
  EXPECT_EQ(ComputeTypeFor("auto", turing, /*leaves_fp16=*/false), ComputeType::kFp16);
  EXPECT_EQ(ComputeTypeFor("auto", turing, /*leaves_fp16=*/true), ComputeType::kFp32) << "it overflows";
  EXPECT_EQ(ComputeTypeFor("fp16", ampere, /*leaves_fp16=*/false), ComputeType::kFp16);
  EXPECT_EQ(ComputeTypeFor("fp32", ampere, /*leaves_fp16=*/false), ComputeType::kFp32);
}

TEST(ComputeType, WhatAGpuCannotDoIsAnError) {
  const FakeGpu ampere(true), turing(false);
  EXPECT_TRUE(CheckComputeSetting("bf16", ampere).ok());
  EXPECT_TRUE(CheckComputeSetting("auto", turing).ok());
  EXPECT_EQ(ErrorReason(CheckComputeSetting("bf16", turing)), "UNSUPPORTED_COMPUTE");
}

TEST(ComputeType, SettingsOfGpusAreSet) {
  at::Context& context = at::globalContext();
  // The opposite of all of them first.
  context.setAllowTF32CuBLAS(true);
  context.setAllowTF32CuDNN(true);
  context.setBenchmarkCuDNN(true);
  context.setDeterministicCuDNN(false);
  context.setAllowFP16ReductionCuBLAS(true);
  context.setAllowBF16ReductionCuBLAS(true);
  context.setSDPUseCuDNN(true);
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseMath(false);
  SetTorchForGpus();
  EXPECT_FALSE(context.allowTF32CuBLAS());
  EXPECT_FALSE(context.allowTF32CuDNN());
  EXPECT_FALSE(context.benchmarkCuDNN());
  EXPECT_TRUE(context.deterministicCuDNN());
  EXPECT_EQ(context.allowFP16ReductionCuBLAS(),
            at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK);
  EXPECT_EQ(context.allowBF16ReductionCuBLAS(),
            at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK);
  EXPECT_FALSE(context.userEnabledCuDNNSDP());
  EXPECT_TRUE(context.userEnabledFlashSDP());
  EXPECT_TRUE(context.userEnabledMemEfficientSDP());
  EXPECT_TRUE(context.userEnabledMathSDP());
}

}  // namespace
}  // namespace latentd
