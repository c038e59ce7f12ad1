#include "cache/base/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

constexpr size_t kStep = size_t{1} << 20;

absl::Status Corrupt(const std::string& label, absl::string_view what) {
  return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", absl::StrCat(label, ": ", what),
                   {{"file", label}});
}

absl::Status TooLarge(const std::string& label, int64_t bytes, int64_t max_bytes) {
  return Corrupt(label, absl::StrCat("is ", bytes, " bytes; at most ", max_bytes, " are read"));
}

}  // namespace

absl::StatusOr<std::string> ReadTextFile(const std::string& path, int64_t max_bytes) {
  const std::string label = ShortPath(path);
  const auto missing = [&](int error) {
    return MakeError(absl::StatusCode::kNotFound, "MISSING_FILE",
                     absl::StrCat("cannot read ", label, ": ", std::strerror(error)), {{"file", label}});
  };
  // Opening a FIFO would wait for a writer, and a terminal could become the process's own.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0 && errno == ENXIO) return Corrupt(label, "is no regular file");  // a socket
  if (fd < 0) return missing(errno);
  const absl::Cleanup close_file = [fd] { close(fd); };
  struct stat st = {};
  if (fstat(fd, &st) != 0) return missing(errno);
  if (!S_ISREG(st.st_mode)) return Corrupt(label, "is no regular file");
  if (st.st_size > max_bytes) return TooLarge(label, st.st_size, max_bytes);

  // It may have grown since; one byte more than is allowed shows it.
  const size_t most = static_cast<size_t>(max_bytes) + 1;
  std::string text(static_cast<size_t>(st.st_size) + 1, '\0');
  size_t size = 0;
  while (true) {
    const ssize_t got = read(fd, text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Corrupt(label, "cannot be read to its end");
    if (got == 0) break;
    size += static_cast<size_t>(got);
    if (size == most) return TooLarge(label, static_cast<int64_t>(size), max_bytes);
    if (size == text.size()) text.resize(std::min(most, size + kStep));
  }
  text.resize(size);
  return text;
}

absl::Status ReplaceTextFile(const std::string& path, absl::string_view text) {
  const auto failed = [](absl::string_view what, const std::string& file) {
    return MakeError(absl::StatusCode::kInternal, "WRITE_FAILED",
                     absl::StrCat("cannot ", what, " ", ShortPath(file), ": ", std::strerror(errno)));
  };
  const std::string fresh = absl::StrCat(path, ".new");
  unlink(fresh.c_str());
  const int fd = open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd < 0) return failed("make", fresh);
  absl::Status status;
  while (status.ok() && !text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written >= 0) text.remove_prefix(static_cast<size_t>(written));
    if (written < 0 && errno != EINTR) status = failed("write", fresh);
  }
  close(fd);
  if (status.ok() && rename(fresh.c_str(), path.c_str()) != 0) status = failed("replace", path);
  if (!status.ok()) unlink(fresh.c_str());
  return status;
}

std::string ShortPath(absl::string_view path) {
  size_t slash = path.rfind('/');
  if (slash == absl::string_view::npos || slash == 0) return std::string(path);
  slash = path.rfind('/', slash - 1);
  return std::string(slash == absl::string_view::npos ? path : path.substr(slash + 1));
}

}  // namespace latentd
