// A read-only mapping of a file that survives whatever is done to the file.
//
// Cut short: touching a page beyond the end raises SIGBUS. A process-wide handler puts a zero page there,
// marks the mapping, and lets the thread go on; whoever works with the bytes asks Check() at the end of a
// slice and fails its job with a typed error, not the process.
//
// Written to in place: a mapping shows the new bytes, which are not those that the file's identity stands
// for. Check() says so, from then on for good. Replaced by rename, or removed: the mapping keeps the old
// bytes, and Check() is OK. It asks, in this order,
//
//   what lies at the path, if that is still this file: another size or modification time is another file;
//   the file's watch (file_watch.h): writes, by whatever path they came;
//   samples of the bytes, where only the change time has moved, or where there is no watch to ask.
//
// So a change of mode, owner, name or number of links is none. What is not seen: on a file system that others
// write to, or through a shared mapping, a change between the samples that leaves the modification time as it
// was.
//
// No descriptor is kept: open files are few, and mappings many. One file that did not change has one mapping,
// however often it is opened.
#ifndef LATENTD_CACHE_WEIGHTS_MAPPED_FILE_H_
#define LATENTD_CACHE_WEIGHTS_MAPPED_FILE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/base/mutex.h"
#include "cache/weights/file_identity.h"
#include "cache/weights/file_watch.h"
#include "cache/weights/mapping_table.h"

namespace latentd {

// Thread-safe.
class MappedFile {
 public:
  // Regular files only, no symbolic link as the last step. Errors: NOT_FOUND FILE_NOT_FOUND,
  // FAILED_PRECONDITION UNSAFE_FILE, RESOURCE_EXHAUSTED OUT_OF_DESCRIPTORS, OUT_OF_MAPPINGS; INTERNAL.
  static absl::StatusOr<std::shared_ptr<MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  int64_t size() const { return opened_.size; }

  // True once a page of it could not be had: the file ends before it, or cannot be read there.
  bool truncated() const;

  // ABORTED FILE_CHANGED once the file was written to; DATA_LOSS FILE_TRUNCATED when it cannot be read. The
  // errors' details name the file.
  absl::Status Check() const;

  // Whether its path leads to this file still. When not, nobody who comes anew gets it.
  bool at_its_place() const;

  // Takes samples of the bytes, once, for Check(). When they are about to be used: it reads all over the
  // file.
  void TakeSamples() const;

  // Stands for the file as it was opened: device, inode, size and times. Equal for two mappings only if their
  // bytes are; another one when the file was replaced or changed.
  const std::string& identity() const { return identity_; }

  // The identity that Open() would find at `path`; empty where there is no file.
  static std::string IdentityAt(const std::string& path);

 private:
  MappedFile() = default;
  static absl::StatusOr<std::shared_ptr<MappedFile>> OpenOnce(const std::string& path);
  absl::Status Map(int fd);
  std::string path() const;
  // Whether this mapping shows what a file found as `now` holds.
  bool Serves(const FileIdentity& now, const std::string& path) const;
  bool ChangedLocked(const std::optional<FileIdentity>& now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool SamplesDiffer() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t Sample() const;

  const uint8_t* data_ = nullptr;
  FileIdentity opened_;
  std::string identity_;
  MappingTable::Region* region_ = nullptr;
  std::unique_ptr<const FileWatch> watch_;

  mutable Mutex mu_;
  mutable std::string path_ ABSL_GUARDED_BY(mu_);  // by which it was opened last
  mutable bool changed_ ABSL_GUARDED_BY(mu_) = false;
  mutable int64_t ctime_ns_ ABSL_GUARDED_BY(mu_) = 0;  // up to which the bytes are known to be the same
  mutable std::optional<uint64_t> samples_ ABSL_GUARDED_BY(mu_);
};

// While it lives, `give_back` is asked when the system has no more mappings for the process: it lets go of
// something that holds one, and returns false when there is nothing. From the thread that opens a file.
class MappingReliever {
 public:
  explicit MappingReliever(std::function<bool()> give_back);
  ~MappingReliever();
  MappingReliever(const MappingReliever&) = delete;
  MappingReliever& operator=(const MappingReliever&) = delete;

 private:
  const std::function<bool()> give_back_;
};

// RESOURCE_EXHAUSTED OUT_OF_DESCRIPTORS when the process can open nothing at the moment. For whoever failed
// to open something and cannot tell why.
absl::Status CheckDescriptors();

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_MAPPED_FILE_H_
