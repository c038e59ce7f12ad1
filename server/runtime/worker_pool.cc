#include "server/runtime/worker_pool.h"

#include <utility>

#include "cache/base/error.h"
#include "cache/base/start_thread.h"
#include "spdlog/spdlog.h"

namespace latentd {

absl::StatusOr<std::unique_ptr<WorkerPool>> WorkerPool::Create(int threads, int max_threads) {
  auto pool = std::unique_ptr<WorkerPool>(new WorkerPool(max_threads));
  for (int i = 0; i < threads; ++i) {
    MutexLock lock(&pool->mu_);
    RETURN_IF_ERROR(pool->AddThread());
  }
  return pool;
}

absl::Status WorkerPool::AddThread() {
  ASSIGN_OR_RETURN(std::thread thread, StartThread("the worker pool", [this] { Run(); }));
  threads_.push_back(std::move(thread));
  return absl::OkStatus();
}

WorkerPool::~WorkerPool() {
  std::vector<std::thread> threads;
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

void WorkerPool::Submit(std::function<void()> task) {
  MutexLock lock(&mu_);
  tasks_.push_back(std::move(task));
  if (static_cast<size_t>(idle_) < tasks_.size() && threads_.size() < static_cast<size_t>(max_threads_) &&
      !stopping_) {
    if (absl::Status status = AddThread(); !status.ok() && !std::exchange(short_of_threads_, true)) {
      spdlog::warn("tasks wait for the {} workers that there are: {}", threads_.size(),
                   std::string(status.message()));
    }
  }
  changed_.Signal();
}

int WorkerPool::thread_count() const {
  MutexLock lock(&mu_);
  return static_cast<int>(threads_.size());
}

void WorkerPool::Run() {
  MutexLock lock(&mu_);
  while (true) {
    ++idle_;
    while (tasks_.empty() && !stopping_) changed_.Wait(&mu_);
    --idle_;
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    mu_.Unlock();
    task();
    task = nullptr;
    mu_.Lock();
  }
}

}  // namespace latentd
