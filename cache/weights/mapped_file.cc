#include "cache/weights/mapped_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

uintptr_t g_page_size = 4096;
struct sigaction g_previous;

MappingTable& Table() {
  static auto* table = new MappingTable;  // the handler may come at any time
  return *table;
}

void OnSigbus(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (MappingTable::Region* region = Table().Find(address)) {
    region->torn.store(true, std::memory_order_release);
    void* page = reinterpret_cast<void*>(address / g_page_size * g_page_size);
    if (mmap(page, g_page_size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED)
      return;
  }
  // Not ours: do what would have happened without this handler.
  sigaction(SIGBUS, &g_previous, nullptr);
  if ((g_previous.sa_flags & SA_SIGINFO) != 0 && g_previous.sa_sigaction != nullptr) {
    g_previous.sa_sigaction(signal, info, context);
  }
}

void InstallHandler() {
  static std::once_flag once;
  std::call_once(once, [] {
    Table();  // made here, so that the handler finds it made
    g_page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    struct sigaction action = {};
    action.sa_sigaction = OnSigbus;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &g_previous);
  });
}

// The files that are mapped, by device and inode.
struct Registry {
  Mutex mu;
  std::map<std::pair<uint64_t, uint64_t>, std::weak_ptr<MappedFile>> files ABSL_GUARDED_BY(mu);

  static Registry& Get() {
    static auto* registry = new Registry;
    return *registry;
  }
};

struct Relievers {
  Mutex mu;
  std::vector<const std::function<bool()>*> all ABSL_GUARDED_BY(mu);

  static Relievers& Get() {
    static auto* relievers = new Relievers;
    return *relievers;
  }
  bool GiveBack() {
    MutexLock lock(&mu);
    return std::any_of(all.begin(), all.end(), [](const auto* give_back) { return (*give_back)(); });
  }
};

std::string BaseName(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

absl::Status OutOfDescriptors() {
  return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_DESCRIPTORS",
                   "the server has as many files and connections open as it may (RLIMIT_NOFILE); try again "
                   "later, or ask its operator to raise the limit",
                   {{"retry_ms", "1000"}});
}

absl::Status OpenFailed(const std::string& base, int error) {
  if (error == EMFILE || error == ENFILE) return OutOfDescriptors();
  if (error == ELOOP) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "UNSAFE_FILE",
                     absl::StrCat(base, " is a symbolic link; put the file itself there"), {{"file", base}});
  }
  return MakeError(absl::StatusCode::kNotFound, "FILE_NOT_FOUND",
                   absl::StrCat("cannot open ", base, ": ", std::strerror(error)), {{"file", base}});
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

}  // namespace

// ------------------------------------------------------------------------------------------------- opening

absl::StatusOr<std::shared_ptr<MappedFile>> MappedFile::Open(const std::string& path) {
  while (true) {
    auto file = OpenOnce(path);
    if (file.ok() || ErrorReason(file.status()) != "OUT_OF_MAPPINGS" || !Relievers::Get().GiveBack())
      return file;
  }
}

absl::StatusOr<std::shared_ptr<MappedFile>> MappedFile::OpenOnce(const std::string& path) {
  const std::string base = BaseName(path);
  const Descriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (fd.get() < 0) return OpenFailed(base, errno);
  struct stat st = {};
  if (fstat(fd.get(), &st) != 0 || !S_ISREG(st.st_mode)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "UNSAFE_FILE",
                     absl::StrCat(base, " is no regular file"), {{"file", base}});
  }
  auto file = std::shared_ptr<MappedFile>(new MappedFile);
  file->watch_ = FileWatch::Create(fd.get());
  // Looked at after the watch began: whatever comes later, it notes.
  if (fstat(fd.get(), &st) != 0) return OpenFailed(base, errno);
  file->opened_ = FileIdentity::Of(st);
  file->identity_ = file->opened_.ToString();
  {
    MutexLock lock(&file->mu_);
    file->path_ = path;
    file->ctime_ns_ = file->opened_.ctime_ns;
  }
  std::shared_ptr<MappedFile> known;  // may be the last to let go of it, and then not under the lock
  Registry& registry = Registry::Get();
  MutexLock lock(&registry.mu);
  std::weak_ptr<MappedFile>& entry = registry.files[file->opened_.file()];
  known = entry.lock();
  if (known != nullptr && known->Serves(file->opened_, path)) return known;
  // Written to within one tick of its times.
  if (known != nullptr && known->identity() == file->identity()) file->identity_ += "+";
  if (absl::Status status = file->Map(fd.get()); !status.ok()) {
    if (known == nullptr) registry.files.erase(file->opened_.file());
    return status;
  }
  entry = file;
  return file;
}

absl::Status MappedFile::Map(int fd) {
  if (opened_.size == 0) return absl::OkStatus();
  InstallHandler();
  void* p = mmap(nullptr, static_cast<size_t>(opened_.size), PROT_READ, MAP_PRIVATE, fd, 0);
  if (p == MAP_FAILED) {
    const int error = errno;
    const std::string base = BaseName(path());
    if (error == ENOMEM) {
      return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MAPPINGS",
                       absl::StrCat("the system maps no more files for this process, as ", base,
                                    " (vm.max_map_count, RLIMIT_AS); try again later"),
                       {{"file", base}, {"retry_ms", "1000"}});
    }
    return MakeError(absl::StatusCode::kInternal, "MAP_FAILED",
                     absl::StrCat("cannot map ", base, ": ", std::strerror(error)), {{"file", base}});
  }
  data_ = static_cast<const uint8_t*>(p);
  const auto begin = reinterpret_cast<uintptr_t>(p);
  const uintptr_t length =
      (static_cast<uintptr_t>(opened_.size) + g_page_size - 1) / g_page_size * g_page_size;
  region_ = Table().Take(begin, begin + length);
  return absl::OkStatus();
}

MappedFile::~MappedFile() {
  {
    Registry& registry = Registry::Get();
    MutexLock lock(&registry.mu);
    auto it = registry.files.find(opened_.file());
    if (it != registry.files.end() && it->second.expired()) registry.files.erase(it);
  }
  if (region_ != nullptr) Table().Hide(region_);  // another mapping may come to lie there
  if (data_ != nullptr) munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(opened_.size));
  if (region_ != nullptr) Table().Give(region_);
}

std::string MappedFile::IdentityAt(const std::string& path) {
  const auto now = FileIdentity::At(path);
  if (!now) return "";
  std::shared_ptr<MappedFile> known;
  {
    Registry& registry = Registry::Get();
    MutexLock lock(&registry.mu);
    auto it = registry.files.find(now->file());
    if (it != registry.files.end()) known = it->second.lock();
  }
  return known != nullptr && known->Serves(*now, path) ? known->identity() : now->ToString();
}

// ------------------------------------------------------------------------------------------------- changes

std::string MappedFile::path() const {
  MutexLock lock(&mu_);
  return path_;
}

bool MappedFile::Serves(const FileIdentity& now, const std::string& path) const {
  MutexLock lock(&mu_);
  if (truncated() || ChangedLocked(now)) return false;
  path_ = path;
  return true;
}

bool MappedFile::ChangedLocked(const std::optional<FileIdentity>& now) const {
  if (changed_) return true;
  const FileWatch::Seen seen = watch_ == nullptr ? FileWatch::Seen::kUnknown : watch_->seen();
  const bool same_times = !now || (now->size == opened_.size && now->mtime_ns == opened_.mtime_ns);
  const bool moved = now && now->ctime_ns != ctime_ns_;
  const bool unknown = seen == FileWatch::Seen::kUnknown;
  // Nothing has moved, and nothing was noted: what lies at the path is the file as it was.
  const bool in_doubt = moved || (unknown && !now);
  changed_ = !same_times || seen == FileWatch::Seen::kWrites ||
             (in_doubt && (samples_ ? SamplesDiffer() : unknown && moved));
  if (!changed_ && moved) ctime_ns_ = now->ctime_ns;
  return changed_;
}

absl::Status MappedFile::Check() const {
  std::string base;
  bool changed = false;
  {
    MutexLock lock(&mu_);
    base = BaseName(path_);
    std::optional<FileIdentity> now = changed_ ? std::nullopt : FileIdentity::At(path_);
    if (now && now->file() != opened_.file()) now.reset();
    changed = ChangedLocked(now);
  }
  if (changed) {
    return MakeError(absl::StatusCode::kAborted, "FILE_CHANGED",
                     absl::StrCat(base,
                                  " was changed while it was in use, and what was made from it is dropped; "
                                  "open a new session to use the file as it is now (replacing a file by "
                                  "rename leaves sessions what they have)"),
                     {{"file", base}});
  }
  if (truncated()) {
    return MakeError(absl::StatusCode::kDataLoss, "FILE_TRUNCATED",
                     absl::StrCat(base, " was cut short or cannot be read; restore the file"),
                     {{"file", base}});
  }
  return absl::OkStatus();
}

bool MappedFile::at_its_place() const {
  const auto now = FileIdentity::At(path());
  return now && now->file() == opened_.file();
}

bool MappedFile::truncated() const {
  return region_ != nullptr && region_->torn.load(std::memory_order_acquire);
}

// The whole of a small file; of a large one its start, its end, and what lies between in equal distances.
// Little, for a load waits for it.
uint64_t MappedFile::Sample() const {
  constexpr int64_t kWhole = 64 << 10, kPieces = 16, kPiece = 4096, kStart = 4096;
  const auto piece = [&](int64_t at, int64_t bytes) {
    return absl::string_view(reinterpret_cast<const char*>(data_) + at, static_cast<size_t>(bytes));
  };
  const int64_t size = opened_.size;
  if (size <= kWhole) return absl::HashOf(piece(0, size));
  uint64_t hash = absl::HashOf(piece(0, kStart));
  for (int64_t i = 1; i <= kPieces; ++i) {
    const int64_t at = (size - kPiece) / kPieces * i / kPiece * kPiece;
    hash = absl::HashOf(hash, piece(i == kPieces ? size - kPiece : at, kPiece));
  }
  return hash;
}

bool MappedFile::SamplesDiffer() const { return *samples_ != Sample(); }

void MappedFile::TakeSamples() const {
  MutexLock lock(&mu_);
  if (!samples_ && data_ != nullptr) samples_ = Sample();
}

MappingReliever::MappingReliever(std::function<bool()> give_back) : give_back_(std::move(give_back)) {
  Relievers& relievers = Relievers::Get();
  MutexLock lock(&relievers.mu);
  relievers.all.push_back(&give_back_);
}

MappingReliever::~MappingReliever() {
  Relievers& relievers = Relievers::Get();
  MutexLock lock(&relievers.mu);
  std::erase(relievers.all, &give_back_);
}

absl::Status CheckDescriptors() {
  const Descriptor fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
  return fd.get() < 0 && (errno == EMFILE || errno == ENFILE) ? OutOfDescriptors() : absl::OkStatus();
}

}  // namespace latentd
