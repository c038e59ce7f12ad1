// A place where tensors can live and be computed on: `cpu`, `sim:N` (host memory under a budget of its own),
// later `cuda:N`.
//
// Thread-safe. Devices are made once at start and outlive the cache that uses them. Nothing here knows of
// tensors: memory is raw bytes, so that a device can be a plug-in.
#ifndef LATENTD_CACHE_DEVICE_H_
#define LATENTD_CACHE_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/memory_budget.h"

namespace latentd {

enum class DeviceKind { kCpu, kSim, kCuda };

class Device {
 public:
  virtual ~Device() = default;

  const std::string& name() const { return name_; }
  DeviceKind kind() const { return kind_; }

  // True where records are used in host memory as they are, so that no copy is ever made.
  bool uses_host_memory() const { return kind_ == DeviceKind::kCpu; }

  // What residency and working memory are charged to: the RamBudget for `cpu`, else the device's own.
  MemoryBudget& budget() const { return *budget_; }

  // Memory on the device, at least 64-byte aligned; freed with the last owner. The caller has a Reservation
  // for it. Errors: RESOURCE_EXHAUSTED DEVICE_OUT_OF_MEMORY, UNAVAILABLE DEVICE_LOST.
  virtual absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes) = 0;

  // Copies host bytes into memory from Allocate(). Errors: UNAVAILABLE DEVICE_LOST, INTERNAL COPY_FAILED.
  virtual absl::Status CopyIn(void* to, const void* from, int64_t bytes) = 0;

 protected:
  Device(std::string name, DeviceKind kind, MemoryBudget* budget)
      : name_(std::move(name)), kind_(kind), budget_(budget) {}

 private:
  const std::string name_;
  const DeviceKind kind_;
  MemoryBudget* const budget_;
};

// The host itself: allocations are plain, the budget is the RamBudget.
class CpuDevice : public Device {
 public:
  explicit CpuDevice(RamBudget* ram) : Device("cpu", DeviceKind::kCpu, ram) {}
  absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes) override;
  absl::Status CopyIn(void* to, const void* from, int64_t bytes) override;
};

// A device that is not there: its memory is host memory in a ledger of its own, its kernels are the CPU's.
// Residency, offload and out-of-memory run for real on a machine without a GPU. Faults can be injected.
class SimDevice : public Device {
 public:
  // name "sim:N".
  SimDevice(std::string name, int64_t memory_bytes);

  absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes) override;
  absl::Status CopyIn(void* to, const void* from, int64_t bytes) override;

  // Bytes that Allocate gave and that are still alive; for tests and the ledger.
  int64_t allocated_bytes() const { return *allocated_; }

  // Faults, counted from now: the n-th Allocate / CopyIn fails once (1 = the next one, 0 = never).
  void FailAllocation(int64_t n) { fail_allocation_ = n; }
  void FailCopy(int64_t n) { fail_copy_ = n; }
  // From now on every call fails with DEVICE_LOST.
  void Lose() { lost_ = true; }

 private:
  DeviceBudget own_budget_;
  std::shared_ptr<std::atomic<int64_t>> allocated_ = std::make_shared<std::atomic<int64_t>>(0);
  std::atomic<int64_t> fail_allocation_ = 0;
  std::atomic<int64_t> fail_copy_ = 0;
  std::atomic<bool> lost_ = false;
};

// "cpu", "sim:0=8GiB" → a device. `ram` is the budget of `cpu`. Errors: INVALID_ARGUMENT with the spelling
// that is understood; UNIMPLEMENTED for cuda.
absl::StatusOr<std::unique_ptr<Device>> MakeDevice(absl::string_view spec, RamBudget* ram);

// "8GiB", "512MB", "1000000" → bytes. Errors: INVALID_ARGUMENT.
absl::StatusOr<int64_t> ParseBytes(absl::string_view text);

}  // namespace latentd

#endif  // LATENTD_CACHE_DEVICE_H_
