// Files that clients sent: a folder of the server's own, with a quota, in which files have a time to go.
//
// A file's name is "uploads/" and what the client calls it. The folder is a LoRA root like any other; in it
// are
//
//   uploads/alice/night.safetensors    the file
//   uploads/alice/.night.json          its SHA-256 and when it expires; with .broken behind it: what was
//   there and
//                                      was no such note
//   .incoming/ID/night.safetensors     a file on its way; what is there at start is left over, and removed
//   .lock                              held by the server that uses the folder
//
// What comes is written beside the others, hashed while it is written, checked as a whole, and renamed to its
// place: a reader sees the old file or the new one. A file that somebody has mapped outlives its removal and
// its replacement. A file whose note is missing or belongs to another file (a crash between two renames) is
// kept for the usual time from when it was written.
//
// Knows no LoRAs: whether a file can be used is asked of Options::check. Thread-safe, but for Incoming, which
// belongs to one thread at a time and must not outlive the store. Everything but Find reads or writes the
// disk: not from an RPC or executor thread. Errors of the disk: RESOURCE_EXHAUSTED DISK_FULL, INTERNAL
// UPLOAD_FAILED; the log has the path and the cause.
#ifndef LATENTD_SERVER_CATALOG_UPLOAD_STORE_H_
#define LATENTD_SERVER_CATALOG_UPLOAD_STORE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cache/base/mutex.h"
#include "cache/base/sha256.h"
#include "server/rpc/listener.h"

namespace latentd {

// What a client says of a file before it sends it.
struct UploadHeader {
  std::string name;  // with or without "uploads/"
  std::string sha256;
  int64_t size = 0;
  std::optional<absl::Duration> ttl = std::nullopt;  // none: the store's
  bool replace = false;
};

struct StoredUpload {
  std::string name;  // with "uploads/"
  int64_t bytes = 0;
  absl::Time expires = absl::InfiniteFuture();
  bool existed = false;  // of the result of an upload: the very same file was there
};

class UploadStore {
 public:
  // The most that one Incoming::Write takes.
  static constexpr int64_t kMaxChunkBytes = int64_t{1} << 20;

  struct Options {
    std::string folder;
    int64_t max_bytes = 0;    // of a file
    int64_t total_bytes = 0;  // of all, those on their way included
    int64_t max_files = 10'000;
    absl::Duration ttl = absl::InfiniteDuration();
    std::function<absl::Time()> now = absl::Now;
    // Whether the file at `path`, which is to be served as `name`, can be used. May take long, and gives up
    // when `cancelled` says so.
    std::function<absl::Status(const std::string& name, const std::string& path,
                               const std::function<bool()>& cancelled)>
        check = {};
    // The file that was served as `name` was removed or replaced. Called without locks.
    std::function<void(const std::string& name)> on_gone = [](const std::string&) {};
  };

  // A file on its way. Nothing stays of it unless Finish returns OK.
  class Incoming {
   public:
    ~Incoming();
    Incoming(const Incoming&) = delete;
    Incoming& operator=(const Incoming&) = delete;

    const std::string& name() const { return name_; }
    int64_t size() const { return header_.size; }

    // The next bytes. Errors: INVALID_ARGUMENT INVALID_FIELD (chunk.offset: not where the last ended;
    // chunk.data: empty, too large, beyond the size), after which nothing has changed; those of the disk,
    // after which only the destructor may be called.
    absl::Status Write(int64_t offset, absl::string_view data);

    // Checks what came and puts it in its place. Once. Errors: DATA_LOSS UPLOAD_CORRUPT (too short, other
    // SHA-256); those of Options::check; ALREADY_EXISTS UPLOAD_EXISTS (another file came first); CANCELLED.
    absl::StatusOr<StoredUpload> Finish(const std::function<bool()>& cancelled);

   private:
    friend class UploadStore;
    Incoming(UploadStore* store, std::string name, UploadHeader header);
    absl::Status Create();

    UploadStore* const store_;
    const std::string name_;
    const UploadHeader header_;
    std::string folder_;  // below .incoming, of this upload alone
    std::string path_;
    Fd fd_;
    Sha256 sha256_;
    int64_t received_ = 0;
  };

  // Makes the folder when it is not there, and looks at what is in it. Errors: INVALID_ARGUMENT
  // INVALID_CONFIG (it or a folder in it: others can write to it, it cannot be made, or something else is
  // there); FAILED_PRECONDITION UPLOAD_DIR_IN_USE.
  static absl::StatusOr<std::unique_ptr<UploadStore>> Open(Options options);

  // The name under which a client's name is served. Errors: INVALID_ARGUMENT INVALID_FIELD (header.name).
  static absl::StatusOr<std::string> NameOf(absl::string_view name);

  // Room for a new file; or, when it is there already, that file, with its time to go renewed (never
  // shortened). Errors: INVALID_ARGUMENT INVALID_FIELD, UPLOAD_TOO_LARGE; ALREADY_EXISTS UPLOAD_EXISTS;
  // RESOURCE_EXHAUSTED UPLOADS_FULL; UPLOAD_FAILED where the file that is there cannot be read to be
  // compared, unless it is to be replaced.
  absl::StatusOr<std::variant<StoredUpload, std::unique_ptr<Incoming>>> Begin(const UploadHeader& header);

  // Errors: NOT_FOUND LORA_NOT_FOUND.
  absl::Status Delete(const std::string& name);

  // Removes what has expired, oldest first.
  void RemoveExpired();

  // From memory; nothing when there is no such upload.
  std::optional<StoredUpload> Find(const std::string& name) const;
  // When the next file expires.
  absl::Time next_expiry() const;

  const std::string& folder() const { return options_.folder; }

 private:
  struct File {
    int64_t bytes = 0;
    int64_t mtime_ns = 0;
    std::string sha256;  // empty: not known yet
    absl::Time expires = absl::InfiniteFuture();
  };

  explicit UploadStore(Options options) : options_(std::move(options)) {}
  absl::Status Lock();
  void Scan();
  File Describe(const std::string& name, int64_t bytes, int64_t mtime_ns) const;

  std::string PathOf(const std::string& name) const;
  std::string NoteOf(const std::string& name) const;
  absl::Time Expiry(const UploadHeader& header) const;
  absl::Status CheckHeader(const UploadHeader& header) const;
  absl::Status TakeRoom(int64_t bytes);

  // The file of that name if it is still as it was; otherwise it is forgotten.
  std::optional<File> Current(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(disk_mu_);
  // Computes what is not known of the file of that name and would have to be, for an upload of `header`.
  // Reads the file, which others may use or replace meanwhile. Errors: those of reading it, unless it may be
  // replaced.
  absl::Status LearnHash(const std::string& name, const UploadHeader& header) ABSL_LOCKS_EXCLUDED(disk_mu_);
  // That file, renewed, when it is what `header` says; nothing when an upload may replace it.
  absl::StatusOr<std::optional<StoredUpload>> TakeIfSame(const std::string& name, File file,
                                                         const UploadHeader& header)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(disk_mu_);
  absl::StatusOr<StoredUpload> Renew(const std::string& name, File file, const UploadHeader& header)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(disk_mu_);
  absl::Status WriteNote(const std::string& path, const File& file) const;
  // Writes a note anew, beside the file that is there.
  absl::Status RewriteNote(const std::string& name, const File& file) ABSL_EXCLUSIVE_LOCKS_REQUIRED(disk_mu_);
  absl::Status Place(Incoming& incoming, const File& file, const std::string& note)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(disk_mu_);
  absl::Status Remove(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(disk_mu_);
  void Set(const std::string& name, const File& file) ABSL_LOCKS_EXCLUDED(mu_);

  const Options options_;
  Fd lock_;
  Mutex disk_mu_;  // held by whoever changes files that are in their place; before mu_
  mutable Mutex mu_;
  std::map<std::string, File> files_ ABSL_GUARDED_BY(mu_);
  int64_t stored_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t incoming_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t incoming_files_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_CATALOG_UPLOAD_STORE_H_
