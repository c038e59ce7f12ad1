// Everything that can fail fails once, at every place where it is done in a run with a LoRA: an error with a
// reason (or a picture, where there was another way), nothing left behind, and the next run gives the same
// picture.
#include <atomic>
#include <map>

#include "absl/strings/str_cat.h"
#include "c10/core/CPUAllocator.h"
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "gtest/gtest.h"
#include "tests/stress/in_process_server.h"

namespace latentd {
namespace {

struct Variant {
  const char* name;
  const char* device;
  const char* residency;
  v1::PatchMode mode;
};
void PrintTo(const Variant& v, std::ostream* out) { *out << v.name; }

class FaultTest : public testing::TestWithParam<Variant> {
 protected:
  static Config ConfigFor(const Variant& variant) {
    Config config = InProcessServer::DefaultConfig({variant.device});
    config.residency = variant.residency;
    return config;
  }

  // A cold run: nothing is in memory, so that everything is done.
  static Outcome ColdRun(InProcessServer& server) {
    server.core().cache->Trim(MemoryBudget::kUnlimited);
    return server.Generate(SmallJob(), {Lora("dusk", 0.75), Lora("checker")}, GetParam().mode);
  }

  // One run with a failure armed. True when it was reached.
  bool RunOnce(InProcessServer& server, const std::string& what, const std::string& expected,
               const std::function<void()>& arm, const std::function<bool()>& disarm) {
    server.core().cache->Trim(MemoryBudget::kUnlimited);
    arm();
    const Outcome outcome =
        server.Generate(SmallJob(), {Lora("dusk", 0.75), Lora("checker")}, GetParam().mode);
    const bool reached = disarm();
    if (outcome.status.ok()) {
      EXPECT_EQ(outcome.sha256.at(0), expected) << what;
      ++(outcome.adapted.empty() ? unharmed_ : adapted_);
    } else {
      EXPECT_NE(ErrorReason(outcome.status), "") << what << ": " << outcome.status;
      EXPECT_NE(ErrorReason(outcome.status), "INFERENCE_FAILED") << what << ": " << outcome.status;
      ++reasons_[ErrorReason(outcome.status)];
    }
    EXPECT_EQ(server.WhatIsNotAtRest(), "") << what;
    const Outcome next = server.Generate(SmallJob(), {Lora("dusk", 0.75), Lora("checker")}, GetParam().mode);
    EXPECT_TRUE(next.status.ok()) << what << ": " << next.status;
    if (next.status.ok()) {
      EXPECT_EQ(next.sha256.at(0), expected) << what;
    }
    EXPECT_EQ(server.WhatIsNotAtRest(), "") << what;
    return reached;
  }

  void Report(const std::string& what, int64_t n) {
    std::cout << what << ": " << n << " places;";
    for (const auto& [reason, count] : reasons_) std::cout << " " << reason << " " << count;
    std::cout << "; went another way " << adapted_ << ", unharmed " << unharmed_ << "\n";
    reasons_.clear();
    adapted_ = unharmed_ = 0;
  }

  std::map<std::string, int64_t> reasons_;
  int64_t adapted_ = 0, unharmed_ = 0;
};

TEST_P(FaultTest, EveryPromiseAllocationCopyAndReadFailsOnce) {
  InProcessServer server(ConfigFor(GetParam()));
  const Outcome good = ColdRun(server);
  ASSERT_TRUE(good.status.ok()) << good.status;
  const std::map<FaultPoint, const char*> points = {{FaultPoint::kReserve, "promise"},
                                                    {FaultPoint::kAllocate, "allocation on a device"},
                                                    {FaultPoint::kCopy, "copy to a device"},
                                                    {FaultPoint::kOpen, "file opened"},
                                                    {FaultPoint::kRead, "tensor read"}};
  for (const auto& [point, name] : points) {
    // All of them for the first variant. For the others, whose hundreds of tensors fail in the same lines,
    // some.
    int64_t n = 1;
    for (int64_t stride = 1;; n += stride) {
      if (n > 40 && std::string(GetParam().residency) + GetParam().device != "autosim:0=64MiB") stride = 13;
      const bool reached = RunOnce(
          server, absl::StrCat(name, " ", n), good.sha256.at(0), [&, p = point] { FaultInjector::Arm(p, n); },
          FaultInjector::Disarm);
      if (HasFailure() || !reached) break;
    }
    Report(absl::StrCat(GetParam().name, ", ", name), n - 1);
    const bool on_device = std::string(GetParam().device) != "cpu";
    if (on_device || (point != FaultPoint::kAllocate && point != FaultPoint::kCopy)) {
      EXPECT_GT(n, 1) << name;
    }
  }
}

// LibTorch's own allocations, in formulas and loads.
class FailingAllocator : public c10::Allocator {
 public:
  static FailingAllocator& Get() {
    static auto& allocator = *new FailingAllocator();
    return allocator;
  }
  void Arm(int64_t n) { countdown_ = n; }
  bool Disarm() { return countdown_.exchange(0) <= 0; }

  c10::DataPtr allocate(size_t bytes) override {
    if (countdown_ > 0 && --countdown_ == 0) {
      countdown_ = -1;
      TORCH_CHECK(false, "DefaultCPUAllocator: can't allocate memory: injected");
    }
    return real_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return real_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* const real_ = c10::GetDefaultCPUAllocator();
  std::atomic<int64_t> countdown_ = 0;
};

TEST_P(FaultTest, TensorMemoryRunsOut) {
  c10::SetCPUAllocator(&FailingAllocator::Get(), /*priority=*/100);
  InProcessServer server(ConfigFor(GetParam()));
  const Outcome good = ColdRun(server);
  ASSERT_TRUE(good.status.ok()) << good.status;
  int64_t n = 1, runs = 0;
  for (;; n += n < 20 ? 1 : 41) {
    ++runs;
    const bool reached = RunOnce(
        server, absl::StrCat("tensor ", n), good.sha256.at(0), [&] { FailingAllocator::Get().Arm(n); },
        [] { return FailingAllocator::Get().Disarm(); });
    if (HasFailure() || !reached) break;
  }
  Report(absl::StrCat(GetParam().name, ", every so many-th tensor of ", n, ", of which failed"), runs - 1);
  EXPECT_GT(n, 500);
}

INSTANTIATE_TEST_SUITE_P(
    All, FaultTest,
    testing::Values(Variant{"resident on sim", "sim:0=64MiB", "auto", v1::PATCH_MODE_SIDECAR},
                    Variant{"streamed, merged", "sim:0=64MiB", "stream", v1::PATCH_MODE_DIRECT},
                    Variant{"cpu, merged", "cpu", "auto", v1::PATCH_MODE_DIRECT}));

TEST(DeviceFaults, ALostDeviceEndsItsSessionsAndLeavesTheOtherAlone) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB", "sim:1=64MiB"}));
  const std::string expected = server.Generate(SmallJob()).sha256.at(0);
  server.core().cache->Trim(MemoryBudget::kUnlimited);
  server.sim(0).Lose();
  int lost = 0;
  for (int i = 0; i < 6; ++i) {
    const Outcome outcome = server.Generate(SmallJob());
    if (outcome.status.ok()) {
      EXPECT_EQ(outcome.sha256.at(0), expected);
    } else {
      EXPECT_EQ(ErrorReason(outcome.status), "DEVICE_LOST") << outcome.status;
      ++lost;
    }
  }
  EXPECT_EQ(lost, 0) << "jobs were placed on a device that is lost";
  EXPECT_EQ(server.WhatIsNotAtRest(), "");

  server.sim(1).Lose();
  const Outcome none = server.Generate(SmallJob());
  EXPECT_EQ(ErrorReason(none.status), "DEVICE_LOST") << none.status;
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

TEST(DeviceFaults, ADeviceLostInTheMiddleFailsThatJobOnly) {
  for (const char* residency : {"auto", "stream"}) {
    Config config = InProcessServer::DefaultConfig({"sim:0=64MiB"});
    config.residency = residency;
    int64_t n = 1;
    for (int64_t step = 1;; n += step) {
      if (n > 10) step = 29;
      config.devices = {absl::StrCat("sim:0=64MiB,lose_after=", n)};
      InProcessServer server(config);
      const Outcome outcome = server.Generate(SmallJob(), {Lora("dusk")});
      EXPECT_EQ(server.WhatIsNotAtRest(), "") << n;
      if (outcome.status.ok()) break;
      EXPECT_EQ(ErrorReason(outcome.status), "DEVICE_LOST") << n << ": " << outcome.status;
    }
    EXPECT_GT(n, 100);
  }
}

}  // namespace
}  // namespace latentd
