#include "server/catalog/upload_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cache/base/bounded_json.h"
#include "cache/base/error.h"
#include "cache/base/text_file.h"
#include "nlohmann/json.hpp"
#include "server/catalog/names.h"
#include "spdlog/spdlog.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

constexpr char kPrefix[] = "uploads/";
constexpr char kExtension[] = ".safetensors";
constexpr char kIncoming[] = ".incoming";
constexpr char kNote[] = "note";
constexpr char kBroken[] = ".broken";
constexpr int kNoteVersion = 1;
constexpr int64_t kMaxNoteBytes = 4096;
constexpr size_t kMaxOwnBytes = 120;
// Beyond that a time cannot be told to clients.
constexpr absl::Duration kMaxTtl = absl::Hours(24 * 365 * 100);
// The catalog does not look deeper.
constexpr size_t kMaxSegments = 6;

absl::Status DiskError(absl::string_view what, const std::string& path, int error) {
  spdlog::error("upload: cannot {} {}: {}", std::string(what), path, std::strerror(error));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return MakeError(absl::StatusCode::kResourceExhausted, "DISK_FULL",
                     "the server's disk has no room for the file; delete uploads or ask its operator");
  }
  return MakeError(absl::StatusCode::kInternal, "UPLOAD_FAILED",
                   absl::StrCat("the server cannot ", what, " the file; its log has the cause"));
}

absl::Status Corrupt(const std::string& message, const ErrorDetails& details) {
  return MakeError(absl::StatusCode::kDataLoss, "UPLOAD_CORRUPT", message, details);
}

absl::Status Exists(const std::string& name) {
  return MakeError(absl::StatusCode::kAlreadyExists, "UPLOAD_EXISTS",
                   absl::StrCat("another file is there as '", name, "'; use another name, or set replace"),
                   {{"resource_type", "lora"}, {"resource_name", name}, {"field", "header.name"}});
}

absl::Status WriteAll(int fd, absl::string_view data, const std::string& path) {
  while (!data.empty()) {
    const ssize_t written = write(fd, data.data(), data.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return DiskError("write", path, errno);
    data.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status Sync(int fd, const std::string& path) {
  return fsync(fd) == 0 ? absl::OkStatus() : DiskError("write", path, errno);
}

// So that a rename or a removal in it survives a power cut.
void SyncFolder(const fs::path& folder) {
  const Fd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd && fsync(fd.get()) == 0) return;
  spdlog::warn("upload: cannot sync {}: {}", folder.string(), std::strerror(errno));
}

absl::StatusOr<Fd> CreateNew(const std::string& path) {
  Fd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return DiskError("make", path, errno);
  return fd;
}

int64_t MtimeNs(const struct stat& st) {
  // Unsigned, because some file systems can say more seconds than these are nanoseconds for; it only has to
  // differ.
  return static_cast<int64_t>(static_cast<uint64_t>(st.st_mtim.tv_sec) * 1'000'000'000 +
                              static_cast<uint64_t>(st.st_mtim.tv_nsec));
}

// Size and time of a regular file; false when there is none.
bool Stat(const std::string& path, int64_t& bytes, int64_t& mtime_ns) {
  struct stat st = {};
  if (lstat(path.c_str(), &st) != 0 || !S_ISREG(st.st_mode)) return false;
  bytes = st.st_size;
  mtime_ns = MtimeNs(st);
  return true;
}

absl::StatusOr<std::string> HashOf(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd) return DiskError("read", path, errno);
  Sha256 sum;
  std::string buffer(1 << 20, '\0');
  while (true) {
    const ssize_t got = read(fd.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return DiskError("read", path, errno);
    if (got == 0) return sum.Finish();
    sum.Update(absl::string_view(buffer.data(), static_cast<size_t>(got)));
  }
}

// What a file's time or a note says, where a client can be told it; else it never comes.
absl::Time Tellable(absl::Time expires) {
  return expires > absl::Now() + kMaxTtl ? absl::InfiniteFuture() : std::max(expires, absl::UnixEpoch());
}

// Out of the way, under a name that is nobody's.
void SetAside(const std::string& path) {
  const std::string aside = absl::StrCat(path, kBroken);
  if (rename(path.c_str(), aside.c_str()) == 0) {
    spdlog::warn("upload: {} was renamed to {}", path, aside);
  } else {
    spdlog::warn("upload: cannot rename {}: {}", path, std::strerror(errno));
  }
}

// Errors: those of ReadTextFile; DATA_LOSS CORRUPT_FILE.
absl::StatusOr<nlohmann::json> ReadNote(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxNoteBytes));
  absl::StatusOr<nlohmann::json> note = ParseBoundedJson(text);
  if (note.ok() && !note->is_object()) {
    return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", "is no note of an upload");
  }
  return note;
}

absl::Status BadFolder(const std::string& folder, absl::string_view why) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_CONFIG",
                   absl::StrCat("upload_dir: '", folder, "' ", why), {{"key", "upload_dir"}});
}

absl::Status MakeFolder(const std::string& folder) {
  std::error_code error;
  const fs::path parent = fs::absolute(folder, error).lexically_normal().parent_path();
  fs::create_directories(parent, error);
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return BadFolder(folder, absl::StrCat("cannot be made: ", std::strerror(errno)));
  }
  struct stat st = {};
  if (stat(folder.c_str(), &st) != 0 || !S_ISDIR(st.st_mode)) {
    return BadFolder(folder, "is no folder; move it away, or set another upload_dir");
  }
  // Whoever can write there could change a file after it was checked.
  if (st.st_uid != geteuid() || (st.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return BadFolder(folder, "must belong to the server's user and be writable for nobody else (chmod 700)");
  }
  if (access(folder.c_str(), R_OK | W_OK | X_OK) != 0) return BadFolder(folder, "cannot be written to");
  return absl::OkStatus();
}

}  // namespace

// ----------------------------------------------------------------------------------------------- start

absl::StatusOr<std::unique_ptr<UploadStore>> UploadStore::Open(Options options) {
  if (options.ttl > kMaxTtl) options.ttl = absl::InfiniteDuration();
  RETURN_IF_ERROR(MakeFolder(options.folder));
  std::error_code error;
  options.folder = fs::canonical(options.folder, error).string();
  auto store = std::unique_ptr<UploadStore>(new UploadStore(std::move(options)));
  RETURN_IF_ERROR(store->Lock());
  const fs::path incoming = fs::path(store->folder()) / kIncoming;
  fs::remove_all(incoming, error);
  for (const fs::path& folder : {incoming, fs::path(store->folder()) / "uploads"}) {
    RETURN_IF_ERROR(MakeFolder(folder.string()));
    // The catalog serves nothing that a link leads to.
    if (fs::is_symlink(folder, error)) return BadFolder(folder.string(), "is a link; put a folder there");
  }
  store->Scan();
  store->RemoveExpired();
  return store;
}

absl::Status UploadStore::Lock() {
  const std::string path = absl::StrCat(folder(), "/.lock");
  for (bool last : {false, true}) {
    lock_ = Fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    // A folder, a link, a socket.
    if (lock_ || last || (errno != EISDIR && errno != ELOOP && errno != ENXIO)) break;
    SetAside(path);
  }
  if (lock_ && flock(lock_.get(), LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  if (lock_ && errno == EWOULDBLOCK) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "UPLOAD_DIR_IN_USE",
        absl::StrCat("upload_dir: '", folder(), "' is used by another server; each needs its own"));
  }
  return BadFolder(folder(), absl::StrCat("cannot be locked: ", std::strerror(errno)));
}

void UploadStore::Scan() {
  std::error_code error;
  std::vector<fs::path> leftover;
  const fs::path root(folder());
  constexpr auto kSkip = fs::directory_options::skip_permission_denied;
  for (auto it = fs::recursive_directory_iterator(root / "uploads", kSkip, error);
       !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    const fs::path& path = it->path();
    if (it.depth() >= static_cast<int>(kMaxSegments)) it.disable_recursion_pending();
    const std::string file = path.filename().string();
    if (absl::StartsWith(file, ".") && absl::EndsWith(file, ".json")) {
      const std::string stem(absl::StripSuffix(absl::StripPrefix(file, "."), ".json"));
      if (!fs::exists(path.parent_path() / absl::StrCat(stem, kExtension), error)) leftover.push_back(path);
      continue;
    }
    const std::string relative = path.lexically_relative(root).string();
    if (!absl::EndsWith(relative, kExtension)) continue;
    const std::string name(absl::StripSuffix(relative, kExtension));
    int64_t bytes = 0, mtime_ns = 0;
    if (IsPlainName(name) && Stat(path.string(), bytes, mtime_ns)) Set(name, Describe(name, bytes, mtime_ns));
  }
  for (const fs::path& path : leftover) fs::remove(path, error);
}

UploadStore::File UploadStore::Describe(const std::string& name, int64_t bytes, int64_t mtime_ns) const {
  File file{.bytes = bytes, .mtime_ns = mtime_ns, .sha256 = "", .expires = absl::InfiniteFuture()};
  file.expires = Tellable(absl::FromUnixNanos(mtime_ns) + options_.ttl);
  const std::string path = NoteOf(name);
  struct stat st = {};
  if (lstat(path.c_str(), &st) != 0 && errno == ENOENT) return file;
  const absl::StatusOr<nlohmann::json> note = ReadNote(path);
  if (!note.ok()) {
    spdlog::warn("upload {} is kept for the usual time: {}: {}", name, path,
                 std::string(note.status().message()));
    SetAside(path);
    return file;
  }
  const auto number = [&](const char* key, int64_t otherwise) {
    auto it = note->find(key);
    return it != note->end() && it->is_number_integer() ? it->get<int64_t>() : otherwise;
  };
  if (number("version", 0) != kNoteVersion || number("bytes", -1) != bytes ||
      number("mtime_ns", -1) != mtime_ns) {
    return file;
  }
  if (auto sum = note->find("sha256"); sum != note->end() && sum->is_string())
    file.sha256 = sum->get<std::string>();
  const int64_t expires_ms = number("expires_ms", -1);
  file.expires = expires_ms < 0 ? absl::InfiniteFuture() : Tellable(absl::FromUnixMillis(expires_ms));
  return file;
}

// ---------------------------------------------------------------------------------------------- headers

absl::StatusOr<std::string> UploadStore::NameOf(absl::string_view name) {
  const absl::string_view own = absl::StripPrefix(name, kPrefix);
  const std::vector<absl::string_view> segments = absl::StrSplit(own, '/');
  if (own.size() > kMaxOwnBytes || segments.size() > kMaxSegments || !IsPlainName(own)) {
    return FieldError(
        "header.name",
        absl::StrCat("is made of segments of [A-Za-z0-9._-] split by '/', none of them starting with "
                     "a dot; at most ",
                     kMaxSegments, " of them and ", kMaxOwnBytes, " bytes"));
  }
  for (absl::string_view segment : segments) {
    if (absl::EndsWith(segment, kExtension)) {
      return FieldError("header.name", absl::StrCat("stands without '", kExtension, "'"));
    }
  }
  return absl::StrCat(kPrefix, own);
}

std::string UploadStore::PathOf(const std::string& name) const {
  return absl::StrCat(folder(), "/", name, kExtension);
}

std::string UploadStore::NoteOf(const std::string& name) const {
  const fs::path path = fs::path(folder()) / name;
  return (path.parent_path() / absl::StrCat(".", path.filename().string(), ".json")).string();
}

absl::Time UploadStore::Expiry(const UploadHeader& header) const {
  return options_.now() + header.ttl.value_or(options_.ttl);
}

absl::Status UploadStore::CheckHeader(const UploadHeader& header) const {
  const bool hex = std::all_of(header.sha256.begin(), header.sha256.end(), [](unsigned char c) {
    return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f');
  });
  if (header.sha256.size() != 64 || !hex) {
    return FieldError("header.sha256", "is the file's SHA-256, 64 hexadecimal digits");
  }
  if (header.size <= 0) return FieldError("header.size", "is the file's size in bytes, above 0");
  if (header.size > options_.max_bytes) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "UPLOAD_TOO_LARGE",
        absl::StrCat("the file has ", header.size, " bytes; the server takes ", options_.max_bytes),
        {{"field", "header.size"},
         {"size", absl::StrCat(header.size)},
         {"limit", absl::StrCat(options_.max_bytes)}});
  }
  if (!header.ttl) return absl::OkStatus();
  if (*header.ttl <= absl::ZeroDuration()) return FieldError("header.ttl", "is above zero");
  if (const absl::Duration most = std::min(options_.ttl, kMaxTtl); *header.ttl > most) {
    return FieldError("header.ttl", absl::StrCat("is at most ", absl::FormatDuration(most)));
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------------------------------- what is there

void UploadStore::Set(const std::string& name, const File& file) {
  MutexLock lock(&mu_);
  auto [it, fresh] = files_.insert({name, file});
  if (!fresh) stored_bytes_ -= it->second.bytes;
  it->second = file;
  stored_bytes_ += file.bytes;
}

std::optional<StoredUpload> UploadStore::Find(const std::string& name) const {
  MutexLock lock(&mu_);
  auto it = files_.find(name);
  if (it == files_.end()) return std::nullopt;
  return StoredUpload{name, it->second.bytes, it->second.expires};
}

absl::Time UploadStore::next_expiry() const {
  MutexLock lock(&mu_);
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [name, file] : files_) next = std::min(next, file.expires);
  return next;
}

std::optional<UploadStore::File> UploadStore::Current(const std::string& name) {
  int64_t bytes = 0, mtime_ns = 0;
  const bool there = Stat(PathOf(name), bytes, mtime_ns);
  MutexLock lock(&mu_);
  auto it = files_.find(name);
  if (it == files_.end()) return std::nullopt;
  if (there && it->second.bytes == bytes && it->second.mtime_ns == mtime_ns) return it->second;
  stored_bytes_ -= it->second.bytes;
  files_.erase(it);
  return std::nullopt;
}

absl::Status UploadStore::LearnHash(const std::string& name, const UploadHeader& header) {
  std::optional<File> there;
  {
    MutexLock lock(&disk_mu_);
    there = Current(name);
  }
  if (!there || there->bytes != header.size || !there->sha256.empty()) return absl::OkStatus();
  absl::StatusOr<std::string> sum = HashOf(PathOf(name));
  // What it is matters to nobody who replaces it.
  if (!sum.ok()) return header.replace ? absl::OkStatus() : sum.status();
  MutexLock lock(&disk_mu_);
  std::optional<File> now = Current(name);
  if (!now || now->bytes != there->bytes || now->mtime_ns != there->mtime_ns) return absl::OkStatus();
  now->sha256 = *std::move(sum);
  Set(name, *now);
  return absl::OkStatus();
}

absl::StatusOr<std::optional<StoredUpload>> UploadStore::TakeIfSame(const std::string& name, File file,
                                                                    const UploadHeader& header) {
  if (file.bytes == header.size && file.sha256 == header.sha256) return Renew(name, std::move(file), header);
  if (!header.replace) return Exists(name);
  return std::nullopt;
}

absl::Status UploadStore::RewriteNote(const std::string& name, const File& file) {
  const std::string fresh = absl::StrCat(folder(), "/", kIncoming, "/renewed");
  unlink(fresh.c_str());
  absl::Status status = WriteNote(fresh, file);
  if (status.ok() && rename(fresh.c_str(), NoteOf(name).c_str()) != 0) {
    status = DiskError("renew", NoteOf(name), errno);
  }
  if (!status.ok()) unlink(fresh.c_str());
  return status;
}

absl::StatusOr<StoredUpload> UploadStore::Renew(const std::string& name, File file,
                                                const UploadHeader& header) {
  file.expires = std::max(file.expires, Expiry(header));
  RETURN_IF_ERROR(RewriteNote(name, file));
  Set(name, file);
  return StoredUpload{name, file.bytes, file.expires, true};
}

absl::Status UploadStore::WriteNote(const std::string& path, const File& file) const {
  nlohmann::json note = {{"version", kNoteVersion},
                         {"sha256", file.sha256},
                         {"bytes", file.bytes},
                         {"mtime_ns", file.mtime_ns},
                         {"expires_ms", nullptr}};
  if (file.expires != absl::InfiniteFuture()) note["expires_ms"] = absl::ToUnixMillis(file.expires);
  ASSIGN_OR_RETURN(Fd fd, CreateNew(path));
  RETURN_IF_ERROR(WriteAll(fd.get(), note.dump() + "\n", path));
  return Sync(fd.get(), path);
}

// ---------------------------------------------------------------------------------------------- uploads

absl::Status UploadStore::TakeRoom(int64_t bytes) {
  for (bool last : {false, true}) {
    {
      MutexLock lock(&mu_);
      const int64_t taken = stored_bytes_ + incoming_bytes_;
      const int64_t files = static_cast<int64_t>(files_.size()) + incoming_files_;
      if (taken + bytes <= options_.total_bytes && files < options_.max_files) {
        incoming_bytes_ += bytes;
        ++incoming_files_;
        return absl::OkStatus();
      }
      if (last) {
        return MakeError(absl::StatusCode::kResourceExhausted, "UPLOADS_FULL",
                         absl::StrCat("the server holds ", taken, " bytes of uploads in ", files,
                                      " files and takes ", options_.total_bytes, " in ", options_.max_files,
                                      "; delete some, or wait until they expire"),
                         {{"held", absl::StrCat(taken)},
                          {"limit", absl::StrCat(options_.total_bytes)},
                          {"files", absl::StrCat(files)},
                          {"max_files", absl::StrCat(options_.max_files)}});
      }
    }
    RemoveExpired();
  }
  return absl::OkStatus();
}

absl::StatusOr<std::variant<StoredUpload, std::unique_ptr<UploadStore::Incoming>>> UploadStore::Begin(
    const UploadHeader& given) {
  using Result = std::variant<StoredUpload, std::unique_ptr<Incoming>>;
  UploadHeader header = given;
  absl::AsciiStrToLower(&header.sha256);
  ASSIGN_OR_RETURN(const std::string name, NameOf(header.name));
  RETURN_IF_ERROR(CheckHeader(header));
  RETURN_IF_ERROR(LearnHash(name, header));
  {
    MutexLock lock(&disk_mu_);
    if (const std::optional<File> there = Current(name)) {
      ASSIGN_OR_RETURN(std::optional<StoredUpload> same, TakeIfSame(name, *there, header));
      if (same) return Result(*std::move(same));
    }
  }
  RETURN_IF_ERROR(TakeRoom(header.size));
  // From here on its destructor gives the room back.
  auto incoming = std::unique_ptr<Incoming>(new Incoming(this, name, header));
  RETURN_IF_ERROR(incoming->Create());
  return Result(std::move(incoming));
}

UploadStore::Incoming::Incoming(UploadStore* store, std::string name, UploadHeader header)
    : store_(store), name_(std::move(name)), header_(std::move(header)) {}

absl::Status UploadStore::Incoming::Create() {
  // A folder for each, so that the file has its own name already, which messages about it mention.
  std::string pattern = absl::StrCat(store_->folder(), "/", kIncoming, "/XXXXXX");
  if (mkdtemp(pattern.data()) == nullptr) return DiskError("make", pattern, errno);
  folder_ = pattern;
  path_ = absl::StrCat(folder_, "/", fs::path(name_).filename().string(), kExtension);
  ASSIGN_OR_RETURN(fd_, CreateNew(path_));
  return absl::OkStatus();
}

UploadStore::Incoming::~Incoming() {
  fd_.reset();
  if (!folder_.empty()) {
    // No fs::remove_all: it opens the folder, and the process may be out of descriptors.
    unlink(path_.c_str());
    unlink(absl::StrCat(folder_, "/", kNote).c_str());
    if (rmdir(folder_.c_str()) != 0 && errno != ENOENT) {
      spdlog::error("upload: cannot remove {}: {}", folder_, std::strerror(errno));
    }
  }
  MutexLock lock(&store_->mu_);
  store_->incoming_bytes_ -= header_.size;
  --store_->incoming_files_;
}

absl::Status UploadStore::Incoming::Write(int64_t offset, absl::string_view data) {
  if (offset != received_) {
    return FieldError("chunk.offset",
                      absl::StrCat("is ", received_, ", the bytes sent before, not ", offset));
  }
  if (data.empty()) return FieldError("chunk.data", "is empty");
  const auto size = static_cast<int64_t>(data.size());
  if (size > kMaxChunkBytes) {
    return FieldError("chunk.data", absl::StrCat("has at most ", kMaxChunkBytes, " bytes, not ", size));
  }
  if (size > header_.size - received_) {
    return FieldError("chunk.data",
                      absl::StrCat("goes beyond the header's size of ", header_.size, " bytes"));
  }
  RETURN_IF_ERROR(WriteAll(fd_.get(), data, path_));
  sha256_.Update(data);
  received_ += size;
  return absl::OkStatus();
}

absl::StatusOr<StoredUpload> UploadStore::Incoming::Finish(const std::function<bool()>& cancelled) {
  if (received_ != header_.size) {
    return Corrupt(
        absl::StrCat("the upload ended after ", received_, " of ", header_.size, " bytes; send it again"),
        {{"received", absl::StrCat(received_)}, {"size", absl::StrCat(header_.size)}});
  }
  if (const std::string sum = sha256_.Finish(); sum != header_.sha256) {
    return Corrupt("what came has another SHA-256 than the header says; send it again",
                   {{"expected", header_.sha256}, {"actual", sum}});
  }
  RETURN_IF_ERROR(Sync(fd_.get(), path_));
  struct stat st = {};
  if (fstat(fd_.get(), &st) != 0) return DiskError("read", path_, errno);
  fd_.reset();
  RETURN_IF_ERROR(store_->options_.check(name_, path_, cancelled));
  const File file{.bytes = received_,
                  .mtime_ns = MtimeNs(st),
                  .sha256 = header_.sha256,
                  .expires = store_->Expiry(header_)};
  const std::string note = absl::StrCat(folder_, "/", kNote);
  RETURN_IF_ERROR(store_->WriteNote(note, file));
  bool replaced = false;
  RETURN_IF_ERROR(store_->LearnHash(name_, header_));
  {
    MutexLock lock(&store_->disk_mu_);
    // Another upload may have come first.
    if (const std::optional<File> there = store_->Current(name_)) {
      ASSIGN_OR_RETURN(std::optional<StoredUpload> same, store_->TakeIfSame(name_, *there, header_));
      if (same) return *std::move(same);
      replaced = true;
    }
    if (cancelled()) return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "the upload was cancelled");
    RETURN_IF_ERROR(store_->Place(*this, file, note));
  }
  if (replaced) store_->options_.on_gone(name_);
  return StoredUpload{name_, file.bytes, file.expires};
}

absl::Status UploadStore::Place(Incoming& incoming, const File& file, const std::string& note) {
  const std::string path = PathOf(incoming.name_);
  const fs::path parent = fs::path(path).parent_path();
  std::vector<fs::path> made;
  for (fs::path folder = parent; folder.string().size() > options_.folder.size();
       folder = folder.parent_path()) {
    made.push_back(folder);
  }
  for (auto folder = made.rbegin(); folder != made.rend(); ++folder) {
    if (mkdir(folder->c_str(), 0700) != 0 && errno != EEXIST)
      return DiskError("place", folder->string(), errno);
  }
  // The note first: it names the file it belongs to, so that a crash in between leaves nothing that is wrong.
  if (rename(note.c_str(), NoteOf(incoming.name_).c_str()) != 0) return DiskError("place", note, errno);
  if (rename(incoming.path_.c_str(), path.c_str()) != 0) {
    const int error = errno;
    // What was to be replaced is still there, and so is its time to go.
    const std::optional<File> old = Current(incoming.name_);
    if (!old || !RewriteNote(incoming.name_, *old).ok()) unlink(NoteOf(incoming.name_).c_str());
    return DiskError("place", path, error);
  }
  for (const fs::path& folder : made) SyncFolder(folder);
  Set(incoming.name_, file);
  return absl::OkStatus();
}

// --------------------------------------------------------------------------------------------- removals

absl::Status UploadStore::Remove(const std::string& name) {
  const std::string path = PathOf(name);
  // The file first: a note without a file is removed at the next start.
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return DiskError("remove", path, errno);
  unlink(NoteOf(name).c_str());
  unlink(absl::StrCat(NoteOf(name), kBroken).c_str());
  fs::path folder = fs::path(path).parent_path();
  SyncFolder(folder);
  const fs::path top = fs::path(this->folder()) / "uploads";
  for (; folder != top && rmdir(folder.c_str()) == 0; folder = folder.parent_path()) {
  }
  MutexLock lock(&mu_);
  if (auto it = files_.find(name); it != files_.end()) {
    stored_bytes_ -= it->second.bytes;
    files_.erase(it);
  }
  return absl::OkStatus();
}

absl::Status UploadStore::Delete(const std::string& name) {
  {
    MutexLock lock(&disk_mu_);
    if (!Current(name)) {
      return MakeError(
          absl::StatusCode::kNotFound, "LORA_NOT_FOUND",
          absl::StrCat("no upload is named '", name.substr(0, 128), "'; ListLoras shows what there is"),
          {{"resource_type", "lora"}, {"resource_name", name.substr(0, 128)}, {"field", "name"}});
    }
    RETURN_IF_ERROR(Remove(name));
  }
  options_.on_gone(name);
  return absl::OkStatus();
}

void UploadStore::RemoveExpired() {
  const absl::Time now = options_.now();
  std::vector<std::pair<absl::Time, std::string>> expired;
  {
    MutexLock lock(&mu_);
    for (const auto& [name, file] : files_) {
      if (file.expires <= now) expired.emplace_back(file.expires, name);
    }
  }
  std::sort(expired.begin(), expired.end());
  for (const auto& [expires, name] : expired) {
    {
      MutexLock lock(&disk_mu_);
      // It may have been renewed or replaced since.
      std::optional<StoredUpload> there = Find(name);
      if (!there || there->expires > now) continue;
      if (!Remove(name).ok()) {
        // The log has the cause; once a minute is enough.
        MutexLock retry(&mu_);
        files_[name].expires = now + absl::Minutes(1);
        continue;
      }
    }
    spdlog::info("upload {} has expired", name);
    options_.on_gone(name);
  }
}

}  // namespace latentd
