#include "server/executor.h"

#include "ATen/Parallel.h"

namespace latentd {

Executor::Executor(Device* device, int threads)
    : device_(device), threads_(threads), thread_([this] { Run(); }) {}

Executor::~Executor() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  thread_.join();
}

void Executor::Submit(std::shared_ptr<SlicedTask> task) {
  MutexLock lock(&mu_);
  const int priority = task->priority();
  ready_[priority].push_back(std::move(task));
  changed_.Signal();
}

int Executor::load() const {
  MutexLock lock(&mu_);
  size_t n = static_cast<size_t>(running_);
  for (const auto& [priority, tasks] : ready_) n += tasks.size();
  return static_cast<int>(n);
}

void Executor::Run() {
  device_->BindThread();
  at::set_num_threads(threads_);  // per thread, and the default of threads that start later
  while (true) {
    std::shared_ptr<SlicedTask> task;
    {
      MutexLock lock(&mu_);
      while (ready_.empty() && !stopping_) changed_.Wait(&mu_);
      if (stopping_) return;
      auto best = ready_.begin();
      task = std::move(best->second.front());
      best->second.pop_front();
      if (best->second.empty()) ready_.erase(best);
      running_ = 1;
    }
    const bool more = task->RunSlice();
    {
      MutexLock lock(&mu_);
      running_ = 0;
      if (more) {
        const int priority = task->priority();
        ready_[priority].push_back(std::move(task));
      }
    }
    if (!more) task->Parked();
  }
}

}  // namespace latentd
