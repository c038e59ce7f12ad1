#include "cache/fault_injection.h"

#include <array>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "cache/error.h"

namespace latentd {
namespace {

constexpr size_t kPoints = 6;
std::atomic<int> armed_point{-1};
std::atomic<int64_t> countdown{0};
std::array<std::atomic<int64_t>, kPoints> passed{};

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
  }
  return absl::InternalError(message);
}

}  // namespace

void FaultInjector::Arm(FaultPoint point, int64_t n) {
  countdown = n;
  armed_point = static_cast<int>(point);
}

bool FaultInjector::Disarm() {
  armed_point = -1;
  return countdown <= 0;
}

int64_t FaultInjector::Passed(FaultPoint point) { return passed[static_cast<size_t>(point)]; }

absl::Status MaybeFail(FaultPoint point, absl::string_view what) {
  const int armed = armed_point.load(std::memory_order_relaxed);
  if (armed < 0) return absl::OkStatus();
  ++passed[static_cast<size_t>(point)];
  if (armed != static_cast<int>(point) || --countdown != 0) return absl::OkStatus();
  return Failure(point, what);
}

}  // namespace latentd
