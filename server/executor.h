// One thread per device that runs slices: the highest priority first, then round robin, so that sessions on
// one device take turns step by step.
#ifndef LATENTD_SERVER_EXECUTOR_H_
#define LATENTD_SERVER_EXECUTOR_H_

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "cache/mutex.h"
#include "cache/device.h"

namespace latentd {

// What an executor runs, a slice at a time.
class SlicedTask {
 public:
  virtual ~SlicedTask() = default;
  // Runs one slice on the executor's thread. Returns true when another slice can run right away; else
  // Parked() is called, the task is let go, and whoever makes it runnable again calls Executor::Submit. Must
  // not throw.
  virtual bool RunSlice() = 0;
  // Called when RunSlice returned false, once the executor counts the task no more: the place to go on from.
  virtual void Parked() {}
  virtual int priority() const = 0;
};

class Executor {
 public:
  // `threads`: compute threads of this executor; executors × threads should not exceed the cores.
  Executor(Device* device, int threads);
  // Finishes the slice that runs; waiting tasks are let go.
  ~Executor();

  // Thread-safe. Puts a task behind those of its priority.
  void Submit(std::shared_ptr<SlicedTask> task);

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
  std::atomic<int> jobs_ = 0;
  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int running_ ABSL_GUARDED_BY(mu_) = 0;
  // By priority, highest first.
  std::map<int, std::deque<std::shared_ptr<SlicedTask>>, std::greater<int>> ready_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_EXECUTOR_H_
