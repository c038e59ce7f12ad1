// A few threads for what may block or take time and needs no device: reading files, waiting for memory,
// decoding and encoding pictures.
//
// A task that waits holds its thread, so the pool grows while all of its threads are busy: waiting jobs must
// not keep others from running the work that would end the wait.
#ifndef LATENTD_SERVER_WORKER_POOL_H_
#define LATENTD_SERVER_WORKER_POOL_H_

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cache/mutex.h"

namespace latentd {

class WorkerPool {
 public:
  // `threads` run at once; up to `max_threads` exist when tasks wait.
  WorkerPool(int threads, int max_threads);
  // Runs what was submitted to its end.
  ~WorkerPool();

  // Thread-safe. Tasks start in order.
  void Submit(std::function<void()> task);

 private:
  void Run();

  const int max_threads_;
  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int idle_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
};

}  // namespace latentd

#endif  // LATENTD_SERVER_WORKER_POOL_H_
