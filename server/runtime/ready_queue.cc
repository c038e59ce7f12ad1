#include "server/runtime/ready_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace latentd {

void ReadyQueue::Push(std::shared_ptr<SlicedTask> task, absl::Time now) {
  entries_.push_back({std::move(task), now, next_++});
}

int64_t ReadyQueue::Level(const Entry& entry, absl::Time now) const {
  const int64_t priority = entry.task->priority();
  if (policy_.level == absl::InfiniteDuration() || now <= entry.since) return priority;
  absl::Duration rest;
  const int64_t risen = absl::IDivDuration(now - entry.since, policy_.level, &rest);
  return std::max(priority, std::min(priority + std::min(risen, int64_t{1} << 32),
                                     static_cast<int64_t>(policy_.max_priority)));
}

std::shared_ptr<SlicedTask> ReadyQueue::Pop(absl::Time now) {
  const auto first = std::min_element(entries_.begin(), entries_.end(), [&](const Entry& a, const Entry& b) {
    const int64_t level_a = Level(a, now), level_b = Level(b, now);
    return level_a != level_b ? level_a > level_b : a.number < b.number;
  });
  std::shared_ptr<SlicedTask> task = std::move(first->task);
  entries_.erase(first);
  return task;
}

std::vector<ReadyQueue::Entry> ReadyQueue::Take(const std::function<bool(const SlicedTask&)>& which) {
  const auto taken = std::stable_partition(entries_.begin(), entries_.end(),
                                           [&](const Entry& entry) { return !which(*entry.task); });
  std::vector<Entry> entries(std::make_move_iterator(taken), std::make_move_iterator(entries_.end()));
  entries_.erase(taken, entries_.end());
  return entries;
}

void ReadyQueue::GiveBack(std::vector<Entry> entries) {
  for (Entry& entry : entries) entries_.push_back(std::move(entry));
}

}  // namespace latentd
