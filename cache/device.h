// A place where tensors can live and be computed on: `cpu`, `sim:N` (host memory under a budget of its own),
// `cuda:N` (a plug-in).
//
// Thread-safe. Devices are made once at start and outlive the cache that uses them. Nothing here knows of
// tensors: memory is raw bytes, so that a device can be a plug-in.
#ifndef LATENTD_CACHE_DEVICE_H_
#define LATENTD_CACHE_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/memory_budget.h"

namespace latentd {

enum class DeviceKind { kCpu, kSim, kCuda };
absl::string_view DeviceKindName(DeviceKind kind);  // "cpu", "sim", "cuda"

// What a device gives memory in. Bytes on a device are counted so.
inline constexpr int64_t kDeviceAlignment = 64;
constexpr int64_t PaddedBytes(int64_t bytes) {
  return (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
}

// Copies to one device that run beside computing, in the order in which they are begun. Not thread-safe: it
// belongs to the thread that computes. Its end waits for what was begun.
//
//   ASSIGN_OR_RETURN(uint64_t copy, stream->Begin({{slot, weights, n}}));
//   ... compute something else ...
//   RETURN_IF_ERROR(stream->Await(copy));  // what is computed from here on sees the bytes
class CopyStream {
 public:
  struct Piece {
    void* to;
    const void* from;  // unchanged and alive until the copy was awaited, or the stream ended
    int64_t bytes;
  };

  virtual ~CopyStream() = default;

  // Begins to copy, behind what was begun before, and behind what was computed until now: that may read what
  // the pieces overwrite. Returns the copy's number: 1, 2, …
  virtual absl::StatusOr<uint64_t> Begin(std::vector<Piece> pieces) = 0;

  // What is computed from here on comes after that copy. Errors: those of Device::CopyIn, for this copy or an
  // earlier one; from then on every call gives that error.
  virtual absl::Status Await(uint64_t copy) = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  const std::string& name() const { return name_; }
  DeviceKind kind() const { return kind_; }
  int index() const { return index_; }  // N of "sim:N"; 0 for cpu

  // True where records are used in host memory as they are, so that no copy is ever made.
  bool uses_host_memory() const { return kind_ == DeviceKind::kCpu; }

  // What residency and working memory are charged to: the RamBudget for `cpu`, else the device's own.
  MemoryBudget& budget() const { return *budget_; }

  // Memory on the device, at least 64-byte aligned; freed with the last owner. The caller has a Reservation
  // for it. Errors: RESOURCE_EXHAUSTED DEVICE_OUT_OF_MEMORY, UNAVAILABLE DEVICE_LOST.
  virtual absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes) = 0;

  // Copies host bytes into memory from Allocate(). Errors: UNAVAILABLE DEVICE_LOST, INTERNAL COPY_FAILED.
  virtual absl::Status CopyIn(void* to, const void* from, int64_t bytes) = 0;

  virtual absl::StatusOr<std::unique_ptr<CopyStream>> NewCopyStream() = 0;

  // Bytes that Allocate gave and that are still alive, padded; as measured, not as promised.
  virtual int64_t allocated_bytes() const = 0;

  // OK while the device answers; UNAVAILABLE DEVICE_LOST from then on.
  virtual absl::Status Check() const { return absl::OkStatus(); }

  // Whether its kernels multiply numbers of bf16 as fast as of fp16. Of GPUs.
  virtual bool computes_bf16() const { return true; }

  // Makes the calling thread compute on this device. An executor calls it once.
  virtual void BindThread() {}

  // Gives memory that is allocated and not used back to the driver.
  virtual void ReleaseUnused() {}

 protected:
  Device(std::string name, DeviceKind kind, int index, MemoryBudget* budget)
      : name_(std::move(name)), kind_(kind), index_(index), budget_(budget) {}

 private:
  const std::string name_;
  const DeviceKind kind_;
  const int index_;
  MemoryBudget* const budget_;
};

// The host itself: allocations are plain, the budget is the RamBudget.
class CpuDevice : public Device {
 public:
  explicit CpuDevice(RamBudget* ram) : Device("cpu", DeviceKind::kCpu, 0, ram) {}
  absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes) override;
  absl::Status CopyIn(void* to, const void* from, int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<CopyStream>> NewCopyStream() override;
  int64_t allocated_bytes() const override { return *allocated_; }

 private:
  std::shared_ptr<std::atomic<int64_t>> allocated_ = std::make_shared<std::atomic<int64_t>>(0);
};

// A device that is not there: its memory is host memory in a ledger of its own, its kernels are the CPU's.
// Residency, streaming, offload and out-of-memory run for real on a machine without a GPU. Faults can be
// injected.
class SimDevice : public Device {
 public:
  struct Options {
    int index = 0;
    int64_t memory_bytes = 0;
    double bandwidth = 0;  // of copies, bytes per second; 0: as fast as the machine copies
    // Counted from the start: the n-th allocation / copy fails once; the device is lost at the n-th of
    // either.
    int64_t fail_allocation = 0;
    int64_t fail_copy = 0;
    int64_t lose_after = 0;
  };
  explicit SimDevice(const Options& options);
  ~SimDevice() override;

  absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes) override;
  absl::Status CopyIn(void* to, const void* from, int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<CopyStream>> NewCopyStream() override;
  int64_t allocated_bytes() const override;
  absl::Status Check() const override;

  // Faults, counted from now: the n-th Allocate / copy fails once (1 = the next one, 0 = never).
  void FailAllocation(int64_t n);
  void FailCopy(int64_t n);
  // From now on every call fails with DEVICE_LOST.
  void Lose();
  // What others take of this device's memory.
  void SetForeignBytes(int64_t bytes);

 private:
  class Stream;
  struct State;

  DeviceBudget own_budget_;
  const std::shared_ptr<State> state_;  // shared with memory and streams, which may end later
};

// "cpu", "sim:0=8GiB", "sim:1=8GiB,bandwidth=2GiB" → a device. Further keys of a sim, for tests:
// fail_allocation, fail_copy, lose_after (see SimDevice::Options). "cuda:0", "cuda:0=20GiB" and
// "cuda:GPU-5a0e…=20GiB" (a UUID, or how it begins) load the plug-in; the size is a cap, by default what the
// device has. `ram` is the budget of `cpu`, and of pinned staging memory. Errors: INVALID_ARGUMENT with the
// spelling that is understood; UNAVAILABLE DEVICE_NOT_FOUND for a cuda device that is not there.
absl::StatusOr<std::unique_ptr<Device>> MakeDevice(absl::string_view spec, RamBudget* ram);

// "8GiB", "512MB", "1000000" → bytes. Errors: INVALID_ARGUMENT.
absl::StatusOr<int64_t> ParseBytes(absl::string_view text);

}  // namespace latentd

#endif  // LATENTD_CACHE_DEVICE_H_
