// Copies from pageable host memory to a device that computes and copies on queues of its own.
//
// A device reads memory at full speed, and beside computing, only when it is pinned; weights lie in mappings
// of files. So a thread carries the bytes into a ring of pinned buffers, and the device fetches them from
// there. Three orders are kept, all of them on the device, so that nobody waits for more than it needs:
//
//   compute queue   … reads the slot ──┐ Begin                         ┌ Await … reads the slot
//                                      └─ a copy starts behind it      │
//   copy queue                            [chunk][chunk]…[chunk] ──────┘ what is computed comes behind it
//   copy thread     fills buffer 0, 1, 2, 0 …: a buffer again only when the device has read it
//
// The device is behind CopyEngine, so that the orders can be tested without one.
#ifndef LATENTD_CACHE_CUDA_STAGED_COPIES_H_
#define LATENTD_CACHE_CUDA_STAGED_COPIES_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/base/mutex.h"
#include "cache/device.h"

namespace latentd {

// What StagedCopies asks of a device: a compute queue, which belongs to the thread that computes, and one
// copy queue. Everything but Wait and Drain returns at once. Errors: those of Device::CopyIn.
class CopyEngine {
 public:
  // A place in a queue: passed when everything before it is done.
  using Mark = std::shared_ptr<const void>;

  virtual ~CopyEngine() = default;

  // On the thread that computes: a place behind all that it has queued; and what it queues from here on waits
  // for a place in the copy queue.
  virtual absl::StatusOr<Mark> MarkCompute() = 0;
  virtual absl::Status ComputeAfter(const Mark& mark) = 0;

  // On the copy thread: what is copied from here on waits for a place in the compute queue; a copy from
  // pinned memory, which is read until a later mark is passed; a place behind all copies.
  virtual absl::Status CopyAfter(const Mark& mark) = 0;
  virtual absl::Status Copy(void* to, const void* pinned, int64_t bytes) = 0;
  virtual absl::StatusOr<Mark> MarkCopies() = 0;

  // Blocks until the mark is passed.
  virtual absl::Status Wait(const Mark& mark) = 0;

  // Blocks until no copy is under way, whatever has failed.
  virtual void Drain() = 0;
};

class StagedCopies : public CopyStream {
 public:
  // `buffers`: at least two pinned buffers of `buffer_bytes` each, a multiple of kDeviceAlignment. They
  // belong to the engine, which ends with this, after the last copy.
  StagedCopies(std::unique_ptr<CopyEngine> engine, std::vector<void*> buffers, int64_t buffer_bytes);
  ~StagedCopies() override;

  absl::StatusOr<uint64_t> Begin(std::vector<Piece> pieces) override;

  // Waits until the copy's bytes are in the ring or beyond, not until they have arrived: the device waits for
  // that. So `from` may change once this returns.
  absl::Status Await(uint64_t copy) override;

 private:
  struct Batch {
    std::vector<Piece> pieces;
    CopyEngine::Mark after;
  };

  void Run();
  absl::StatusOr<CopyEngine::Mark> CopyBatch(const Batch& batch);
  absl::Status NextBuffer();

  const std::unique_ptr<CopyEngine> engine_;
  const std::vector<void*> buffers_;
  const int64_t buffer_bytes_;

  // Of the copy thread: the buffer that is filled, how far, and what the device must have passed before a
  // buffer can be filled again (null: nothing).
  size_t buffer_ = 0;
  int64_t filled_ = 0;
  std::vector<CopyEngine::Mark> read_;

  Mutex mu_;
  CondVar changed_;
  std::deque<Batch> queue_ ABSL_GUARDED_BY(mu_);
  uint64_t begun_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t queued_ ABSL_GUARDED_BY(mu_) = 0;  // copies that are in the device's queue, or failed
  std::map<uint64_t, CopyEngine::Mark> arrived_ ABSL_GUARDED_BY(mu_);  // of those not awaited yet
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace latentd

#endif  // LATENTD_CACHE_CUDA_STAGED_COPIES_H_
