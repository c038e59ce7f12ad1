// The tasks that are ready to run on one device, and whose turn it is: that of the highest priority, and
// among equal ones of the one that was there first. A task that waits rises by a level every so often, up to
// the highest priority that there is, so that none waits for ever.
//
// Not thread-safe; knows no clock.
#ifndef LATENTD_SERVER_RUNTIME_READY_QUEUE_H_
#define LATENTD_SERVER_RUNTIME_READY_QUEUE_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "server/runtime/sliced_task.h"

namespace latentd {

struct AgeingPolicy {
  absl::Duration level = absl::InfiniteDuration();  // of waiting, for each level
  int max_priority = std::numeric_limits<int>::max();
};

class ReadyQueue {
 public:
  struct Entry {
    std::shared_ptr<SlicedTask> task;
    absl::Time since;
    uint64_t number = 0;  // in the order of Push
  };

  explicit ReadyQueue(AgeingPolicy policy = {}) : policy_(policy) {}

  // Behind those of its priority. What it waited before its last slice does not count.
  void Push(std::shared_ptr<SlicedTask> task, absl::Time now);

  // Whose turn it is. REQUIRES: not empty.
  std::shared_ptr<SlicedTask> Pop(absl::Time now);

  // Takes out those that `which` says, to be given back as they were.
  std::vector<Entry> Take(const std::function<bool(const SlicedTask&)>& which);
  void GiveBack(std::vector<Entry> entries);

  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }

 private:
  int64_t Level(const Entry& entry, absl::Time now) const;

  AgeingPolicy policy_;
  std::vector<Entry> entries_;  // in any order
  uint64_t next_ = 0;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_READY_QUEUE_H_
