// A read-only mapping of a file that survives the file being cut short.
//
// Touching a page beyond the end of a truncated file raises SIGBUS. A process-wide handler puts a zero page
// there, marks the mapping, and lets the thread go on; whoever works with the bytes asks truncated() at the
// end of a slice and fails its job with a typed error, not the process.
#ifndef LATENTD_CACHE_MAPPED_FILE_H_
#define LATENTD_CACHE_MAPPED_FILE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace latentd {

class MappedFile {
 public:
  // Regular files only, no symbolic link as the last step. Errors: NOT_FOUND, FAILED_PRECONDITION
  // UNSAFE_FILE, INTERNAL.
  static absl::StatusOr<std::shared_ptr<MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }
  int fd() const { return fd_; }

  // True once a read went beyond the end of the file.
  bool truncated() const;

  // device, inode, size and modification time, as text: another one when the file was replaced.
  const std::string& identity() const { return identity_; }

 private:
  MappedFile() = default;

  const uint8_t* data_ = nullptr;
  int64_t size_ = 0;
  int fd_ = -1;
  int slot_ = -1;  // in the handler's table; -1 when it was full, then truncation is fatal as usual
  std::string identity_;
};

}  // namespace latentd

#endif  // LATENTD_CACHE_MAPPED_FILE_H_
