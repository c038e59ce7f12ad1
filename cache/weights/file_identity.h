// What a file was when it was opened: which one, and in which state. All of it is of one fstat of a
// descriptor, so that no rename comes between the file and what is said of it.
#ifndef LATENTD_CACHE_WEIGHTS_FILE_IDENTITY_H_
#define LATENTD_CACHE_WEIGHTS_FILE_IDENTITY_H_

#include <sys/stat.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace latentd {

struct FileIdentity {
  uint64_t device = 0, inode = 0;
  int64_t size = 0;
  int64_t mtime_ns = 0;
  // Moves with the bytes, and cannot be set back; moves with mode, owner, name and number of links, too.
  int64_t ctime_ns = 0;

  static FileIdentity Of(const struct stat& st) {
    auto ns = [](const timespec& t) { return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec; };
    return {static_cast<uint64_t>(st.st_dev), static_cast<uint64_t>(st.st_ino),
            static_cast<int64_t>(st.st_size), ns(st.st_mtim), ns(st.st_ctim)};
  }
  // Of the regular file at `path`, nothing where there is none. A last step that is a link is not followed.
  static std::optional<FileIdentity> At(const std::string& path) {
    struct stat st = {};
    if (lstat(path.c_str(), &st) != 0 || !S_ISREG(st.st_mode)) return std::nullopt;
    return Of(st);
  }

  std::pair<uint64_t, uint64_t> file() const { return {device, inode}; }
  std::string ToString() const {
    return absl::StrCat(device, ":", inode, ":", size, ":", mtime_ns, ":", ctime_ns);
  }
  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_FILE_IDENTITY_H_
