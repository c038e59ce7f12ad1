#include "server/runtime/memory_meter.h"

#include <algorithm>

#include "c10/core/Allocator.h"
#include "c10/util/Logging.h"

namespace latentd {

// LibTorch's hook for memory profilers.
class MemoryMeter::Counter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    net_ += bytes;
    peak_ = std::max(peak_, net_);
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t net_ = 0, peak_ = 0;
};

namespace {

// Blocks that are older than the meter are freed under it; LibTorch has a warning for that, which says
// nothing to whoever reads this server's log.
bool SilenceWarnings() {
  constexpr int kErrorsOnly = 2;
  FLAGS_caffe2_log_level = kErrorsOnly;
  return true;
}

}  // namespace

MemoryMeter::MemoryMeter()
    : counter_(std::make_shared<Counter>()), guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {
  [[maybe_unused]] static const bool once = SilenceWarnings();
}

MemoryMeter::~MemoryMeter() = default;

int64_t MemoryMeter::peak_bytes() const { return counter_->peak_; }
int64_t MemoryMeter::net_bytes() const { return counter_->net_; }

}  // namespace latentd
