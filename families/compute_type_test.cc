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
  EXPECT_EQ(ComputeTypeFor("auto", ampere, "unet"), ComputeType::kBf16);
  EXPECT_EQ(ComputeTypeFor("auto", ampere, "vae"), ComputeType::kBf16);
  EXPECT_EQ(ComputeTypeFor("auto", turing, "unet"), ComputeType::kFp16);
  EXPECT_EQ(ComputeTypeFor("auto", turing, "vae"), ComputeType::kFp32) << "it overflows";
  EXPECT_EQ(ComputeTypeFor("fp16", ampere, "text_encoder"), ComputeType::kFp16);
  EXPECT_EQ(ComputeTypeFor("fp32", ampere, "unet"), ComputeType::kFp32);
}

TEST(ComputeType, WhatAGpuCannotDoIsAnError) {
  const FakeGpu ampere(true), turing(false);
  EXPECT_TRUE(CheckComputeSetting("bf16", ampere).ok());
  EXPECT_TRUE(CheckComputeSetting("auto", turing).ok());
  EXPECT_EQ(ErrorReason(CheckComputeSetting("bf16", turing)), "UNSUPPORTED_COMPUTE");
}

TEST(ComputeType, SettingsOfGpusAreSet) {
  at::Context& context = at::globalContext();
  context.setAllowTF32CuDNN(true);
  context.setBenchmarkCuDNN(true);
  context.setDeterministicCuDNN(false);
  SetTorchForGpus();
  EXPECT_FALSE(context.allowTF32CuBLAS());
  EXPECT_FALSE(context.allowTF32CuDNN());
  EXPECT_FALSE(context.benchmarkCuDNN());
  EXPECT_TRUE(context.deterministicCuDNN());
  EXPECT_TRUE(context.userEnabledFlashSDP());
  EXPECT_TRUE(context.userEnabledMemEfficientSDP());
}

}  // namespace
}  // namespace latentd
