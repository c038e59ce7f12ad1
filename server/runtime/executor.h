// One thread per device that runs slices, in the order of ReadyQueue: the highest priority first, then round
// robin, so that sessions on one device take turns step by step.
#ifndef LATENTD_SERVER_RUNTIME_EXECUTOR_H_
#define LATENTD_SERVER_RUNTIME_EXECUTOR_H_

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cache/base/mutex.h"
#include "cache/device.h"
#include "server/runtime/ready_queue.h"
#include "server/runtime/sliced_task.h"

namespace latentd {

class Executor {
 public:
  using Clock = std::function<absl::Time()>;

  // `threads`: compute threads of this executor; executors × threads should not exceed the cores.
  Executor(Device* device, int threads, AgeingPolicy ageing = {}, Clock clock = absl::Now);
  // Finishes the slice that runs; waiting tasks are let go.
  ~Executor();

  // Thread-safe. Puts a task behind those of its priority.
  void Submit(std::shared_ptr<SlicedTask> task);

  // Lets every task that is ready and does not run give way, if it should (SlicedTask::ShouldGiveWay); after
  // each of its slices a task is asked anyway. Runs GiveWay on the caller's thread. Returns how many did.
  // Thread-safe.
  int LetGiveWay();

  Device& device() const { return *device_; }
  int threads() const { return threads_; }
  // Tasks that are running or ready to.
  int load() const;

  // Jobs that were placed here and are not over, whatever they do at the moment; for placement.
  int jobs() const { return jobs_; }
  void AddJob() { ++jobs_; }
  void RemoveJob() { --jobs_; }
  bool idle() const { return jobs() == 0 && load() == 0; }

 private:
  void Run();

  Device* const device_;
  const int threads_;
  const Clock clock_;
  std::atomic<int> jobs_ = 0;
  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int running_ ABSL_GUARDED_BY(mu_) = 0;
  int giving_way_ ABSL_GUARDED_BY(mu_) = 0;  // taken out of ready_ for that
  ReadyQueue ready_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_EXECUTOR_H_
