#include "server/rpc/upload_watch.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/server_core.h"

namespace latentd {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(250);

absl::Status Draining() {
  return MakeError(absl::StatusCode::kUnavailable, "SERVER_DRAINING",
                   "the server is going down; upload again later", {{"retry_ms", "5000"}});
}

}  // namespace

UploadWatch::UploadWatch(ServerCore* core, std::function<absl::Time()> now)
    : core_(core), now_(std::move(now)), watcher_([this] { Watch(); }) {}

UploadWatch::~UploadWatch() {
  Drain();
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  watcher_.join();
}

absl::Status UploadWatch::Add(std::shared_ptr<WatchedUpload> upload) {
  MutexLock lock(&mu_);
  if (draining_) return Draining();
  const int64_t limit = core_->config.max_uploads;
  if (static_cast<int64_t>(uploads_.size()) >= limit) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "TOO_MANY_UPLOADS",
        absl::StrCat("the server has ", uploads_.size(), " uploads, which is the limit; try again later"),
        {{"limit", absl::StrCat(limit)}, {"retry_ms", "2000"}});
  }
  const WatchedUpload* key = upload.get();
  uploads_[key] = std::move(upload);
  return absl::OkStatus();
}

void UploadWatch::Remove(const WatchedUpload* upload) {
  std::shared_ptr<WatchedUpload> last;
  MutexLock lock(&mu_);
  auto it = uploads_.find(upload);
  if (it == uploads_.end()) return;
  last = std::move(it->second);
  uploads_.erase(it);
  changed_.SignalAll();
}

std::vector<std::shared_ptr<WatchedUpload>> UploadWatch::All() const {
  MutexLock lock(&mu_);
  std::vector<std::shared_ptr<WatchedUpload>> out;
  for (const auto& [key, upload] : uploads_) out.push_back(upload);
  return out;
}

void UploadWatch::Drain() {
  {
    MutexLock lock(&mu_);
    draining_ = true;
  }
  for (const auto& upload : All()) upload->RequestEnd(Draining());
  MutexLock lock(&mu_);
  while (!uploads_.empty() || removing_) changed_.Wait(&mu_);
}

void UploadWatch::Watch() {
  MutexLock lock(&mu_);
  while (!stopping_) {
    changed_.WaitWithTimeout(&mu_, kTick);
    if (stopping_) return;
    mu_.Unlock();
    const absl::Time now = now_();
    for (const auto& upload : All()) upload->Tick(now);
    const bool expired = core_->uploads != nullptr && core_->uploads->next_expiry() <= now;
    mu_.Lock();
    if (!expired || removing_ || draining_) continue;
    removing_ = true;
    core_->workers->Submit([this] {
      core_->uploads->RemoveExpired();
      MutexLock done(&mu_);
      removing_ = false;
      changed_.SignalAll();
    });
  }
}

}  // namespace latentd
