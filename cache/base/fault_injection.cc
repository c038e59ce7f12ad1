#include "cache/base/fault_injection.h"

#include <array>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

constexpr size_t kPoints = 8;
std::atomic<int> armed_point{-1};
std::atomic<int64_t> countdown{0};
std::array<std::atomic<int64_t>, kPoints> passed{};
std::function<void()> action;  // written while nothing is armed, read by the one thread whose passing counts

absl::Status Failure(FaultPoint point, absl::string_view what) {
  const std::string message = absl::StrCat(what, ": injected failure");
  switch (point) {
    case FaultPoint::kReserve:
      return MakeError(absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED", message);
    case FaultPoint::kAllocate:
      return MakeError(absl::StatusCode::kResourceExhausted, "DEVICE_OUT_OF_MEMORY", message);
    case FaultPoint::kCopy:
      return MakeError(absl::StatusCode::kInternal, "COPY_FAILED", message);
    case FaultPoint::kOpen:
      return MakeError(absl::StatusCode::kNotFound, "FILE_NOT_FOUND", message);
    case FaultPoint::kRead:
      return MakeError(absl::StatusCode::kDataLoss, "FILE_TRUNCATED", message);
    case FaultPoint::kWatch:
      return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_WATCHES", message);
    case FaultPoint::kThread:
      return MakeError(absl::StatusCode::kResourceExhausted, "NO_THREADS", message);
    case FaultPoint::kWeight:
      return MakeError(absl::StatusCode::kInternal, "INFERENCE_FAILED", message);
  }
  return absl::InternalError(message);
}

}  // namespace

void FaultInjector::Arm(FaultPoint point, int64_t n) { Call(point, n, nullptr); }

void FaultInjector::Call(FaultPoint point, int64_t n, std::function<void()> what) {
  armed_point = -1;
  action = std::move(what);
  countdown = n;
  armed_point = static_cast<int>(point);
}

bool FaultInjector::Disarm() {
  armed_point = -1;
  return countdown <= 0;
}

int64_t FaultInjector::Passed(FaultPoint point) { return passed[static_cast<size_t>(point)]; }

absl::Status MaybeFail(FaultPoint point, absl::string_view what) {
  const int armed = armed_point.load(std::memory_order_acquire);
  if (armed < 0) return absl::OkStatus();
  ++passed[static_cast<size_t>(point)];
  if (armed != static_cast<int>(point) || --countdown != 0) return absl::OkStatus();
  if (action == nullptr) return Failure(point, what);
  action();
  return absl::OkStatus();
}

}  // namespace latentd
