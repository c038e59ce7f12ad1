#include "server/runtime/worker_pool.h"

#include <atomic>

#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

TEST(WorkerPool, GrowsWhileTasksWait) {
  auto pool = WorkerPool::Create(1, 3);
  ASSERT_TRUE(pool.ok()) << pool.status();
  Mutex mu;
  CondVar changed;
  int here = 0;
  for (int i = 0; i < 3; ++i) {
    (*pool)->Submit([&] {  // each waits for all of them
      MutexLock lock(&mu);
      ++here;
      changed.SignalAll();
      while (here < 3) changed.Wait(&mu);
    });
  }
  pool->reset();
  EXPECT_EQ(here, 3);
}

TEST(WorkerPool, WithoutItsFirstThreadsThereIsNone) {
  for (int n : {1, 2}) {
    FaultInjector::Arm(FaultPoint::kThread, n);
    const auto pool = WorkerPool::Create(2, 4);
    EXPECT_TRUE(FaultInjector::Disarm());
    EXPECT_EQ(ErrorReason(pool.status()), "NO_THREADS");
  }
}

// As under a limit of processes: what there is does all the work.
TEST(WorkerPool, WithoutFurtherThreadsTasksWaitForThoseThatThereAre) {
  auto pool = WorkerPool::Create(1, 100);
  ASSERT_TRUE(pool.ok()) << pool.status();
  std::atomic<int> done = 0;
  Mutex mu;
  CondVar changed;
  bool go = false;
  FaultInjector::Arm(FaultPoint::kThread, 1);  // asked for only if the first one does not wait yet
  (*pool)->Submit([&] {
    MutexLock lock(&mu);
    while (!go) changed.Wait(&mu);
    ++done;
  });
  FaultInjector::Arm(FaultPoint::kThread, 1);
  (*pool)->Submit([&] { ++done; });
  EXPECT_TRUE(FaultInjector::Disarm());
  EXPECT_EQ((*pool)->thread_count(), 1);
  EXPECT_EQ(done, 0);
  {
    MutexLock lock(&mu);
    go = true;
    changed.SignalAll();
  }
  pool->reset();
  EXPECT_EQ(done, 2);
}

}  // namespace
}  // namespace latentd
