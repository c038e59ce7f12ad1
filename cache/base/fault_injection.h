// Places where a test can make things fail: the n-th time that a place is passed, once.
//
// Costs one relaxed load where no test has armed it. Thread-safe.
//
//   FaultInjector::Arm(FaultPoint::kRead, 3);     // the third read from now on fails
//   ... run ...
//   bool reached = FaultInjector::Disarm();       // false: fewer than three were made
#ifndef LATENTD_CACHE_BASE_FAULT_INJECTION_H_
#define LATENTD_CACHE_BASE_FAULT_INJECTION_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace latentd {

enum class FaultPoint {
  kReserve,   // a promise of memory: RESOURCE_EXHAUSTED BUDGET_EXHAUSTED
  kAllocate,  // memory on a device: RESOURCE_EXHAUSTED DEVICE_OUT_OF_MEMORY
  kCopy,      // bytes to a device: INTERNAL COPY_FAILED
  kOpen,      // a file: NOT_FOUND FILE_NOT_FOUND
  kRead,      // a tensor of a file: DATA_LOSS FILE_TRUNCATED
  kWatch,     // a watch of a file: RESOURCE_EXHAUSTED OUT_OF_WATCHES
  kThread,    // a thread: RESOURCE_EXHAUSTED NO_THREADS
  kWeight,    // a weight that a network reads: INTERNAL INFERENCE_FAILED
};

class FaultInjector {
 public:
  // From now on, the n-th passing (1 = the next) of `point` fails, once. Replaces what was armed.
  static void Arm(FaultPoint point, int64_t n);

  // The same, but `what` is called in place of the failure, by the thread that passes; and that passing goes
  // well. For a test that has to act at a moment of a run.
  static void Call(FaultPoint point, int64_t n, std::function<void()> what);

  // Ends it. Returns true when the failure has happened.
  static bool Disarm();

  // How often `point` was passed since the start of the process; counted only while something is armed.
  static int64_t Passed(FaultPoint point);
};

// What the code at a place calls: OK, or the error of that place. `what` stands in its message.
absl::Status MaybeFail(FaultPoint point, absl::string_view what);

}  // namespace latentd

#endif  // LATENTD_CACHE_BASE_FAULT_INJECTION_H_
