// The sending half of a server stream, for callback reactors.
//
// Messages are queued from any thread; one StartWrite is outstanding at a time, so gRPC's flow control
// reaches the queue. What waits keeps the promise of its memory until gRPC has taken it. A slow reader costs
// previews (of one picture only the newest waits) and never results: whoever makes more of them asks
// unread_bytes(), and goes on when WhenRead() says so. A reader below the floor is found by too_slow(), and
// can be broken off.
//
// Finish is called exactly once: after the last message, or at once when the call is cancelled.
//
// The reactor owns the stream's life; this object may outlive it (whoever reports events holds a shared_ptr),
// and then swallows what it is given. Thread-safe.
#ifndef LATENTD_SERVER_SESSION_STREAM_WRITER_H_
#define LATENTD_SERVER_SESSION_STREAM_WRITER_H_

#include <grpcpp/support/status.h>

#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cache/base/mutex.h"
#include "cache/memory_budget.h"

namespace latentd {

// Least speed of a reader: while something waits for it all of `window` long, it takes a message in that
// time, and `bytes_per_second` of bytes.
struct ReadFloor {
  absl::Duration window = absl::Minutes(2);
  int64_t bytes_per_second = 0;
};

// Reactor: a gRPC server reactor with StartWrite(const Message*) and Finish(grpc::Status).
template <typename Reactor, typename Message>
class StreamWriter {
 public:
  // What a message costs beside its bytes, about.
  static constexpr int64_t kMessageOverhead = 512;

  // `break_off` ends the call whatever the client does (TryCancel); called at most while the reactor lives.
  explicit StreamWriter(
      Reactor* reactor, std::function<void()> break_off = [] {}, std::function<absl::Time()> now = absl::Now)
      : reactor_(reactor), break_off_(std::move(break_off)), now_(std::move(now)) {}

  struct Options {
    std::string replaces = {};  // not empty: a message of the same text that still waits is dropped
    Reservation memory = {};    // given back when gRPC has taken the message, or it is dropped
  };

  void Send(Message message, Options options = {}) {
    std::list<Item> dropped;  // ends without the mutex
    MutexLock lock(&mu_);
    if (reactor_ == nullptr || finish_ || cancelled_) return;
    if (!options.replaces.empty()) {
      for (auto it = std::next(queue_.begin(), writing_ ? 1 : 0); it != queue_.end(); ++it) {
        if (it->replaces != options.replaces) continue;
        unread_bytes_ -= it->bytes;
        dropped.splice(dropped.end(), queue_, it);
        break;
      }
    }
    const int64_t bytes = static_cast<int64_t>(message.ByteSizeLong()) + kMessageOverhead;
    unread_bytes_ += bytes;
    queue_.push_back({std::move(message), std::move(options.replaces), std::move(options.memory), bytes});
    StartNext();
  }

  // Ends the stream with `status` after what was sent. Later calls do nothing.
  void Finish(grpc::Status status) {
    MutexLock lock(&mu_);
    if (finish_) return;
    finish_ = std::move(status);
    StartNext();
  }

  // Drops what waits behind the message that is on its way.
  void DropUnsent() {
    Settled settled;
    MutexLock lock(&mu_);
    DropWaiting(settled);
  }

  // Ends the call whatever the client does; OnCancel follows.
  void BreakOff() {
    MutexLock lock(&mu_);
    if (reactor_ != nullptr) break_off_();
  }

  // From the reactor's OnCancel: nothing more can be sent; what waits is dropped.
  void OnCancel() {
    Settled settled;
    MutexLock lock(&mu_);
    cancelled_ = true;
    DropWaiting(settled);
    if (!finish_) finish_ = grpc::Status(grpc::StatusCode::CANCELLED, "cancelled");
    StartNext();
  }

  // From the reactor's OnWriteDone.
  void OnWriteDone(bool ok) {
    Settled settled;
    MutexLock lock(&mu_);
    writing_ = false;
    taken_bytes_ += queue_.front().bytes;
    Drop(queue_.begin(), settled);
    if (!ok) DropWaiting(settled);
    StartNext();
    Settle(settled);
  }

  // From the reactor's OnDone: it is about to go.
  void OnDone() {
    Settled settled;
    MutexLock lock(&mu_);
    reactor_ = nullptr;
    writing_ = false;
    DropWaiting(settled);
  }

  bool cancelled() const {
    MutexLock lock(&mu_);
    return cancelled_;
  }

  // True when the call is over, and nothing is kept for it.
  bool done() const {
    MutexLock lock(&mu_);
    return reactor_ == nullptr;
  }

  // Bytes that the reader has not taken, and what keeping them costs.
  int64_t unread_bytes() const {
    MutexLock lock(&mu_);
    return unread_bytes_;
  }

  // Calls `then` once, as soon as at most `bytes` are unread: now, or by the thread that brings it about.
  void WhenRead(int64_t bytes, std::function<void()> then) {
    {
      MutexLock lock(&mu_);
      if (unread_bytes_ > bytes) {
        waiting_.push_back({bytes, std::move(then)});
        return;
      }
    }
    then();
  }

  // True when the reader is below the floor. Starts the next window when one is over. For a clock's ticks.
  bool too_slow(const ReadFloor& floor) {
    MutexLock lock(&mu_);
    if (!writing_) return false;
    const absl::Time now = now_();
    if (now - write_started_ > floor.window) return true;
    if (now - window_started_ <= floor.window) return false;
    // A message that is on its way may be taken in part, which nobody sees.
    const int64_t under_way = write_started_ > window_started_ ? queue_.front().bytes : 0;
    const double wanted =
        absl::ToDoubleSeconds(now - window_started_) * static_cast<double>(floor.bytes_per_second);
    const bool slow = static_cast<double>(taken_bytes_ + under_way) < wanted;
    window_started_ = now;
    taken_bytes_ = 0;
    return slow;
  }

 private:
  struct Item {
    Message message;
    std::string replaces;
    Reservation memory;
    int64_t bytes;
  };
  struct Waiting {
    int64_t bytes;
    std::function<void()> then;
  };
  // What is over, kept until the mutex is free: memory is given back, and who waits is called, without it.
  struct Settled {
    std::list<Item> items;
    std::vector<std::function<void()>> calls;
    ~Settled() {
      items.clear();
      for (const auto& call : calls) call();
    }
  };

  void Drop(typename std::list<Item>::iterator item, Settled& settled) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    unread_bytes_ -= item->bytes;
    settled.items.splice(settled.items.end(), queue_, item);
  }

  void DropWaiting(Settled& settled) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    while (queue_.size() > (writing_ ? 1u : 0u)) Drop(std::prev(queue_.end()), settled);
    Settle(settled);
  }

  // Takes those who waited for what is so now.
  void Settle(Settled& settled) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (size_t i = waiting_.size(); i-- > 0;) {
      if (waiting_[i].bytes < unread_bytes_) continue;
      settled.calls.push_back(std::move(waiting_[i].then));
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  void StartNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (reactor_ == nullptr || writing_ || finished_) return;
    if (!queue_.empty()) {
      writing_ = true;
      write_started_ = now_();
      if (idle_) {
        window_started_ = write_started_;
        taken_bytes_ = 0;
      }
      idle_ = false;
      reactor_->StartWrite(&queue_.front().message);
      return;
    }
    idle_ = true;
    if (finish_) {
      finished_ = true;
      reactor_->Finish(*finish_);
    }
  }

  mutable Mutex mu_;
  Reactor* reactor_ ABSL_GUARDED_BY(mu_);
  const std::function<void()> break_off_;
  const std::function<absl::Time()> now_;
  std::list<Item> queue_ ABSL_GUARDED_BY(mu_);  // the front is being written while writing_, where it is
  std::vector<Waiting> waiting_ ABSL_GUARDED_BY(mu_);
  int64_t unread_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool idle_ ABSL_GUARDED_BY(mu_) = true;  // nothing waits
  absl::Time write_started_ ABSL_GUARDED_BY(mu_);
  // Something has been waiting since, and this much was taken.
  absl::Time window_started_ ABSL_GUARDED_BY(mu_);
  int64_t taken_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<grpc::Status> finish_ ABSL_GUARDED_BY(mu_);
};

}  // namespace latentd

#endif  // LATENTD_SERVER_SESSION_STREAM_WRITER_H_
