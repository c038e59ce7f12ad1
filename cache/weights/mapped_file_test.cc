#include "cache/weights/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

class MappedFileTest : public testing::Test {
 protected:
  void SetUp() override {
    folder = testing::TempDir() + "/mapped_" + std::to_string(getpid());
    std::filesystem::create_directories(folder);
    path = folder + "/weights";
    std::ofstream(path) << std::string(1 << 16, 'x');
  }
  void TearDown() override { std::filesystem::remove_all(folder); }
  // A mapping of the file in a folder that holds nothing else.
  std::shared_ptr<MappedFile> OpenAnew() {
    TearDown();
    SetUp();
    return *MappedFile::Open(path);
  }
  std::string folder, path;
};

TEST_F(MappedFileTest, AFileThatIsCutShortIsMarkedAndTheProcessLives) {
  auto file = *MappedFile::Open(path);
  EXPECT_EQ(file->data()[0], 'x');
  ASSERT_EQ(truncate(path.c_str(), 0), 0);
  volatile uint8_t byte = file->data()[40'000];
  EXPECT_EQ(byte, 0);
  EXPECT_TRUE(file->truncated());
}

TEST_F(MappedFileTest, AnotherMappingIsNotBlamed) {
  std::ofstream(folder + "/other") << std::string(1 << 16, 'y');
  auto file = *MappedFile::Open(path);
  auto other = *MappedFile::Open(folder + "/other");
  ASSERT_EQ(truncate(path.c_str(), 0), 0);
  volatile uint8_t byte = file->data()[5000];
  (void)byte;
  EXPECT_TRUE(file->truncated());
  EXPECT_FALSE(other->truncated());
}

TEST_F(MappedFileTest, WhatIsNoRegularFileIsRefused) {
  EXPECT_EQ(ErrorReason(MappedFile::Open(folder).status()), "UNSAFE_FILE");
  EXPECT_EQ(ErrorReason(MappedFile::Open("/dev/zero").status()), "UNSAFE_FILE");
  ASSERT_EQ(mkfifo((folder + "/fifo").c_str(), 0600), 0);
  EXPECT_EQ(ErrorReason(MappedFile::Open(folder + "/fifo").status()), "UNSAFE_FILE");
  ASSERT_EQ(symlink(path.c_str(), (folder + "/link").c_str()), 0);
  EXPECT_EQ(ErrorReason(MappedFile::Open(folder + "/link").status()), "UNSAFE_FILE");
  EXPECT_EQ(ErrorReason(MappedFile::Open(folder + "/none").status()), "FILE_NOT_FOUND");
}

TEST_F(MappedFileTest, AReplacedFileHasAnotherIdentity) {
  const std::string before = (*MappedFile::Open(path))->identity();
  std::ofstream(folder + "/new") << std::string(1 << 16, 'z');
  std::filesystem::rename(folder + "/new", path);
  EXPECT_NE((*MappedFile::Open(path))->identity(), before);
}

// ------------------------------------------------------------------------------- many files, few descriptors

TEST_F(MappedFileTest, MoreFilesThanDescriptorsCanBeMapped) {
  rlimit old = {};
  getrlimit(RLIMIT_NOFILE, &old);
  rlimit few = old;
  few.rlim_cur = 64;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<std::shared_ptr<MappedFile>> files;
  for (int i = 0; i < 200; ++i) {
    const std::string name = absl::StrCat(folder, "/", i);
    std::ofstream(name) << i;
    auto file = MappedFile::Open(name);
    EXPECT_TRUE(file.ok()) << i << ": " << file.status();
    if (file.ok()) files.push_back(*file);
  }
  setrlimit(RLIMIT_NOFILE, &old);
  for (size_t i = 0; i < files.size(); ++i) EXPECT_TRUE(files[i]->Check().ok());
}

TEST_F(MappedFileTest, WithoutADescriptorNoFileIsSaidToBeMissing) {
  const auto warm = MappedFile::Open(path);  // its watch has the one descriptor of all watches
  rlimit old = {};
  getrlimit(RLIMIT_NOFILE, &old);
  const int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
  close(next);
  rlimit none = old;
  none.rlim_cur = static_cast<rlim_t>(next);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status status = MappedFile::Open(path).status();
  const absl::Status asked = CheckDescriptors();
  const absl::Status of_what_is_open = (*warm)->Check();
  setrlimit(RLIMIT_NOFILE, &old);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(status), "OUT_OF_DESCRIPTORS");
  EXPECT_EQ(ErrorReason(asked), "OUT_OF_DESCRIPTORS");
  EXPECT_TRUE(of_what_is_open.ok()) << of_what_is_open;
  EXPECT_TRUE(CheckDescriptors().ok());
}

TEST_F(MappedFileTest, TheLastOfManyMappingsIsMendedAsWell) {
  std::vector<std::shared_ptr<MappedFile>> files;
  for (int i = 0; i < 5000; ++i) {
    const std::string name = absl::StrCat(folder, "/", i);
    std::ofstream(name) << "x";
    files.push_back(*MappedFile::Open(name));
  }
  ASSERT_EQ(truncate(absl::StrCat(folder, "/4999").c_str(), 0), 0);
  volatile uint8_t byte = files[4999]->data()[0];
  EXPECT_EQ(byte, 0);
  EXPECT_TRUE(files[4999]->truncated());
  EXPECT_FALSE(files[4998]->truncated());
}

TEST_F(MappedFileTest, WithoutAMappingThoseWhoHoldSomeAreAskedToGiveThemBack) {
  // The address space ends here: what is mapped from now on has to come out of what is given back.
  const int64_t large = int64_t{1} << 30;
  for (const char* name : {"/a", "/b"}) {
    std::ofstream(folder + name).close();
    ASSERT_EQ(truncate((folder + name).c_str(), large), 0);
  }
  auto held = *MappedFile::Open(folder + "/a");
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0;
  statm >> pages;
  rlimit old = {};
  getrlimit(RLIMIT_AS, &old);
  rlimit tight = old;
  tight.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + large / 2);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  const absl::Status alone = MappedFile::Open(folder + "/b").status();
  int asked = 0;
  absl::Status helped;
  {
    MappingReliever reliever([&] {
      ++asked;
      return std::exchange(held, nullptr) != nullptr;
    });
    helped = MappedFile::Open(folder + "/b").status();
  }
  setrlimit(RLIMIT_AS, &old);
  EXPECT_EQ(ErrorReason(alone), "OUT_OF_MAPPINGS");
  EXPECT_EQ(alone.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(helped.ok()) << helped;
  EXPECT_EQ(asked, 1);
}

// --------------------------------------------------------------------------------- files that change under
// us

// What can be done to the file at `path`; `folder` is for other files.
struct Change {
  const char* name;
  void (*make)(const std::string& path, const std::string& folder);
  bool counts;
};

void Write(const std::string& path, char c, bool in_place = true) {
  const int fd = open(path.c_str(), O_WRONLY | (in_place ? 0 : O_CREAT | O_TRUNC), 0600);
  const std::string bytes(1 << 16, c);
  ASSERT_EQ(write(fd, bytes.data(), bytes.size()), 1 << 16);
  close(fd);
}

timespec ModifiedAt(const std::string& path) {
  struct stat st = {};
  EXPECT_EQ(stat(path.c_str(), &st), 0);
  return st.st_mtim;
}

void SetModified(const std::string& path, timespec time) {
  const timespec times[2] = {{0, UTIME_OMIT}, time};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

const Change kChanges[] = {
    {"written", [](const std::string& p, const std::string&) { Write(p, 'y'); }, true},
    {"cut short and written", [](const std::string& p, const std::string&) { Write(p, 'y', false); }, true},
    {"cut short", [](const std::string& p, const std::string&) { ASSERT_EQ(truncate(p.c_str(), 9), 0); },
     true},
    {"made longer",
     [](const std::string& p, const std::string&) { ASSERT_EQ(truncate(p.c_str(), 1 << 17), 0); }, true},
    {"touched",
     [](const std::string& p, const std::string&) {
       SetModified(p, {1000, 0});
     },
     true},
    {"written, with its time set back",
     [](const std::string& p, const std::string&) {
       const timespec before = ModifiedAt(p);
       Write(p, 'y');
       SetModified(p, before);
     },
     true},
    {"written and restored, with its time set back",
     [](const std::string& p, const std::string&) {
       const timespec before = ModifiedAt(p);
       Write(p, 'y');
       Write(p, 'x');
       SetModified(p, before);
     },
     true},
    {"moved away and written there",
     [](const std::string& p, const std::string& f) {
       ASSERT_EQ(rename(p.c_str(), (f + "/moved").c_str()), 0);
       Write(f + "/moved", 'y');
     },
     true},
    {"written by another name",
     [](const std::string& p, const std::string& f) {
       ASSERT_EQ(link(p.c_str(), (f + "/link").c_str()), 0);
       ASSERT_EQ(unlink(p.c_str()), 0);
       Write(f + "/link", 'y');
     },
     true},
    {"another mode", [](const std::string& p, const std::string&) { ASSERT_EQ(chmod(p.c_str(), 0400), 0); },
     false},
    {"another link, and gone",
     [](const std::string& p, const std::string& f) {
       ASSERT_EQ(link(p.c_str(), (f + "/link").c_str()), 0);
       ASSERT_EQ(unlink((f + "/link").c_str()), 0);
     },
     false},
    {"renamed to and fro",
     [](const std::string& p, const std::string& f) {
       ASSERT_EQ(rename(p.c_str(), (f + "/moved").c_str()), 0);
       ASSERT_EQ(rename((f + "/moved").c_str(), p.c_str()), 0);
     },
     false},
    {"replaced by rename",
     [](const std::string& p, const std::string& f) {
       Write(f + "/new", 'y', false);
       ASSERT_EQ(rename((f + "/new").c_str(), p.c_str()), 0);
     },
     false},
    {"removed", [](const std::string& p, const std::string&) { ASSERT_EQ(unlink(p.c_str()), 0); }, false},
};

TEST_F(MappedFileTest, WhatWasWrittenToHasChangedAndWhatGotAnotherNameModeOrPlaceHasNot) {
  for (const Change& change : kChanges) {
    SCOPED_TRACE(change.name);
    const auto file = OpenAnew();
    file->TakeSamples();
    EXPECT_TRUE(file->Check().ok());
    change.make(path, folder);
    const absl::Status status = file->Check();
    EXPECT_EQ(ErrorReason(status), change.counts ? "FILE_CHANGED" : "");
    EXPECT_EQ(status.code(), change.counts ? absl::StatusCode::kAborted : absl::StatusCode::kOk);
    if (change.counts) {
      EXPECT_EQ(GetErrorDetails(status).at("file"), "weights");
    } else {
      EXPECT_EQ(file->data()[0], 'x');
    }
  }
}

TEST_F(MappedFileTest, AnIdentityOutlivesWhatChangesNoByteAndNoWriteAtAll) {
  for (const Change& change : kChanges) {
    SCOPED_TRACE(change.name);
    const auto file = OpenAnew();
    EXPECT_EQ(MappedFile::IdentityAt(path), file->identity());
    change.make(path, folder);
    const auto again = MappedFile::Open(path);
    EXPECT_EQ(MappedFile::IdentityAt(path), again.ok() ? (*again)->identity() : "");
    if (!again.ok()) continue;  // it is elsewhere
    const bool replaced = std::string_view(change.name) == "replaced by rename";
    EXPECT_EQ((*again)->identity() == file->identity(), !change.counts && !replaced);
    EXPECT_EQ(*again == file, !change.counts && !replaced) << "one file, one mapping";
    EXPECT_TRUE((*again)->Check().ok());
  }
}

TEST_F(MappedFileTest, AFileThatHasChangedStaysSo) {
  auto file = *MappedFile::Open(path);
  const timespec before = ModifiedAt(path);
  Write(path, 'y');
  EXPECT_EQ(ErrorReason(file->Check()), "FILE_CHANGED");
  Write(path, 'x');
  SetModified(path, before);
  EXPECT_EQ(ErrorReason(file->Check()), "FILE_CHANGED");
  // Unknown to it, and known: whoever opens it anew has it as it is.
  EXPECT_TRUE((*MappedFile::Open(path))->Check().ok());
}

// Where a write leaves no note: through a mapping.
TEST_F(MappedFileTest, SamplesTellWhereNoWriteWasNoted) {
  auto file = *MappedFile::Open(path);
  file->TakeSamples();
  const timespec before = ModifiedAt(path);
  {
    const int fd = open(path.c_str(), O_RDWR);
    void* bytes = mmap(nullptr, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ASSERT_NE(bytes, MAP_FAILED);
    std::memset(bytes, 'y', 1 << 16);
    munmap(bytes, 1 << 16);
    close(fd);
  }
  SetModified(path, before);
  EXPECT_EQ(ErrorReason(file->Check()), "FILE_CHANGED");
}

// A system without watches, or without any left.
TEST_F(MappedFileTest, WithoutAWatchTimesAndSamplesTell) {
  for (const Change& change : kChanges) {
    SCOPED_TRACE(change.name);
    TearDown();
    SetUp();
    FaultInjector::Arm(FaultPoint::kWatch, 1);
    auto file = *MappedFile::Open(path);
    ASSERT_TRUE(FaultInjector::Disarm());
    file->TakeSamples();
    EXPECT_TRUE(file->Check().ok());
    change.make(path, folder);
    // That it was something else in between can be told by nobody.
    const bool restored = std::string_view(change.name) == "written and restored, with its time set back";
    EXPECT_EQ(ErrorReason(file->Check()), change.counts && !restored ? "FILE_CHANGED" : "");
  }
}

TEST_F(MappedFileTest, WithoutAWatchAndSamplesAChangeTimeThatMovedIsAChange) {
  FaultInjector::Arm(FaultPoint::kWatch, 1);
  auto file = *MappedFile::Open(path);
  ASSERT_TRUE(FaultInjector::Disarm());
  EXPECT_TRUE(file->Check().ok());
  chmod(path.c_str(), 0400);
  EXPECT_EQ(ErrorReason(file->Check()), "FILE_CHANGED");
}

TEST_F(MappedFileTest, AFileKnowsWhetherItIsStillAtItsPlace) {
  auto file = *MappedFile::Open(path);
  EXPECT_TRUE(file->at_its_place());
  std::filesystem::rename(path, folder + "/moved");
  EXPECT_FALSE(file->at_its_place());
  // Found again by its new name.
  EXPECT_EQ(*MappedFile::Open(folder + "/moved"), file);
  EXPECT_TRUE(file->at_its_place());
}

TEST_F(MappedFileTest, AnEmptyFileHasNoBytes) {
  std::ofstream(path, std::ios::trunc);
  EXPECT_EQ((*MappedFile::Open(path))->size(), 0);
}

}  // namespace
}  // namespace latentd
