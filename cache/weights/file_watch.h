// Tells whether the bytes of a file were written to. A change time cannot: it moves with mode and links as
// well, and a write within its tick, or one whose traces were wiped with `touch -r`, does not show in times.
//
// The kernel notes writes and truncations, whoever makes them and by whatever name (inotify). It does not
// note what another machine does to a network file system, nor writes through a shared mapping; so this is
// evidence beside times, not in place of them. Needs no descriptor of the file: one serves all watches.
//
// Thread-safe.
#ifndef LATENTD_CACHE_WEIGHTS_FILE_WATCH_H_
#define LATENTD_CACHE_WEIGHTS_FILE_WATCH_H_

#include <cstdint>
#include <memory>

namespace latentd {

class FileWatch {
 public:
  enum class Seen {
    kNothing,
    kWrites,
    kUnknown,  // notes were lost: the file system went away, or more came than the kernel keeps
  };

  // Watches the file that is open as `fd`, which may be closed afterwards. Null where the system has no
  // watches, or none left.
  static std::unique_ptr<FileWatch> Create(int fd);
  ~FileWatch();
  FileWatch(const FileWatch&) = delete;
  FileWatch& operator=(const FileWatch&) = delete;

  // What happened to the file since Create, up to this moment.
  Seen seen() const;

 private:
  FileWatch(int watch, uint64_t writes, uint64_t losses) : watch_(watch), writes_(writes), losses_(losses) {}

  const int watch_;
  const uint64_t writes_, losses_;  // that had been noted at the start
};

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_FILE_WATCH_H_
