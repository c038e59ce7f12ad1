// The sending half of a server stream, for callback reactors.
//
// Messages are queued from any thread; one StartWrite is outstanding at a time, so gRPC's flow control reaches
// the queue. A slow reader costs previews (an unsent one is replaced by the next) and never results; when it
// takes nothing for too long, stalled() says so. Finish is called exactly once: after the last message, or at
// once when the call is cancelled.
//
// The reactor owns the stream's life; this object may outlive it (whoever reports events holds a shared_ptr),
// and then swallows what it is given.
#ifndef LATENTD_SERVER_STREAM_WRITER_H_
#define LATENTD_SERVER_STREAM_WRITER_H_

#include <grpcpp/support/status.h>

#include <deque>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "cache/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace latentd {

// Reactor: a gRPC server reactor with StartWrite(const Message*) and Finish(grpc::Status).
template <typename Reactor, typename Message>
class StreamWriter {
 public:
  explicit StreamWriter(Reactor* reactor) : reactor_(reactor) {}

  void Send(Message message, bool is_preview = false) {
    MutexLock lock(&mu_);
    if (reactor_ == nullptr || finish_ || cancelled_) return;
    if (is_preview && !queue_.empty() && queue_.back().is_preview && !(writing_ && queue_.size() == 1)) {
      queue_.back().message = std::move(message);
      return;
    }
    queue_.push_back({std::move(message), is_preview});
    StartNext();
  }

  // Ends the stream with `status` after what was sent. Later calls do nothing.
  void Finish(grpc::Status status) {
    MutexLock lock(&mu_);
    if (finish_) return;
    finish_ = std::move(status);
    StartNext();
  }

  // From the reactor's OnCancel: nothing more can be sent; what waits is dropped.
  void OnCancel() {
    MutexLock lock(&mu_);
    cancelled_ = true;
    while (queue_.size() > (writing_ ? 1u : 0u)) queue_.pop_back();
    if (!finish_) finish_ = grpc::Status(grpc::StatusCode::CANCELLED, "cancelled");
    StartNext();
  }

  // From the reactor's OnWriteDone.
  void OnWriteDone(bool ok) {
    MutexLock lock(&mu_);
    writing_ = false;
    queue_.pop_front();
    if (!ok) queue_.clear();
    StartNext();
  }

  // From the reactor's OnDone: it is about to go.
  void OnDone() {
    MutexLock lock(&mu_);
    reactor_ = nullptr;
    queue_.clear();
  }

  bool cancelled() const {
    MutexLock lock(&mu_);
    return cancelled_;
  }

  // True when the reader has taken nothing for `limit` while something waits for it.
  bool stalled(absl::Duration limit) const {
    MutexLock lock(&mu_);
    return writing_ && absl::Now() - write_started_ > limit;
  }

 private:
  struct Item {
    Message message;
    bool is_preview;
  };

  void StartNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (reactor_ == nullptr || writing_ || finished_) return;
    if (!queue_.empty()) {
      writing_ = true;
      write_started_ = absl::Now();
      reactor_->StartWrite(&queue_.front().message);
    } else if (finish_) {
      finished_ = true;
      reactor_->Finish(*finish_);
    }
  }

  mutable Mutex mu_;
  Reactor* reactor_ ABSL_GUARDED_BY(mu_);
  std::deque<Item> queue_ ABSL_GUARDED_BY(mu_);  // the front is being written while writing_
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time write_started_ ABSL_GUARDED_BY(mu_);
  std::optional<grpc::Status> finish_ ABSL_GUARDED_BY(mu_);
};

}  // namespace latentd

#endif  // LATENTD_SERVER_STREAM_WRITER_H_
