#include "cache/weights/file_watch.h"

#include <sys/inotify.h>
#include <unistd.h>

#include <cerrno>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "cache/base/fault_injection.h"
#include "cache/base/mutex.h"

namespace latentd {
namespace {

// The process's queue of notes. Several watches of one file are one for the kernel, and count here.
class Notes {
 public:
  static Notes& Get() {
    static auto* notes = new Notes;  // outlives whatever watches at the end of the process
    return *notes;
  }

  // The kernel's number, and what was noted of it before; a negative number when it takes no more.
  int Add(int fd, uint64_t& writes, uint64_t& losses) {
    MutexLock lock(&mu_);
    if (queue_ < 0) return -1;
    Drain();
    // Added to what is watched for: where that is replaced by the same, a write at that moment is not noted.
    const int watch =
        inotify_add_watch(queue_, absl::StrCat("/proc/self/fd/", fd).c_str(), IN_MODIFY | IN_MASK_ADD);
    if (watch < 0) return watch;
    File& file = files_[watch];
    ++file.watches;
    writes = file.writes;
    losses = losses_ + file.losses;
    return watch;
  }

  void Remove(int watch) {
    MutexLock lock(&mu_);
    auto it = files_.find(watch);
    if (it == files_.end() || --it->second.watches > 0) return;
    if (it->second.losses == 0) inotify_rm_watch(queue_, watch);
    files_.erase(it);
  }

  void Look(int watch, uint64_t& writes, uint64_t& losses) {
    MutexLock lock(&mu_);
    Drain();
    const File& file = files_.at(watch);
    writes = file.writes;
    losses = losses_ + file.losses;
  }

 private:
  struct File {
    int watches = 0;
    uint64_t writes = 0;
    uint64_t losses = 0;  // 1 once the kernel has ended the watch
  };

  Notes() : queue_(inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) {}

  // The kernel queues a note before the call that it is about returns: what was written before is here.
  void Drain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    alignas(inotify_event) char buffer[4096];
    while (true) {
      const ssize_t got = read(queue_, buffer, sizeof buffer);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return;
      for (ssize_t at = 0; at < got;) {
        const auto* note = reinterpret_cast<const inotify_event*>(buffer + at);
        at += static_cast<ssize_t>(sizeof *note + note->len);
        if ((note->mask & IN_Q_OVERFLOW) != 0) ++losses_;
        auto it = files_.find(note->wd);
        if (it == files_.end()) continue;
        if ((note->mask & IN_MODIFY) != 0) ++it->second.writes;
        if ((note->mask & (IN_IGNORED | IN_UNMOUNT)) != 0) it->second.losses = 1;
      }
    }
  }

  Mutex mu_;
  const int queue_;
  uint64_t losses_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<int, File> files_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::unique_ptr<FileWatch> FileWatch::Create(int fd) {
  if (!MaybeFail(FaultPoint::kWatch, "a watch").ok()) return nullptr;
  uint64_t writes = 0, losses = 0;
  const int watch = Notes::Get().Add(fd, writes, losses);
  if (watch < 0) return nullptr;
  return std::unique_ptr<FileWatch>(new FileWatch(watch, writes, losses));
}

FileWatch::~FileWatch() { Notes::Get().Remove(watch_); }

FileWatch::Seen FileWatch::seen() const {
  uint64_t writes = 0, losses = 0;
  Notes::Get().Look(watch_, writes, losses);
  if (writes != writes_) return Seen::kWrites;
  return losses != losses_ ? Seen::kUnknown : Seen::kNothing;
}

}  // namespace latentd
