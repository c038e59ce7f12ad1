#include "cache/mapped_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "cache/error.h"

namespace latentd {
namespace {

// What the handler may look at: fixed size, atomics only.
constexpr int kMaxMappings = 4096;
struct Region {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> truncated{false};
};
Region g_regions[kMaxMappings];
struct sigaction g_previous;
uintptr_t g_page_size = 4096;

void OnSigbus(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (Region& region : g_regions) {
    const uintptr_t begin = region.begin.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address >= region.end.load(std::memory_order_acquire)) continue;
    region.truncated.store(true, std::memory_order_release);
    void* page = reinterpret_cast<void*>(address / g_page_size * g_page_size);
    if (mmap(page, g_page_size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) return;
    break;
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
    g_page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    struct sigaction action = {};
    action.sa_sigaction = OnSigbus;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &g_previous);
  });
}

int TakeSlot(uintptr_t begin, uintptr_t end) {
  for (int i = 0; i < kMaxMappings; ++i) {
    uintptr_t free_slot = 0;
    if (g_regions[i].begin.compare_exchange_strong(free_slot, 1)) {  // 1 = being set up
      g_regions[i].truncated = false;
      g_regions[i].end = end;
      g_regions[i].begin = begin;
      return i;
    }
  }
  return -1;
}

}  // namespace

absl::StatusOr<std::shared_ptr<MappedFile>> MappedFile::Open(const std::string& path) {
  const std::string base = path.substr(path.find_last_of('/') + 1);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) {
    if (errno == ELOOP) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "UNSAFE_FILE",
                       absl::StrCat(base, " is a symbolic link; put the file itself there"), {{"file", base}});
    }
    return MakeError(absl::StatusCode::kNotFound, "FILE_NOT_FOUND",
                     absl::StrCat("cannot open ", base, ": ", std::strerror(errno)), {{"file", base}});
  }
  auto file = std::shared_ptr<MappedFile>(new MappedFile);
  file->fd_ = fd;
  struct stat st = {};
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "UNSAFE_FILE", absl::StrCat(base, " is no regular file"),
                     {{"file", base}});
  }
  file->size_ = st.st_size;
  file->identity_ = absl::StrCat(st.st_dev, ":", st.st_ino, ":", st.st_size, ":", st.st_mtim.tv_sec, ".",
                                 st.st_mtim.tv_nsec);
  if (st.st_size == 0) return file;
  InstallHandler();
  void* p = mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  if (p == MAP_FAILED) {
    return MakeError(absl::StatusCode::kInternal, "MAP_FAILED",
                     absl::StrCat("cannot map ", base, ": ", std::strerror(errno)), {{"file", base}});
  }
  file->data_ = static_cast<const uint8_t*>(p);
  const auto begin = reinterpret_cast<uintptr_t>(p);
  const uintptr_t length = (static_cast<uintptr_t>(st.st_size) + g_page_size - 1) / g_page_size * g_page_size;
  file->slot_ = TakeSlot(begin, begin + length);
  return file;
}

MappedFile::~MappedFile() {
  if (slot_ >= 0) g_regions[slot_].begin = 1;  // not to be found by the handler, not yet to be taken
  if (data_ != nullptr) munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(size_));
  if (slot_ >= 0) g_regions[slot_].begin = 0;
  if (fd_ >= 0) close(fd_);
}

bool MappedFile::truncated() const {
  return slot_ >= 0 && g_regions[slot_].truncated.load(std::memory_order_acquire);
}

}  // namespace latentd
