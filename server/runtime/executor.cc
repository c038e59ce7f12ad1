#include "server/runtime/executor.h"

#include <utility>
#include <vector>

#include "ATen/Parallel.h"

namespace latentd {

Executor::Executor(Device* device, int threads, AgeingPolicy ageing, Clock clock)
    : device_(device), threads_(threads), clock_(std::move(clock)), ready_(ageing), thread_([this] {
        Run();
      }) {}

Executor::~Executor() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  thread_.join();
}

void Executor::Submit(std::shared_ptr<SlicedTask> task) {
  const absl::Time now = clock_();
  MutexLock lock(&mu_);
  ready_.Push(std::move(task), now);
  changed_.Signal();
}

int Executor::LetGiveWay() {
  std::vector<ReadyQueue::Entry> entries;
  {
    MutexLock lock(&mu_);
    entries = ready_.Take([](const SlicedTask& task) { return task.ShouldGiveWay(); });
    giving_way_ += static_cast<int>(entries.size());
  }
  for (const ReadyQueue::Entry& entry : entries) entry.task->GiveWay();
  const auto count = static_cast<int>(entries.size());
  MutexLock lock(&mu_);
  giving_way_ -= count;
  ready_.GiveBack(std::move(entries));
  changed_.Signal();
  return count;
}

int Executor::load() const {
  MutexLock lock(&mu_);
  return running_ + giving_way_ + static_cast<int>(ready_.size());
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
      task = ready_.Pop(clock_());
      running_ = 1;
    }
    const bool more = task->RunSlice();
    if (more && task->ShouldGiveWay()) task->GiveWay();
    const absl::Time now = clock_();
    {
      MutexLock lock(&mu_);
      running_ = 0;
      if (more) ready_.Push(std::move(task), now);
    }
    if (!more) task->Parked();
  }
}

}  // namespace latentd
