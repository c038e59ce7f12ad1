// How much memory tensor code takes while it runs: the high-water mark of what LibTorch's CPU allocator gave
// to this thread and has not got back. Costs a lock and a table entry for each tensor, so it is for the runs
// that calibrate estimates, not for all.
//
//   MemoryMeter meter;
//   ... tensor code ...
//   int64_t peak = meter.peak_bytes();
#ifndef LATENTD_SERVER_RUNTIME_MEMORY_METER_H_
#define LATENTD_SERVER_RUNTIME_MEMORY_METER_H_

#include <cstdint>
#include <memory>

#include "c10/util/ThreadLocalDebugInfo.h"

namespace latentd {

class MemoryMeter {
 public:
  // Counts the calling thread from here to its end. One at a time per thread.
  MemoryMeter();
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  // Since construction. What was allocated before and is freed now counts in neither.
  int64_t peak_bytes() const;
  int64_t net_bytes() const;

 private:
  class Counter;
  const std::shared_ptr<Counter> counter_;
  const c10::DebugInfoGuard guard_;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_MEMORY_METER_H_
