// Everything computes on the device's default stream, which is every thread's current stream unless somebody
// changes it. Memory is given in that stream's order, whoever asks for it, and given back in that order: what
// is queued on it may still read memory that is free, and whatever uses the memory next is queued behind it.
// Copies are the one thing on other streams; they start behind a mark in the default stream (so behind the
// last use of the memory that they overwrite) and end in one before anything can read or free what they
// wrote. So no block is ever recorded on a second stream.
#include "cache/cuda/cuda_device.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cache/base/error.h"
#include "cache/base/mutex.h"
#include "cache/cuda/cuda_errors.h"
#include "cache/cuda/nvml.h"
#include "cache/cuda/staged_copies.h"

namespace latentd {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr int kStagingBuffers = 3;  // one is filled, one is read, one is in between
constexpr int64_t kStagingBufferBytes = 16 << 20;

// The device is current while this lives. Nothing here throws, and the device that was current before gets no
// context by becoming so again.
class CurrentDevice {
 public:
  explicit CurrentDevice(c10::DeviceIndex index) {
    error_ = c10::cuda::GetDevice(&before_);
    if (error_ == cudaSuccess) error_ = c10::cuda::SetDevice(index, /*force=*/true);
  }
  ~CurrentDevice() {
    try {
      if (before_ >= 0) (void)c10::cuda::MaybeSetDevice(before_);
    } catch (const std::exception&) {
      // The next call names its device itself.
    }
  }
  cudaError_t error() const { return error_; }

 private:
  c10::DeviceIndex before_ = -1;
  cudaError_t error_ = cudaSuccess;
};

// What memory and streams need of their device, and share with it: they may end later.
struct State {
  std::string name;
  c10::DeviceIndex index = 0;
  int64_t total_bytes = 0;
  absl::Status (*maybe_fail)(FaultPoint, absl::string_view) = nullptr;
  std::shared_ptr<const Nvml> nvml;
  void* nvml_device = nullptr;

  std::atomic<int64_t> allocated{0};
  std::atomic<bool> used{false};  // by an allocation or a stream: so there may be a context
  std::atomic<bool> lost{false};

  Mutex foreign_mu;
  absl::Time foreign_asked ABSL_GUARDED_BY(foreign_mu) = absl::InfinitePast();
  int64_t foreign ABSL_GUARDED_BY(foreign_mu) = 0;

  absl::Status CheckLost() const {
    if (!lost) return absl::OkStatus();
    return MakeError(absl::StatusCode::kUnavailable, "DEVICE_LOST",
                     absl::StrCat(name, " is lost; restart the daemon to use it again"), {{"device", name}});
  }

  absl::Status Failed(CudaFailure failure, bool copying, absl::string_view what, absl::string_view why) {
    if (failure == CudaFailure::kOutOfMemory) {
      return MakeError(absl::StatusCode::kResourceExhausted, "DEVICE_OUT_OF_MEMORY",
                       absl::StrCat(what, " ", name, ": ", why), {{"device", name}});
    }
    if (failure == CudaFailure::kLost) lost = true;
    if (failure != CudaFailure::kLost && copying) {
      return MakeError(absl::StatusCode::kInternal, "COPY_FAILED", absl::StrCat(what, " ", name, ": ", why),
                       {{"device", name}});
    }
    return MakeError(
        absl::StatusCode::kUnavailable, "DEVICE_LOST",
        absl::StrCat(what, " ", name, ": ", why,
                     failure == CudaFailure::kLost ? "; restart the daemon to use it again" : ""),
        {{"device", name}});
  }

  // Runs CUDA and LibTorch calls with the device current. `what` stands in messages ("copy to"). Whatever is
  // thrown becomes a status: DEVICE_OUT_OF_MEMORY where it is about that, else DEVICE_LOST, or COPY_FAILED
  // when `copying` and the device may go on.
  absl::Status Run(absl::string_view what, bool copying, absl::FunctionRef<cudaError_t()> body) {
    RETURN_IF_ERROR(CheckLost());
    const CurrentDevice current(index);
    try {
      const cudaError_t error = current.error() != cudaSuccess ? current.error() : body();
      if (error == cudaSuccess) return absl::OkStatus();
      (void)cudaGetLastError();  // else LibTorch's next check takes it for its own
      return Failed(ClassifyCudaError(error), copying, what,
                    absl::StrCat(cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
    } catch (const c10::AcceleratorError& e) {
      (void)cudaGetLastError();
      return Failed(ClassifyCudaError(static_cast<cudaError_t>(e.get_error_code())), copying, what,
                    e.what_without_backtrace());
    } catch (const c10::OutOfMemoryError& e) {
      return Failed(CudaFailure::kOutOfMemory, copying, what, e.what_without_backtrace());
    } catch (const c10::Error& e) {
      return Failed(CudaFailure::kOther, copying, what, e.what_without_backtrace());
    } catch (const std::exception& e) {
      return Failed(CudaFailure::kOther, copying, what, e.what());
    }
  }

  // LibTorch's side of the first use. Once per process in truth; cheap when done.
  static void Prepare() { at::globalContext().lazyInitDevice(at::kCUDA); }

  bool HasContext() const {
    try {
      return used || c10::cuda::hasPrimaryContext(index);
    } catch (const std::exception&) {
      return false;
    }
  }

  // What this process holds for tensors, in use or kept for later.
  int64_t ReservedBytes() const {
    if (!used) return 0;
    try {
      return allocator::getDeviceStats(index)
          .reserved_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)]
          .current;
    } catch (const std::exception&) {
      return 0;
    }
  }

  // Everything that is used on the device, by whom soever.
  std::optional<int64_t> UsedBytes() {
    if (nvml_device != nullptr) {
      const std::optional<Nvml::Memory> memory = nvml->MemoryOf(nvml_device);
      if (memory.has_value()) return memory->used_bytes;
    }
    if (lost || !HasContext()) return std::nullopt;
    size_t free = 0, total = 0;
    const absl::Status status = Run("memory of", false, [&] { return cudaMemGetInfo(&free, &total); });
    if (!status.ok()) return std::nullopt;
    return static_cast<int64_t>(total - free);
  }

  // Used by others: other processes, and this one's contexts, kernels and libraries.
  int64_t ForeignBytes() {
    constexpr absl::Duration kValid = absl::Milliseconds(20);  // the driver takes up to a millisecond
    MutexLock lock(&foreign_mu);
    if (absl::Now() - foreign_asked < kValid) return foreign;
    // The two numbers have to be of one moment, or memory that comes or goes between them counts as foreign.
    for (int i = 0; i < 3; ++i) {
      const int64_t before = ReservedBytes();
      const std::optional<int64_t> used_bytes = UsedBytes();
      if (!used_bytes.has_value()) break;
      const int64_t after = ReservedBytes();
      foreign = std::max<int64_t>(0, *used_bytes - std::max(before, after));
      if (before == after) break;
    }
    foreign_asked = absl::Now();
    return foreign;
  }
};

// The copies of one CopyStream: a stream of LibTorch's pool, and pinned memory.
class CudaCopyEngine : public CopyEngine {
 public:
  static absl::StatusOr<std::unique_ptr<CudaCopyEngine>> Create(std::shared_ptr<State> state,
                                                                Reservation staging) {
    auto engine = std::unique_ptr<CudaCopyEngine>(new CudaCopyEngine(std::move(state), std::move(staging)));
    State& device = *engine->state_;
    cudaError_t pinning = cudaSuccess;
    RETURN_IF_ERROR(device.Run("a stream for copies to", true, [&] {
      State::Prepare();
      device.used = true;
      engine->stream_ = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index).stream();
      pinning = cudaHostAlloc(&engine->pinned_, kStagingBuffers * kStagingBufferBytes, cudaHostAllocDefault);
      return pinning == cudaErrorMemoryAllocation ? cudaSuccess : pinning;
    }));
    if (pinning != cudaSuccess) {
      (void)cudaGetLastError();
      return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                       absl::StrCat("the driver cannot pin ", kStagingBuffers * kStagingBufferBytes,
                                    " bytes of host memory for copies to ", device.name));
    }
    return engine;
  }

  ~CudaCopyEngine() override {
    if (pinned_ != nullptr) (void)cudaFreeHost(pinned_);
  }

  std::vector<void*> buffers() const {
    std::vector<void*> buffers;
    for (int i = 0; i < kStagingBuffers; ++i) {
      buffers.push_back(static_cast<char*>(pinned_) + i * kStagingBufferBytes);
    }
    return buffers;
  }

  absl::StatusOr<Mark> MarkCompute() override {
    return NewMark([this] { return c10::cuda::getCurrentCUDAStream(state_->index).stream(); });
  }
  absl::Status ComputeAfter(const Mark& mark) override {
    return state_->Run("computing after a copy to", true, [&] {
      return cudaStreamWaitEvent(c10::cuda::getCurrentCUDAStream(state_->index).stream(), EventOf(mark), 0);
    });
  }

  absl::Status CopyAfter(const Mark& mark) override {
    return state_->Run("copy to", true, [&] { return cudaStreamWaitEvent(stream_, EventOf(mark), 0); });
  }
  absl::Status Copy(void* to, const void* pinned, int64_t bytes) override {
    RETURN_IF_ERROR(state_->maybe_fail(FaultPoint::kCopy, state_->name));
    return state_->Run("copy to", true, [&] {
      return cudaMemcpyAsync(to, pinned, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_);
    });
  }
  absl::StatusOr<Mark> MarkCopies() override {
    return NewMark([this] { return stream_; });
  }

  absl::Status Wait(const Mark& mark) override {
    return state_->Run("copy to", true, [&] { return cudaEventSynchronize(EventOf(mark)); });
  }
  // Not through Run: a device that is lost is asked too. It then answers at once, with the error, and copies
  // nothing any more.
  void Drain() override {
    if (stream_ != nullptr && cudaStreamSynchronize(stream_) != cudaSuccess) (void)cudaGetLastError();
  }

 private:
  // Ends without a word, at any time and on any thread, unlike LibTorch's: that one may throw out of its
  // destructor once the device is lost.
  struct Event {
    cudaEvent_t event = nullptr;
    ~Event() {
      if (event != nullptr) (void)cudaEventDestroy(event);
    }
  };
  static cudaEvent_t EventOf(const Mark& mark) { return static_cast<const Event*>(mark.get())->event; }

  CudaCopyEngine(std::shared_ptr<State> state, Reservation staging)
      : state_(std::move(state)), staging_(std::move(staging)) {}

  absl::StatusOr<Mark> NewMark(absl::FunctionRef<cudaStream_t()> stream) {
    auto event = std::make_shared<Event>();
    RETURN_IF_ERROR(state_->Run("copy to", true, [&] {
      // Whoever waits for it sleeps: the copy thread spends most of its time there.
      const cudaError_t error =
          cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming | cudaEventBlockingSync);
      return error != cudaSuccess ? error : cudaEventRecord(event->event, stream());
    }));
    return event;
  }

  const std::shared_ptr<State> state_;
  const Reservation staging_;  // of pinned_; ends after it
  cudaStream_t stream_ = nullptr;
  void* pinned_ = nullptr;
};

class CudaDevice : public Device {
 public:
  CudaDevice(std::shared_ptr<State> state, int64_t cap_bytes, RamBudget* ram)
      : Device(state->name, DeviceKind::kCuda, state->index, &own_budget_),
        own_budget_(state->name, cap_bytes),
        state_(std::move(state)),
        ram_(ram) {
    // What others take beyond the part that the cap leaves them: that part is why there is a cap.
    own_budget_.set_foreign(
        [this] { return state_->ForeignBytes() - (state_->total_bytes - own_budget_.stats().cap_bytes); });
  }

  // From Ampere on.
  bool computes_bf16() const override {
    int major = 0;
    const bool known =
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, state_->index) == cudaSuccess;
    return known && major >= 8;
  }

  absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes) override {
    RETURN_IF_ERROR(state_->CheckLost());
    RETURN_IF_ERROR(state_->maybe_fail(FaultPoint::kAllocate, name()));
    const int64_t padded = PaddedBytes(bytes);
    const auto size = static_cast<size_t>(std::max(padded, kDeviceAlignment));
    void* memory = nullptr;
    RETURN_IF_ERROR(state_->Run("memory of", false, [&] {
      State::Prepare();
      state_->used = true;
      memory = TryAllocate(size);
      if (memory != nullptr) return cudaSuccess;
      // The allocator has given back what it kept of this stream; what others left may be in the way still.
      allocator::emptyCache();
      memory = TryAllocate(size);
      return cudaSuccess;
    }));
    if (memory == nullptr) {
      return MakeError(absl::StatusCode::kResourceExhausted, "DEVICE_OUT_OF_MEMORY",
                       absl::StrCat("allocation of ", bytes, " bytes on ", name(), " failed"),
                       {{"device", name()}, {"needed_bytes", absl::StrCat(bytes)}});
    }
    state_->allocated += padded;
    return std::shared_ptr<void>(memory, [s = state_, padded](void* p) {
      try {
        allocator::raw_delete(p);
      } catch (const std::exception&) {
        // At the end of the process, or of the device: there is nothing to give back to.
      }
      s->allocated -= padded;
    });
  }

  // In the default stream, so behind the last use that the memory had before it was given. From pageable
  // memory the driver copies through a buffer of its own.
  absl::Status CopyIn(void* to, const void* from, int64_t bytes) override {
    RETURN_IF_ERROR(state_->CheckLost());
    RETURN_IF_ERROR(state_->maybe_fail(FaultPoint::kCopy, name()));
    if (bytes == 0) return absl::OkStatus();
    return state_->Run("copy to", true, [&] {
      const cudaStream_t stream = c10::cuda::getDefaultCUDAStream(state_->index).stream();
      const cudaError_t error =
          cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream);
      return error != cudaSuccess ? error : cudaStreamSynchronize(stream);
    });
  }

  absl::StatusOr<std::unique_ptr<CopyStream>> NewCopyStream() override {
    RETURN_IF_ERROR(state_->CheckLost());
    const std::string what = absl::StrCat("pinned memory for copies to ", name());
    // Said to the program's injector: the budget asks the plug-in's.
    RETURN_IF_ERROR(state_->maybe_fail(FaultPoint::kReserve, what));
    // Without waiting: whose wait this would be, the budget could not know, and so not find who waits in a
    // circle. Never committed: it stays somebody's promise, not a record of the cache.
    ASSIGN_OR_RETURN(Reservation staging, ram_->TryReserve({.bytes = kStagingBuffers * kStagingBufferBytes,
                                                            .use = MemoryUse::kStaging,
                                                            .owner = name(),
                                                            .what = what}));
    ASSIGN_OR_RETURN(std::unique_ptr<CudaCopyEngine> engine,
                     CudaCopyEngine::Create(state_, std::move(staging)));
    std::vector<void*> buffers = engine->buffers();
    return std::make_unique<StagedCopies>(std::move(engine), std::move(buffers), kStagingBufferBytes);
  }

  int64_t allocated_bytes() const override { return state_->allocated; }

  // Asks the device, too: a kernel that died is seen by whoever asks next.
  absl::Status Check() const override {
    RETURN_IF_ERROR(state_->CheckLost());
    if (!state_->used) return absl::OkStatus();
    const absl::Status status = state_->Run("state of", false, [&] {
      const cudaError_t error = cudaStreamQuery(c10::cuda::getDefaultCUDAStream(state_->index).stream());
      return error == cudaErrorNotReady ? cudaSuccess : error;
    });
    return state_->lost ? status : absl::OkStatus();
  }

  // Says which device this thread means when it names none. Since CUDA 12 to set the device is to make its
  // context; MaybeSetDevice only remembers it where there is no context yet. Nothing else is to be bound: the
  // default stream is the current one already.
  void BindThread() override {
    try {
      (void)c10::cuda::MaybeSetDevice(state_->index);
    } catch (const std::exception&) {
      // Seen by whatever is computed first.
    }
  }

  // Of all devices of this process: LibTorch offers no less. Waits for what is computed.
  void ReleaseUnused() override {
    if (!state_->used || state_->lost) return;
    (void)state_->Run("memory of", false, [] {
      allocator::emptyCache();
      return cudaSuccess;
    });
  }

 private:
  // Null when there is no room. Throws.
  void* TryAllocate(size_t bytes) {
    try {
      return allocator::raw_alloc_with_stream(bytes, c10::cuda::getDefaultCUDAStream(state_->index).stream());
    } catch (const c10::OutOfMemoryError&) {
      return nullptr;
    } catch (const c10::AcceleratorError&) {
      throw;
    } catch (const c10::Error&) {
      // To say who has the memory, the allocator asks NVML, and asserts where that does not answer.
      size_t free = 0, total = 0;
      if (cudaMemGetInfo(&free, &total) == cudaSuccess && free < bytes) return nullptr;
      throw;
    }
  }

  DeviceBudget own_budget_;
  const std::shared_ptr<State> state_;
  RamBudget* const ram_;
};

// ------------------------------------------------------------------------------------------------- entry

absl::Status NotFound(int index, absl::string_view why) {
  return MakeError(absl::StatusCode::kUnavailable, "DEVICE_NOT_FOUND",
                   absl::StrCat("cuda:", index, ": ", why), {{"device", absl::StrCat("cuda:", index)}});
}

absl::Status CountDevices(int index, int* count) {
  *count = 0;
  const cudaError_t error = cudaGetDeviceCount(count);
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();
  *count = 0;
  switch (error) {
    case cudaErrorInsufficientDriver: {
      int driver = 0;
      if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) {
        return NotFound(index, "there is no NVIDIA driver; install one, or use cpu or sim:N=SIZE");
      }
      return NotFound(index,
                      absl::StrFormat("the NVIDIA driver knows CUDA up to %d.%d only, and %d.%d is used; "
                                      "install a newer driver",
                                      driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
                                      CUDART_VERSION % 1000 / 10));
    }
    case cudaErrorNoDevice:
      return NotFound(index,
                      "the NVIDIA driver shows no device to this process; see what nvidia-smi says, and "
                      "whether CUDA_VISIBLE_DEVICES, the container or the unit hides it");
    default:
      return NotFound(index, absl::StrCat("the NVIDIA driver does not work: ", cudaGetErrorName(error), ": ",
                                          cudaGetErrorString(error), "; see what nvidia-smi says"));
  }
}

int DeviceCount() {
  int count = 0;
  (void)CountDevices(0, &count);
  return count;
}

// "5a0e1f2c-…", as nvidia-smi prints it behind "GPU-".
std::string UuidText(const cudaUUID_t& uuid) {
  std::string text;
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

// A device that does not say its own has an empty one, which nobody can name: indexes stay right.
void DeviceUuids(std::vector<std::string>* uuids) {
  uuids->clear();
  for (int i = 0, count = DeviceCount(); i < count; ++i) {
    cudaDeviceProp properties;
    const bool known = cudaGetDeviceProperties(&properties, i) == cudaSuccess;
    if (!known) (void)cudaGetLastError();
    uuids->push_back(known ? UuidText(properties.uuid) : "");
  }
}

// The device for NVML; null when NVML knows it not, or knows the whole of which CUDA shows a part (MIG).
void* FindInNvml(const Nvml& nvml, const cudaDeviceProp& properties) {
  const std::string id = UuidText(properties.uuid);
  void* device =
      nvml.Find({"MIG-" + id, "GPU-" + id}, absl::StrFormat("%08x:%02x:%02x.0", properties.pciDomainID,
                                                            properties.pciBusID, properties.pciDeviceID));
  if (device == nullptr) return nullptr;
  const std::optional<Nvml::Memory> memory = nvml.MemoryOf(device);
  const auto total = static_cast<int64_t>(properties.totalGlobalMem);
  if (!memory.has_value() || memory->total_bytes > total + total / 4) return nullptr;
  return device;
}

absl::StatusOr<std::unique_ptr<Device>> MakeDevice(const CudaDeviceRequest& request) {
  int count = 0;
  RETURN_IF_ERROR(CountDevices(request.index, &count));
  if (request.index < 0 || request.index >= count) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return NotFound(
        request.index,
        absl::StrCat("this process sees ", count, count == 1 ? " CUDA device" : " CUDA devices",
                     ", numbered from 0",
                     visible == nullptr ? "" : absl::StrCat("; CUDA_VISIBLE_DEVICES is ", visible)));
  }
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, request.index);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return NotFound(request.index, absl::StrCat("does not say what it is: ", cudaGetErrorName(error), ": ",
                                                cudaGetErrorString(error)));
  }
  static const std::shared_ptr<const Nvml> nvml = Nvml::Open();
  auto state = std::make_shared<State>();
  state->name = absl::StrCat("cuda:", request.index);
  state->index = static_cast<c10::DeviceIndex>(request.index);
  state->total_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  state->maybe_fail = request.maybe_fail;
  state->nvml = nvml;
  if (nvml != nullptr) state->nvml_device = FindInNvml(*nvml, properties);
  const int64_t cap =
      request.cap_bytes > 0 ? std::min(request.cap_bytes, state->total_bytes) : state->total_bytes;
  return std::make_unique<CudaDevice>(std::move(state), cap, request.ram);
}

void MakeDeviceReply(const CudaDeviceRequest& request, CudaDeviceReply* reply) {
  absl::StatusOr<std::unique_ptr<Device>> device = MakeDevice(request);
  reply->status = device.status();
  if (device.ok()) reply->device = *std::move(device);
}

}  // namespace
}  // namespace latentd

const latentd::CudaPluginApi* latentd_cuda_api() {
  static const latentd::CudaPluginApi api = {latentd::kCudaPluginAbi, latentd::DeviceCount,
                                             latentd::DeviceUuids, latentd::MakeDeviceReply};
  return &api;
}
