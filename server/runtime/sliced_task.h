// What an executor runs, a slice at a time.
#ifndef LATENTD_SERVER_RUNTIME_SLICED_TASK_H_
#define LATENTD_SERVER_RUNTIME_SLICED_TASK_H_

namespace latentd {

class SlicedTask {
 public:
  virtual ~SlicedTask() = default;
  // Runs one slice on the executor's thread. Returns true when another slice can run right away; else
  // Parked() is called, the task is let go, and whoever makes it runnable again calls Executor::Submit. Must
  // not throw.
  virtual bool RunSlice() = 0;
  // Called when RunSlice returned false, once the executor counts the task no more: the place to go on from.
  virtual void Parked() {}
  virtual int priority() const = 0;  // constant

  // Whether somebody more urgent waits for memory that this task holds between its slices; and letting go of
  // that, to take it again when its turn comes. Both are called while it is ready and does not run, by one
  // thread at a time. The first is called under the executor's mutex.
  virtual bool ShouldGiveWay() const { return false; }
  virtual void GiveWay() {}
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_SLICED_TASK_H_
