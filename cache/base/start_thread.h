// Threads whose making may fail: a system gives no more than `ulimit -u`, a cgroup's pids.max or systemd's
// TasksMax allow, and std::thread then throws, which ends a process that does not expect it. Threads
// that are made while the server runs are made here.
#ifndef LATENTD_CACHE_BASE_START_THREAD_H_
#define LATENTD_CACHE_BASE_START_THREAD_H_

#include <functional>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

// A thread that runs `body`. `what` stands in the message of the error. Errors: RESOURCE_EXHAUSTED
// NO_THREADS.
absl::StatusOr<std::thread> StartThread(absl::string_view what, std::function<void()> body);

// That error, for whoever caught std::system_error; `why` is its text.
absl::Status NoThread(absl::string_view what, absl::string_view why);

}  // namespace latentd

#endif  // LATENTD_CACHE_BASE_START_THREAD_H_
