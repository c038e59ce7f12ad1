#include "server/worker_pool.h"

namespace latentd {

WorkerPool::WorkerPool(int threads, int max_threads) : max_threads_(max_threads) {
  MutexLock lock(&mu_);
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
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
  if (static_cast<size_t>(idle_) < tasks_.size() && threads_.size() < static_cast<size_t>(max_threads_) && !stopping_) {
    threads_.emplace_back([this] { Run(); });
  }
  changed_.Signal();
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
