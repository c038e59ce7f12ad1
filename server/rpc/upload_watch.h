// The uploads that are going on: how many there may be, and the clock that ends those that stand still and
// removes stored files when their time has come. Free of gRPC.
#ifndef LATENTD_SERVER_RPC_UPLOAD_WATCH_H_
#define LATENTD_SERVER_RPC_UPLOAD_WATCH_H_

#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache/base/mutex.h"

namespace latentd {

struct ServerCore;

// An upload, as its watch sees it. Called from any thread; does not block.
class WatchedUpload {
 public:
  virtual ~WatchedUpload() = default;

  // Ends itself when nothing came for too long, or too little on the whole.
  virtual void Tick(absl::Time now) = 0;

  // Ends with that status as soon as nobody works on it, and then calls UploadWatch::Remove.
  virtual void RequestEnd(const absl::Status& status) = 0;
};

// Thread-safe.
class UploadWatch {
 public:
  // `now` is the clock of all uploads; called from any thread.
  explicit UploadWatch(ServerCore* core, std::function<absl::Time()> now = absl::Now);
  // Drains.
  ~UploadWatch();

  // Errors: RESOURCE_EXHAUSTED TOO_MANY_UPLOADS; UNAVAILABLE SERVER_DRAINING.
  absl::Status Add(std::shared_ptr<WatchedUpload> upload);
  // The upload holds nothing any more. No-op when it was not added.
  void Remove(const WatchedUpload* upload);

  // Lets nothing new in, ends what is there, and waits for it. Blocks.
  void Drain();

  absl::Time now() const { return now_(); }

 private:
  void Watch();
  std::vector<std::shared_ptr<WatchedUpload>> All() const;

  ServerCore* const core_;
  const std::function<absl::Time()> now_;
  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool removing_ ABSL_GUARDED_BY(mu_) = false;  // expired files, on a worker
  std::map<const WatchedUpload*, std::shared_ptr<WatchedUpload>> uploads_ ABSL_GUARDED_BY(mu_);
  std::thread watcher_;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_UPLOAD_WATCH_H_
