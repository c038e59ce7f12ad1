// The plug-in, from a program that links LibTorch's CPU part only, as the daemon does. What needs a device is
// skipped where there is none; that the plug-in loads and says so is tested everywhere.
#include "cache/cuda/cuda_device.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache/base/error.h"
#include "cache/cuda/cuda_errors.h"
#include "cache/cuda/nvml.h"
#include "cache/cuda_plugin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kMiB = 1 << 20;

// ------------------------------------------------------------------------------------ with and without a
// device

TEST(CudaPlugin, LoadsWithoutADriver) {
  const absl::StatusOr<const CudaPluginApi*> api = LoadCudaPlugin();
  ASSERT_TRUE(api.ok()) << api.status();
  EXPECT_EQ((*api)->abi, kCudaPluginAbi);
  EXPECT_EQ(std::max(0, (*api)->device_count()), (*api)->device_count());
  EXPECT_EQ(*LoadCudaPlugin(), *api);
  EXPECT_EQ(at::ones({3}).sum().item<float>(), 3);  // LibTorch's CPU part works beside it
}

TEST(CudaPlugin, ADeviceThatIsNotThereIsATypedError) {
  const absl::StatusOr<const CudaPluginApi*> api = LoadCudaPlugin();
  ASSERT_TRUE(api.ok()) << api.status();
  RamBudget ram(0);
  for (int index : {-1, (*api)->device_count(), 999}) {
    CudaDeviceReply reply;
    (*api)->make_device({.index = index, .ram = &ram, .maybe_fail = MaybeFail}, &reply);
    EXPECT_EQ(reply.device, nullptr);
    EXPECT_EQ(reply.status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(ErrorReason(reply.status), "DEVICE_NOT_FOUND");
    EXPECT_THAT(std::string(reply.status.message()), HasSubstr(absl::StrCat("cuda:", index, ": ")));
    EXPECT_THAT(std::string(reply.status.message()),
                HasSubstr((*api)->device_count() > 0 ? "this process sees" : "NVIDIA driver"));
  }
}

TEST(CudaPlugin, WithoutADriverTheProgramSaysSo) {
  RamBudget ram(0);
  if (CudaDeviceCount() > 0) {
    EXPECT_TRUE(MakeCudaDevice(0, 0, &ram).ok());
    return;
  }
  const absl::Status status = MakeCudaDevice(0, 0, &ram).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrorReason(status), "DEVICE_NOT_FOUND");
  EXPECT_THAT(std::string(status.message()), HasSubstr("NVIDIA driver"));
}

TEST(Nvml, MayNotBeThere) { EXPECT_EQ(Nvml::Open("libnvidia-ml-that-is-not-there.so.1"), nullptr); }

TEST(CudaErrors, SayWhetherTheDeviceCanGoOn) {
  EXPECT_EQ(ClassifyCudaError(cudaErrorMemoryAllocation), CudaFailure::kOutOfMemory);
  for (cudaError_t lost : {cudaErrorDevicesUnavailable, cudaErrorECCUncorrectable, cudaErrorLaunchFailure,
                           cudaErrorIllegalAddress, cudaErrorUnknown}) {
    EXPECT_EQ(ClassifyCudaError(lost), CudaFailure::kLost) << lost;
  }
  for (cudaError_t other : {cudaErrorInvalidValue, cudaErrorNotReady, cudaErrorInvalidDevice}) {
    EXPECT_EQ(ClassifyCudaError(other), CudaFailure::kOther) << other;
  }
}

// ---------------------------------------------------------------------------------------------- with a
// device

// The driver's own functions; the test links nothing of CUDA.
template <typename... Args>
int Driver(const char* name, Args... args) {
  static void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  auto call = reinterpret_cast<int (*)(Args...)>(dlsym(library, name));
  return call == nullptr ? -1 : call(args...);
}

bool HasContext(int index) {
  int device = 0, active = 0;
  unsigned flags = 0;
  EXPECT_EQ(Driver("cuInit", 0u), 0);
  EXPECT_EQ(Driver("cuDeviceGet", &device, index), 0);
  EXPECT_EQ(Driver("cuDevicePrimaryCtxGetState", device, &flags, &active), 0);
  return active != 0;
}

class CudaDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (CudaDeviceCount() == 0) GTEST_SKIP() << "no CUDA device";
    absl::StatusOr<std::unique_ptr<Device>> device = MakeDevice("cuda:0", &ram_);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }

  // A tensor of bytes over device memory.
  at::Tensor Tensor(std::shared_ptr<void> memory, int64_t bytes) {
    const at::Device place(at::kCUDA, 0);
    void* data = memory.get();
    return at::from_blob(
        data, {bytes}, [memory = std::move(memory)](void*) mutable { memory.reset(); },
        at::TensorOptions().dtype(at::kByte).device(place), place);
  }
  std::vector<uint8_t> Bytes(const at::Tensor& tensor) {
    const at::Tensor host = tensor.cpu();
    const auto* data = host.const_data_ptr<uint8_t>();
    return std::vector<uint8_t>(data, data + host.numel());
  }
  std::vector<uint8_t> Pattern(int64_t bytes, int seed) {
    std::vector<uint8_t> pattern(static_cast<size_t>(bytes));
    for (size_t i = 0; i < pattern.size(); ++i)
      pattern[i] = static_cast<uint8_t>((i * 2654435761u >> 13) + seed);
    return pattern;
  }
  // Seconds of work for the device.
  void ComputeForAWhile() {
    at::Tensor a = at::ones({4096, 4096}, at::TensorOptions().device(at::Device(at::kCUDA, 0)));
    for (int i = 0; i < 60; ++i) a = a.matmul(a).clamp(0, 1);
  }
  int64_t ForeignBytes() {
    absl::SleepFor(absl::Milliseconds(50));  // the answer may be a moment old
    EXPECT_TRUE(device_->budget().TryReserve({.bytes = 1}).ok());
    return device_->budget().stats().foreign_bytes;
  }

  RamBudget ram_{int64_t{1} << 30};
  std::unique_ptr<Device> device_;
};

// The first of these tests: whatever uses the device leaves a context behind.
TEST_F(CudaDeviceTest, MakesNoContextBeforeItIsUsed) {
  ASSERT_FALSE(HasContext(0)) << "run this test in a process of its own";
  std::thread([&] { device_->BindThread(); }).join();
  device_->BindThread();
  EXPECT_TRUE(device_->Check().ok());
  device_->ReleaseUnused();
  EXPECT_GE(ForeignBytes(), 0);
  EXPECT_GT(device_->budget().stats().cap_bytes, 0);
  EXPECT_FALSE(HasContext(0));
  if (const auto nvml = Nvml::Open()) {
    std::string bus(32, '\0');
    int device = 0;
    Driver("cuDeviceGet", &device, 0);
    Driver("cuDeviceGetPCIBusId", bus.data(), 32, device);
    if (void* found = nvml->Find({}, bus.c_str()); found != nullptr && nvml->ProcessesOf(found).has_value()) {
      EXPECT_THAT(*nvml->ProcessesOf(found), Not(Contains(static_cast<unsigned>(getpid()))));
    }
  }
  ASSERT_TRUE(device_->Allocate(1).ok());
  EXPECT_TRUE(HasContext(0));
}

TEST_F(CudaDeviceTest, CountsWhatItGave) {
  EXPECT_EQ(device_->name(), "cuda:0");
  EXPECT_EQ(device_->kind(), DeviceKind::kCuda);
  EXPECT_FALSE(device_->uses_host_memory());
  std::shared_ptr<void> outlives;
  {
    const auto a = *device_->Allocate(100);
    outlives = *device_->Allocate(1000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.get()) % kDeviceAlignment, 0u);
    EXPECT_EQ(device_->allocated_bytes(), 128 + 1024);
  }
  EXPECT_EQ(device_->allocated_bytes(), 1024);
  EXPECT_TRUE(device_->Allocate(0).ok());
  device_.reset();
  std::thread([&] { outlives.reset(); }).join();  // on any thread, after its device
}

TEST_F(CudaDeviceTest, ItsSizeIsACap) {
  auto small = *MakeDevice("cuda:0=64MiB", &ram_);
  EXPECT_EQ(small->budget().stats().cap_bytes, 64 * kMiB);
  // What others use beside the cap is not taken from it.
  EXPECT_TRUE(small->budget().TryReserve({.bytes = 64 * kMiB}).ok());
  auto large = *MakeDevice("cuda:0=999TiB", &ram_);
  EXPECT_EQ(large->budget().stats().cap_bytes, device_->budget().stats().cap_bytes);
}

TEST_F(CudaDeviceTest, CopiesInEveryByte) {
  for (int64_t bytes : {int64_t{1}, int64_t{4097}, 33 * kMiB + 5}) {
    const std::vector<uint8_t> from = Pattern(bytes, 3);
    auto memory = *device_->Allocate(bytes);
    ASSERT_TRUE(device_->CopyIn(memory.get(), from.data(), bytes).ok());
    EXPECT_TRUE(Bytes(Tensor(std::move(memory), bytes)) == from) << bytes;
  }
}

TEST_F(CudaDeviceTest, AStreamCopiesEveryByteThroughItsPinnedRing) {
  const int64_t before = ram_.stats().reserved_bytes;
  auto stream = *device_->NewCopyStream();
  EXPECT_EQ(ram_.stats().use(MemoryUse::kStaging).reserved_bytes, 48 * kMiB);
  std::vector<std::vector<uint8_t>> from;
  std::vector<at::Tensor> to;
  std::vector<CopyStream::Piece> pieces;
  for (int64_t bytes : {int64_t{1}, int64_t{100}, 16 * kMiB, 70 * kMiB + 3, int64_t{65}}) {
    from.push_back(Pattern(bytes, static_cast<int>(bytes % 251)));
    to.push_back(Tensor(*device_->Allocate(bytes), bytes));
    pieces.push_back({to.back().mutable_data_ptr(), from.back().data(), bytes});
  }
  const uint64_t copy = *stream->Begin(pieces);
  ASSERT_TRUE(stream->Await(copy).ok());
  for (size_t i = 0; i < to.size(); ++i) EXPECT_TRUE(Bytes(to[i]) == from[i]) << i;
  stream.reset();
  EXPECT_EQ(ram_.stats().reserved_bytes, before);
}

TEST_F(CudaDeviceTest, AStreamWithoutRoomForItsPinnedMemoryIsRefused) {
  RamBudget small(kMiB);
  auto device = *MakeDevice("cuda:0", &small);
  const absl::Status status = device->NewCopyStream().status();
  EXPECT_EQ(ErrorReason(status), "MODEL_EXCEEDS_BUDGET");
  EXPECT_THAT(std::string(status.message()), HasSubstr("pinned memory for copies to cuda:0"));
}

// The race that streaming lives with: the device still computes with the slot when its next block is copied.
TEST_F(CudaDeviceTest, ACopyWaitsForWhatStillReadsItsSlotAndComputingWaitsForTheCopy) {
  constexpr int64_t kBytes = 40 * kMiB;
  auto stream = *device_->NewCopyStream();
  at::Tensor slot = Tensor(*device_->Allocate(kBytes), kBytes);
  std::vector<std::vector<uint8_t>> blocks;
  for (int i = 0; i < 4; ++i)
    blocks.emplace_back(static_cast<size_t>(kBytes), static_cast<uint8_t>(11 * i + 1));
  std::vector<at::Tensor> seen;
  for (const std::vector<uint8_t>& block : blocks) {
    const uint64_t copy = *stream->Begin({{slot.mutable_data_ptr(), block.data(), kBytes}});
    ASSERT_TRUE(stream->Await(copy).ok());
    ComputeForAWhile();
    seen.push_back(slot.clone());  // queued, and far from done when the next copy begins
  }
  for (size_t i = 0; i < blocks.size(); ++i) EXPECT_TRUE(Bytes(seen[i]) == blocks[i]) << i;
}

// The same for memory that changes hands: it is given again while the device still reads it.
TEST_F(CudaDeviceTest, MemoryThatIsFreedWhileItIsReadIsGivenInOrder) {
  constexpr int64_t kBytes = 64 * kMiB;
  const std::vector<uint8_t> ones(static_cast<size_t>(kBytes), 1), twos(static_cast<size_t>(kBytes), 2);
  for (bool streamed : {false, true}) {
    auto stream = *device_->NewCopyStream();
    at::Tensor first = Tensor(*device_->Allocate(kBytes), kBytes);
    ASSERT_TRUE(device_->CopyIn(first.mutable_data_ptr(), ones.data(), kBytes).ok());
    ComputeForAWhile();
    const at::Tensor seen = first.clone();
    std::thread([&] { first.reset(); }).join();
    auto second = *device_->Allocate(kBytes);  // most likely the same block
    if (streamed) {
      ASSERT_TRUE(stream->Await(*stream->Begin({{second.get(), twos.data(), kBytes}})).ok());
    } else {
      ASSERT_TRUE(device_->CopyIn(second.get(), twos.data(), kBytes).ok());
    }
    EXPECT_THAT(Bytes(seen.slice(0, 0, kBytes, 4099)), Each(1));
    EXPECT_TRUE(Bytes(Tensor(std::move(second), kBytes)) == twos);
  }
}

TEST_F(CudaDeviceTest, TooMuchIsATypedErrorAndTheDeviceGoesOn) {
  const int64_t all = device_->budget().stats().cap_bytes;
  const absl::Status status = device_->Allocate(2 * all).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(status), "DEVICE_OUT_OF_MEMORY");
  EXPECT_EQ(GetErrorDetails(status)["needed_bytes"], absl::StrCat(2 * all));
  EXPECT_EQ(device_->allocated_bytes(), 0);
  EXPECT_TRUE(device_->Check().ok());
  EXPECT_TRUE(device_->Allocate(kMiB).ok());
}

TEST_F(CudaDeviceTest, InjectedFaultsReachThePlugIn) {
  FaultInjector::Arm(FaultPoint::kAllocate, 1);
  EXPECT_EQ(ErrorReason(device_->Allocate(1).status()), "DEVICE_OUT_OF_MEMORY");
  EXPECT_TRUE(FaultInjector::Disarm());
  auto memory = *device_->Allocate(1);
  FaultInjector::Arm(FaultPoint::kCopy, 1);
  const char from = 1;
  EXPECT_EQ(ErrorReason(device_->CopyIn(memory.get(), &from, 1)), "COPY_FAILED");
  EXPECT_TRUE(FaultInjector::Disarm());
  FaultInjector::Arm(FaultPoint::kReserve, 1);
  EXPECT_EQ(ErrorReason(device_->NewCopyStream().status()), "BUDGET_EXHAUSTED");
  EXPECT_TRUE(FaultInjector::Disarm());
}

TEST_F(CudaDeviceTest, OwnMemoryIsNotForeignUsedOrNot) {
  constexpr int64_t kBytes = 512 * kMiB;
  constexpr int64_t kSlack = 64 * kMiB;  // other processes do as they like, hopefully little
  auto warm = *device_->Allocate(kBytes);
  warm.reset();
  device_->ReleaseUnused();
  const int64_t idle = ForeignBytes();
  auto memory = *device_->Allocate(kBytes);
  EXPECT_NEAR(static_cast<double>(ForeignBytes()), static_cast<double>(idle), kSlack);
  memory.reset();  // kept by the allocator
  EXPECT_NEAR(static_cast<double>(ForeignBytes()), static_cast<double>(idle), kSlack);

  // What did not come from the allocator is as good as another process's.
  uint64_t taken = 0;
  ASSERT_EQ(Driver("cuMemAlloc_v2", &taken, static_cast<size_t>(kBytes)), 0);
  EXPECT_NEAR(static_cast<double>(ForeignBytes()), static_cast<double>(idle + kBytes), kSlack);
  ASSERT_EQ(Driver("cuMemFree_v2", taken), 0);
  EXPECT_NEAR(static_cast<double>(ForeignBytes()), static_cast<double>(idle), kSlack);
}

// ------------------------------------------------------------------------------------------- a lost
// device

// Writes to address 0: the device runs no kernel of this process any more.
constexpr char kBrokenKernel[] = R"(
.version 6.4
.target sm_52
.address_size 64
.visible .entry broken()
{
  .reg .b64 %address;
  .reg .b32 %value;
  mov.u64 %address, 0;
  mov.u32 %value, 1;
  st.global.u32 [%address], %value;
  ret;
}
)";

// The last of all tests: nothing uses the device after it.
class CudaLostDeviceTest : public CudaDeviceTest {};

TEST_F(CudaLostDeviceTest, AKernelThatBreaksLosesTheDeviceAndEveryCallSaysSo) {
  auto memory = *device_->Allocate(kMiB);
  auto stream = *device_->NewCopyStream();
  void *module = nullptr, *kernel = nullptr, *nothing = nullptr;
  ASSERT_EQ(Driver("cuModuleLoadData", &module, static_cast<const void*>(kBrokenKernel)), 0);
  ASSERT_EQ(Driver("cuModuleGetFunction", &kernel, module, "broken"), 0);
  ASSERT_EQ(Driver("cuLaunchKernel", kernel, 1u, 1u, 1u, 1u, 1u, 1u, 0u, nothing, nothing, nothing), 0);
  EXPECT_NE(Driver("cuCtxSynchronize"), 0);

  EXPECT_EQ(ErrorReason(device_->Check()), "DEVICE_LOST");
  EXPECT_EQ(ErrorReason(device_->Allocate(1).status()), "DEVICE_LOST");
  const char from = 1;
  EXPECT_EQ(ErrorReason(device_->CopyIn(memory.get(), &from, 1)), "DEVICE_LOST");
  EXPECT_EQ(ErrorReason(device_->NewCopyStream().status()), "DEVICE_LOST");
  // What is left ends without a word.
  stream.reset();
  memory.reset();
  device_->ReleaseUnused();
  device_.reset();
}

}  // namespace
}  // namespace latentd
