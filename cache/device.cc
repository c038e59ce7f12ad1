#include "cache/device.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "cache/base/mutex.h"
#include "cache/base/start_thread.h"
#include "cache/cuda_plugin.h"

namespace latentd {
namespace {

std::shared_ptr<void> AlignedHostMemory(int64_t bytes) {
  void* p =
      std::aligned_alloc(kDeviceAlignment, static_cast<size_t>(std::max(PaddedBytes(bytes), PaddedBytes(1))));
  if (p == nullptr) return nullptr;
  return std::shared_ptr<void>(p, std::free);
}

absl::Status OutOfMemory(const std::string& device, int64_t bytes) {
  return MakeError(absl::StatusCode::kResourceExhausted, "DEVICE_OUT_OF_MEMORY",
                   absl::StrCat("allocation of ", bytes, " bytes on ", device, " failed"),
                   {{"device", device}, {"needed_bytes", absl::StrCat(bytes)}});
}

// True for exactly one call: the one that brings the counter from 1 to 0.
bool CountsDownToZero(std::atomic<int64_t>& counter) {
  int64_t n = counter.load();
  while (n > 0) {
    if (counter.compare_exchange_weak(n, n - 1)) return n == 1;
  }
  return false;
}

// Memory that counts itself in `count` while it lives.
std::shared_ptr<void> Counted(std::shared_ptr<void> memory, int64_t bytes,
                              std::shared_ptr<std::atomic<int64_t>> count) {
  bytes = PaddedBytes(bytes);
  *count += bytes;
  void* p = memory.get();
  return std::shared_ptr<void>(p,
                               [memory = std::move(memory), count = std::move(count), bytes](void*) mutable {
                                 memory.reset();
                                 *count -= bytes;
                               });
}

// Copies when it is asked to: for devices that compute where the copy would run.
class DirectCopies : public CopyStream {
 public:
  explicit DirectCopies(Device* device) : device_(device) {}
  absl::StatusOr<uint64_t> Begin(std::vector<Piece> pieces) override {
    for (const Piece& piece : pieces) {
      if (status_.ok()) status_ = device_->CopyIn(piece.to, piece.from, piece.bytes);
    }
    if (!status_.ok()) return status_;
    return ++begun_;
  }
  absl::Status Await(uint64_t) override { return status_; }

 private:
  Device* const device_;
  uint64_t begun_ = 0;
  absl::Status status_;
};

}  // namespace

absl::string_view DeviceKindName(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::kCpu:
      return "cpu";
    case DeviceKind::kSim:
      return "sim";
    case DeviceKind::kCuda:
      return "cuda";
  }
  return "";
}

// ------------------------------------------------------------------------------------------------- cpu

absl::StatusOr<std::shared_ptr<void>> CpuDevice::Allocate(int64_t bytes) {
  RETURN_IF_ERROR(MaybeFail(FaultPoint::kAllocate, name()));
  auto memory = AlignedHostMemory(bytes);
  if (memory == nullptr) return OutOfMemory(name(), bytes);
  return Counted(std::move(memory), bytes, allocated_);
}

absl::Status CpuDevice::CopyIn(void* to, const void* from, int64_t bytes) {
  RETURN_IF_ERROR(MaybeFail(FaultPoint::kCopy, name()));
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CopyStream>> CpuDevice::NewCopyStream() {
  return std::make_unique<DirectCopies>(this);
}

// ------------------------------------------------------------------------------------------------- sim

struct SimDevice::State {
  std::string name;
  double bandwidth = 0;
  std::atomic<int64_t> foreign{0};
  std::shared_ptr<std::atomic<int64_t>> allocated = std::make_shared<std::atomic<int64_t>>(0);
  std::atomic<int64_t> fail_allocation{0};
  std::atomic<int64_t> fail_copy{0};
  std::atomic<int64_t> lose_after{0};
  std::atomic<bool> lost{false};
  Mutex bus_mu;
  absl::Time bus_free ABSL_GUARDED_BY(bus_mu) =
      absl::InfinitePast();  // when the last copy's bytes are through

  absl::Status CheckLost() const {
    if (!lost) return absl::OkStatus();
    return MakeError(absl::StatusCode::kUnavailable, "DEVICE_LOST", absl::StrCat(name, " is lost"),
                     {{"device", name}});
  }

  // One bus for all copies. Small debts are carried on: a sleep is never shorter than this.
  void WaitForBus(absl::Time start, int64_t bytes) {
    constexpr absl::Duration kShortest = absl::Microseconds(200);
    absl::Time due;
    {
      MutexLock lock(&bus_mu);
      bus_free = std::max(bus_free, start) + absl::Seconds(static_cast<double>(bytes) / bandwidth);
      due = bus_free;
    }
    const absl::Duration early = due - absl::Now();
    if (early > kShortest) absl::SleepFor(early);
  }

  absl::Status Copy(void* to, const void* from, int64_t bytes) {
    if (CountsDownToZero(lose_after)) lost = true;
    RETURN_IF_ERROR(CheckLost());
    RETURN_IF_ERROR(MaybeFail(FaultPoint::kCopy, name));
    if (CountsDownToZero(fail_copy)) {
      return MakeError(absl::StatusCode::kInternal, "COPY_FAILED", absl::StrCat("copy to ", name, " failed"),
                       {{"device", name}});
    }
    const absl::Time start = absl::Now();
    std::memcpy(to, from, static_cast<size_t>(bytes));
    if (bandwidth > 0) WaitForBus(start, bytes);
    return absl::OkStatus();
  }
};

// A thread that copies. Computing is synchronous here, so a copy never has to wait for it.
class SimDevice::Stream : public CopyStream {
 public:
  static absl::StatusOr<std::unique_ptr<CopyStream>> Create(std::shared_ptr<State> state) {
    auto stream = std::make_unique<Stream>(std::move(state));
    ASSIGN_OR_RETURN(stream->thread_, StartThread("copies to a device", [s = stream.get()] { s->Run(); }));
    return stream;
  }

  explicit Stream(std::shared_ptr<State> state) : state_(std::move(state)) {}
  ~Stream() override {
    {
      MutexLock lock(&mu_);
      stopping_ = true;
      changed_.SignalAll();
    }
    if (thread_.joinable()) thread_.join();
  }

  absl::StatusOr<uint64_t> Begin(std::vector<Piece> pieces) override {
    MutexLock lock(&mu_);
    if (!status_.ok()) return status_;
    queue_.push_back(std::move(pieces));
    changed_.SignalAll();
    return ++begun_;
  }

  absl::Status Await(uint64_t copy) override {
    MutexLock lock(&mu_);
    while (status_.ok() && done_ < copy) changed_.Wait(&mu_);
    return status_;
  }

 private:
  void Run() {
    while (true) {
      std::vector<Piece> pieces;
      {
        MutexLock lock(&mu_);
        while (queue_.empty() && !stopping_) changed_.Wait(&mu_);
        if (queue_.empty()) return;
        pieces = std::move(queue_.front());
        queue_.pop_front();
      }
      absl::Status status;
      for (const Piece& piece : pieces) {
        if (status.ok()) status = state_->Copy(piece.to, piece.from, piece.bytes);
      }
      MutexLock lock(&mu_);
      if (status_.ok()) status_ = status;
      ++done_;
      changed_.SignalAll();
    }
  }

  const std::shared_ptr<State> state_;
  Mutex mu_;
  CondVar changed_;
  std::deque<std::vector<Piece>> queue_ ABSL_GUARDED_BY(mu_);
  uint64_t begun_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t done_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

SimDevice::SimDevice(const Options& options)
    : Device(absl::StrCat("sim:", options.index), DeviceKind::kSim, options.index, &own_budget_),
      own_budget_(absl::StrCat("sim:", options.index), options.memory_bytes),
      state_(std::make_shared<State>()) {
  state_->name = name();
  state_->bandwidth = options.bandwidth;
  state_->fail_allocation = options.fail_allocation;
  state_->fail_copy = options.fail_copy;
  state_->lose_after = options.lose_after;
  own_budget_.set_foreign([state = state_] { return state->foreign.load(); });
}

SimDevice::~SimDevice() = default;

absl::StatusOr<std::shared_ptr<void>> SimDevice::Allocate(int64_t bytes) {
  if (CountsDownToZero(state_->lose_after)) state_->lost = true;
  RETURN_IF_ERROR(state_->CheckLost());
  RETURN_IF_ERROR(MaybeFail(FaultPoint::kAllocate, name()));
  if (CountsDownToZero(state_->fail_allocation)) return OutOfMemory(name(), bytes);
  auto memory = AlignedHostMemory(bytes);
  if (memory == nullptr) return OutOfMemory(name(), bytes);
  return Counted(std::move(memory), bytes, state_->allocated);
}

absl::Status SimDevice::CopyIn(void* to, const void* from, int64_t bytes) {
  return state_->Copy(to, from, bytes);
}

absl::StatusOr<std::unique_ptr<CopyStream>> SimDevice::NewCopyStream() {
  RETURN_IF_ERROR(state_->CheckLost());
  return Stream::Create(state_);
}

int64_t SimDevice::allocated_bytes() const { return *state_->allocated; }
absl::Status SimDevice::Check() const { return state_->CheckLost(); }
void SimDevice::FailAllocation(int64_t n) { state_->fail_allocation = n; }
void SimDevice::FailCopy(int64_t n) { state_->fail_copy = n; }
void SimDevice::Lose() { state_->lost = true; }
void SimDevice::SetForeignBytes(int64_t bytes) {
  state_->foreign = bytes;
  own_budget_.NotifyReclaimable();
}

// -------------------------------------------------------------------------------------------- parsing

absl::StatusOr<int64_t> ParseBytes(absl::string_view text) {
  size_t digits = 0;
  while (digits < text.size() &&
         (std::isdigit(static_cast<unsigned char>(text[digits])) || text[digits] == '.')) {
    ++digits;
  }
  double number = 0;
  if (digits == 0 || !absl::SimpleAtod(text.substr(0, digits), &number)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is no size; write 8GiB, 512MB or a number of bytes"));
  }
  absl::string_view unit = absl::StripAsciiWhitespace(text.substr(digits));
  static const std::pair<absl::string_view, double> kUnits[] = {
      {"", 1},     {"B", 1},    {"KiB", 1024.0}, {"MiB", 1048576.0},       {"GiB", 1073741824.0},
      {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9},     {"TiB", 1099511627776.0}, {"TB", 1e12}};
  for (const auto& [name, factor] : kUnits) {
    if (absl::EqualsIgnoreCase(unit, name)) {
      const double bytes = number * factor;
      if (bytes > 9e18) return absl::InvalidArgumentError(absl::StrCat("'", text, "' is too large"));
      return static_cast<int64_t>(std::llround(bytes));
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown unit in '", text, "'; use KiB, MiB, GiB, KB, MB or GB"));
}

namespace {

constexpr char kSpellings[] = "write cpu, sim:0=8GiB, sim:0=8GiB,bandwidth=2GiB, cuda:0 or cuda:GPU-UUID";

absl::Status BadSpec(absl::string_view spec, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("device '", spec, "' ", why, "; ", kSpellings));
}

// "N=SIZE,key=value,…" after "sim:".
absl::StatusOr<SimDevice::Options> ParseSim(absl::string_view spec, absl::string_view rest) {
  SimDevice::Options options;
  const std::vector<absl::string_view> parts = absl::StrSplit(rest, ',');
  const std::pair<absl::string_view, absl::string_view> first =
      absl::StrSplit(parts[0], absl::MaxSplits('=', 1));
  if (!absl::SimpleAtoi(first.first, &options.index) || options.index < 0)
    return BadSpec(spec, "has no number");
  if (first.second.empty()) return BadSpec(spec, "has no size");
  ASSIGN_OR_RETURN(options.memory_bytes, ParseBytes(first.second));
  for (size_t i = 1; i < parts.size(); ++i) {
    const std::pair<absl::string_view, absl::string_view> option =
        absl::StrSplit(parts[i], absl::MaxSplits('=', 1));
    if (option.first == "bandwidth") {
      ASSIGN_OR_RETURN(const int64_t bandwidth, ParseBytes(option.second));
      options.bandwidth = static_cast<double>(bandwidth);
      continue;
    }
    int64_t* number = option.first == "fail_allocation" ? &options.fail_allocation
                      : option.first == "fail_copy"     ? &options.fail_copy
                      : option.first == "lose_after"    ? &options.lose_after
                                                        : nullptr;
    if (number == nullptr) return BadSpec(spec, absl::StrCat("has an unknown key '", option.first, "'"));
    if (!absl::SimpleAtoi(option.second, number) || *number < 0) {
      return BadSpec(spec, absl::StrCat("gives ", option.first, " no number"));
    }
  }
  return options;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> MakeDevice(absl::string_view spec, RamBudget* ram) {
  if (spec == "cpu") return std::make_unique<CpuDevice>(ram);
  absl::string_view rest = spec;
  if (absl::ConsumePrefix(&rest, "sim:")) {
    ASSIGN_OR_RETURN(const SimDevice::Options options, ParseSim(spec, rest));
    return std::make_unique<SimDevice>(options);
  }
  if (spec == "cuda") return MakeCudaDevice(0, 0, ram);
  if (absl::ConsumePrefix(&rest, "cuda:")) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(rest, absl::MaxSplits('=', 1));
    int index = 0;
    int64_t cap = 0;
    const bool by_uuid = IsGpuUuid(parts.first);
    if (!by_uuid && (!absl::SimpleAtoi(parts.first, &index) || index < 0))
      return BadSpec(spec, "has no number");
    if (absl::StrContains(rest, '=')) {
      ASSIGN_OR_RETURN(cap, ParseBytes(parts.second));
      if (cap <= 0) return BadSpec(spec, "has no size");
    }
    if (by_uuid) {
      ASSIGN_OR_RETURN(index, FindGpu(parts.first, ListCudaGpus()));
    }
    return MakeCudaDevice(index, cap, ram);
  }
  return BadSpec(spec, "is not known");
}

}  // namespace latentd
