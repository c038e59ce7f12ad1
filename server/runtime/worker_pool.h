// A few threads for what may block or take time and needs no device: reading files, waiting for memory,
// decoding and encoding pictures.
//
// A task that waits holds its thread, so the pool grows while all of its threads are busy: waiting jobs must
// not keep others from running the work that would end the wait. Where the system gives no more threads,
// tasks wait for those that there are.
#ifndef LATENTD_SERVER_RUNTIME_WORKER_POOL_H_
#define LATENTD_SERVER_RUNTIME_WORKER_POOL_H_

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "cache/base/mutex.h"

namespace latentd {

class WorkerPool {
 public:
  // `threads` run at once; up to `max_threads` exist when tasks wait. Errors: RESOURCE_EXHAUSTED NO_THREADS
  // when not even `threads` are to be had.
  static absl::StatusOr<std::unique_ptr<WorkerPool>> Create(int threads, int max_threads);
  // Runs what was submitted to its end.
  ~WorkerPool();

  // Thread-safe. Tasks start in order.
  void Submit(std::function<void()> task);

  int thread_count() const;

 private:
  explicit WorkerPool(int max_threads) : max_threads_(max_threads) {}
  absl::Status AddThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run();

  const int max_threads_;
  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int idle_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  bool short_of_threads_ ABSL_GUARDED_BY(mu_) = false;  // and said so
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_WORKER_POOL_H_
