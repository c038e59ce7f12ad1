#include "server/catalog/upload_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "cache/base/sha256.h"
#include "server/catalog/garbage_files.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class UploadStoreTest : public ::testing::Test {
 protected:
  UploadStoreTest() : root_(absl::StrCat(::testing::TempDir(), "/upload_store_", getpid())) {
    fs::remove_all(root_);
    fs::create_directories(root_);
    options_.folder = (root_ / "store").string();
    options_.max_bytes = 1000;
    options_.total_bytes = 3000;
    options_.ttl = absl::Hours(24);
    options_.now = [this] { return now_; };
    options_.check = [this](const std::string& name, const std::string& path, const std::function<bool()>&) {
      checked_.push_back(absl::StrCat(name, "=", ReadFile(path)));
      if (absl::StrContains(ReadFile(path), "bad")) return FieldError("file", "is bad");
      return absl::OkStatus();
    };
    options_.on_gone = [this](const std::string& name) { gone_.push_back(name); };
    Reopen();
  }
  ~UploadStoreTest() override {
    store_.reset();
    fs::remove_all(root_);
  }

  void Reopen() {
    store_.reset();
    auto store = UploadStore::Open(options_);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }

  static UploadHeader Header(const std::string& name, const std::string& data) {
    return {.name = name, .sha256 = Sha256Hex(data), .size = static_cast<int64_t>(data.size())};
  }

  absl::StatusOr<StoredUpload> Put(const UploadHeader& header, const std::string& data) {
    ASSIGN_OR_RETURN(auto begun, store_->Begin(header));
    if (auto* stored = std::get_if<StoredUpload>(&begun)) return *stored;
    auto& incoming = std::get<std::unique_ptr<UploadStore::Incoming>>(begun);
    for (size_t at = 0; at < data.size(); at += 3) {
      RETURN_IF_ERROR(incoming->Write(static_cast<int64_t>(at), data.substr(at, 3)));
    }
    return incoming->Finish([] { return false; });
  }
  absl::StatusOr<StoredUpload> Put(const std::string& name, const std::string& data) {
    return Put(Header(name, data), data);
  }
  std::unique_ptr<UploadStore::Incoming> Begin(const UploadHeader& header) {
    auto begun = store_->Begin(header);
    EXPECT_TRUE(begun.ok()) << begun.status();
    return std::get<std::unique_ptr<UploadStore::Incoming>>(*std::move(begun));
  }

  // Files and folders in the store, but for what is always there.
  std::set<std::string> Files() const {
    std::set<std::string> out;
    for (const auto& entry : fs::recursive_directory_iterator(options_.folder)) {
      out.insert(entry.path().lexically_relative(options_.folder).string());
    }
    for (const char* always : {".lock", ".incoming", "uploads"}) EXPECT_EQ(out.erase(always), 1u) << always;
    return out;
  }

  std::string Data(const std::string& name) const {
    return ReadFile(fs::path(options_.folder) / (name + ".safetensors"));
  }

  const fs::path root_;
  absl::Time now_ = absl::FromUnixSeconds(absl::ToUnixSeconds(absl::Now()));
  std::vector<std::string> checked_, gone_;
  UploadStore::Options options_;
  std::unique_ptr<UploadStore> store_;
};

TEST_F(UploadStoreTest, AFileIsCheckedAndThenInItsPlace) {
  auto stored = Put("alice/night", "some data");
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->name, "uploads/alice/night");
  EXPECT_EQ(stored->bytes, 9);
  EXPECT_EQ(stored->expires, now_ + absl::Hours(24));
  EXPECT_FALSE(stored->existed);
  EXPECT_EQ(Data("uploads/alice/night"), "some data");
  EXPECT_THAT(checked_, ElementsAre("uploads/alice/night=some data"));
  EXPECT_THAT(Files(),
              ElementsAre("uploads/alice", "uploads/alice/.night.json", "uploads/alice/night.safetensors"));
  struct stat st = {};
  ASSERT_EQ(stat((options_.folder + "/uploads/alice/night.safetensors").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0600u);
}

TEST_F(UploadStoreTest, ANameIsTheSameWithAndWithoutItsFolder) {
  EXPECT_EQ(*UploadStore::NameOf("night"), "uploads/night");
  EXPECT_EQ(*UploadStore::NameOf("uploads/night"), "uploads/night");
  EXPECT_EQ(*UploadStore::NameOf("uploads"), "uploads/uploads");
}

TEST_F(UploadStoreTest, NamesThatLeadElsewhereAreRefused) {
  for (const std::string& name :
       {std::string(""), std::string(".."), std::string("../x"), std::string("a/../b"), std::string("/etc/x"),
        std::string("a//b"), std::string("a/"), std::string(".hidden"), std::string("a/.hidden"),
        std::string("uploads/"), std::string("a\0b", 3), std::string("ä"), std::string("a b"),
        std::string("a\\b"), std::string(121, 'x'), std::string("a/b/c/d/e/f/g"),
        std::string("night.safetensors"), std::string("a.safetensors/b")}) {
    const absl::Status status = store_->Begin(Header(name, "x")).status();
    EXPECT_EQ(ErrorReason(status), "INVALID_FIELD") << name;
    EXPECT_EQ(GetErrorDetails(status)["field"], "header.name") << name;
  }
  EXPECT_TRUE(Put("a/b/c/d/e/f", "x").ok());
  EXPECT_TRUE(Put(std::string(120, 'x'), "x").ok());
}

TEST_F(UploadStoreTest, AHeaderMustBeWhole) {
  const auto field = [&](UploadHeader header) {
    return GetErrorDetails(store_->Begin(header).status())["field"];
  };
  UploadHeader header = Header("x", "data");
  header.sha256 = "";
  EXPECT_EQ(field(header), "header.sha256");
  header.sha256 = "../" + std::string(61, 'a');
  EXPECT_EQ(field(header), "header.sha256");
  header = Header("x", "data");
  header.size = 0;
  EXPECT_EQ(field(header), "header.size");
  header.size = -1;
  EXPECT_EQ(field(header), "header.size");
  header = Header("x", "data");
  header.ttl = absl::ZeroDuration();
  EXPECT_EQ(field(header), "header.ttl");
  header.ttl = absl::Hours(25);
  EXPECT_EQ(field(header), "header.ttl");
  header = Header("x", std::string(1001, 'x'));
  EXPECT_EQ(ErrorReason(store_->Begin(header).status()), "UPLOAD_TOO_LARGE");
  EXPECT_THAT(Files(), IsEmpty());
}

TEST_F(UploadStoreTest, UpperCaseSumsAreTaken) {
  UploadHeader header = Header("x", "data");
  for (char& c : header.sha256) c = static_cast<char>(toupper(c));
  EXPECT_TRUE(Put(header, "data").ok());
}

TEST_F(UploadStoreTest, ChunksComeInOrderAndEndWhereTheHeaderSays) {
  const auto field = [](const absl::Status& status) { return GetErrorDetails(status)["field"]; };
  {
    auto incoming = Begin(Header("x", "0123456789"));
    EXPECT_TRUE(incoming->Write(0, "012").ok());
    EXPECT_EQ(field(incoming->Write(4, "4")), "chunk.offset");
    EXPECT_EQ(field(incoming->Write(0, "012")), "chunk.offset");
    EXPECT_EQ(field(incoming->Write(-1, "0")), "chunk.offset");
    EXPECT_EQ(field(incoming->Write(3, "")), "chunk.data");
    EXPECT_EQ(field(incoming->Write(3, "3456789X")), "chunk.data");
    EXPECT_EQ(field(incoming->Write(3, std::string(UploadStore::kMaxChunkBytes + 1, 'x'))), "chunk.data");
  }
  EXPECT_THAT(Files(), IsEmpty());
}

TEST_F(UploadStoreTest, WhatIsShortOrOtherLeavesNothing) {
  {
    auto incoming = Begin(Header("x", "0123456789"));
    EXPECT_TRUE(incoming->Write(0, "012").ok());
    const absl::Status status = incoming->Finish([] { return false; }).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(ErrorReason(status), "UPLOAD_CORRUPT");
    EXPECT_EQ(GetErrorDetails(status)["received"], "3");
  }
  UploadHeader header = Header("x", "0123456789");
  EXPECT_EQ(ErrorReason(Put(header, "012345678X").status()), "UPLOAD_CORRUPT");
  EXPECT_THAT(checked_, IsEmpty());
  EXPECT_THAT(Files(), IsEmpty());
  EXPECT_FALSE(store_->Find("uploads/x"));
}

TEST_F(UploadStoreTest, WhatFailsItsCheckLeavesNothing) {
  EXPECT_EQ(GetErrorDetails(Put("x/y", "bad").status())["field"], "file");
  EXPECT_THAT(Files(), IsEmpty());
  EXPECT_TRUE(Put("x/y", "good").ok());
  UploadHeader header = Header("x/y", "bad");
  header.replace = true;
  EXPECT_FALSE(Put(header, "bad").ok());
  EXPECT_EQ(Data("uploads/x/y"), "good");
}

TEST_F(UploadStoreTest, ACancelledUploadLeavesNothing) {
  {
    auto incoming = Begin(Header("x", "012"));
    EXPECT_TRUE(incoming->Write(0, "012").ok());
  }
  {
    auto incoming = Begin(Header("x", "012"));
    EXPECT_TRUE(incoming->Write(0, "012").ok());
    EXPECT_EQ(incoming->Finish([] { return true; }).status().code(), absl::StatusCode::kCancelled);
  }
  EXPECT_THAT(Files(), IsEmpty());
}

TEST_F(UploadStoreTest, TheSameFileAgainNeedsNoDataAndLivesLonger) {
  UploadHeader header = Header("x", "data");
  header.ttl = absl::Hours(2);
  ASSERT_TRUE(Put(header, "data").ok());
  now_ += absl::Hours(1);
  auto begun = store_->Begin(header);
  ASSERT_TRUE(begun.ok());
  const auto& stored = std::get<StoredUpload>(*begun);
  EXPECT_TRUE(stored.existed);
  EXPECT_EQ(stored.expires, now_ + absl::Hours(2));
  header.ttl = absl::Minutes(1);
  EXPECT_EQ(std::get<StoredUpload>(*store_->Begin(header)).expires, now_ + absl::Hours(2)) << "shortened";
  Reopen();
  EXPECT_EQ(store_->Find("uploads/x")->expires, now_ + absl::Hours(2));
}

TEST_F(UploadStoreTest, AnotherFileOfThatNameNeedsReplace) {
  ASSERT_TRUE(Put("x", "old").ok());
  EXPECT_EQ(ErrorReason(Put("x", "new").status()), "UPLOAD_EXISTS");
  EXPECT_EQ(Data("uploads/x"), "old");
  UploadHeader header = Header("x", "newer");
  header.replace = true;
  auto stored = Put(header, "newer");
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_FALSE(stored->existed);
  EXPECT_EQ(Data("uploads/x"), "newer");
  EXPECT_THAT(gone_, ElementsAre("uploads/x"));
}

TEST_F(UploadStoreTest, WhoOpenedAFileKeepsItWhenItIsReplacedOrRemoved) {
  ASSERT_TRUE(Put("x", "old").ok());
  std::ifstream held(options_.folder + "/uploads/x.safetensors");
  UploadHeader header = Header("x", "new");
  header.replace = true;
  ASSERT_TRUE(Put(header, "new").ok());
  ASSERT_TRUE(store_->Delete("uploads/x").ok());
  std::string text;
  held >> text;
  EXPECT_EQ(text, "old");
}

TEST_F(UploadStoreTest, OfTwoUploadsAtOnceTheFirstToFinishWins) {
  auto first = Begin(Header("x", "one"));
  auto second = Begin(Header("x", "two"));
  auto third = Begin(Header("x", "one"));
  EXPECT_TRUE(first->Write(0, "one").ok() && second->Write(0, "two").ok() && third->Write(0, "one").ok());
  EXPECT_TRUE(first->Finish([] { return false; }).ok());
  EXPECT_EQ(ErrorReason(second->Finish([] { return false; }).status()), "UPLOAD_EXISTS");
  auto again = third->Finish([] { return false; });
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->existed);
  first.reset();
  second.reset();
  third.reset();
  EXPECT_THAT(Files(), ElementsAre("uploads/.x.json", "uploads/x.safetensors"));
}

TEST_F(UploadStoreTest, AllFilesTogetherKeepToTheQuota) {
  const std::string kilo(1000, 'x');
  ASSERT_TRUE(Put("a", kilo).ok());
  ASSERT_TRUE(Put("b", kilo).ok());
  auto coming = Begin(Header("c", kilo));  // counts before its data comes
  const absl::Status full = Put("d", "x").status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(full), "UPLOADS_FULL");
  coming.reset();
  EXPECT_TRUE(Put("d", "x").ok());
  EXPECT_EQ(ErrorReason(Put("e", kilo).status()), "UPLOADS_FULL");
  ASSERT_TRUE(store_->Delete("uploads/a").ok());
  EXPECT_TRUE(Put("e", kilo).ok());
}

TEST_F(UploadStoreTest, WhatHasExpiredMakesRoom) {
  const std::string kilo(1000, 'x');
  UploadHeader header = Header("a", kilo);
  header.ttl = absl::Hours(1);
  ASSERT_TRUE(Put(header, kilo).ok());
  ASSERT_TRUE(Put("b", kilo).ok());
  ASSERT_TRUE(Put("c", kilo).ok());
  now_ += absl::Hours(2);
  EXPECT_TRUE(Put("d", kilo).ok());
  EXPECT_THAT(gone_, ElementsAre("uploads/a"));
}

TEST_F(UploadStoreTest, TheNumberOfFilesIsBounded) {
  options_.max_files = 2;
  Reopen();
  ASSERT_TRUE(Put("a", "x").ok() && Put("b", "x").ok());
  EXPECT_EQ(ErrorReason(Put("c", "x").status()), "UPLOADS_FULL");
}

TEST_F(UploadStoreTest, FilesGoWhenTheirTimeHasComeAndFoldersWithThem) {
  UploadHeader header = Header("alice/short", "data");
  header.ttl = absl::Minutes(1);
  ASSERT_TRUE(Put(header, "data").ok());
  ASSERT_TRUE(Put("long", "data").ok());
  EXPECT_EQ(store_->next_expiry(), now_ + absl::Minutes(1));
  store_->RemoveExpired();
  EXPECT_TRUE(store_->Find("uploads/alice/short"));
  now_ += absl::Minutes(1);
  store_->RemoveExpired();
  EXPECT_FALSE(store_->Find("uploads/alice/short"));
  EXPECT_THAT(Files(), ElementsAre("uploads/.long.json", "uploads/long.safetensors"));
  EXPECT_THAT(gone_, ElementsAre("uploads/alice/short"));
  EXPECT_EQ(store_->next_expiry(), now_ + absl::Hours(24) - absl::Minutes(1));
}

TEST_F(UploadStoreTest, WithoutATtlFilesStayAndClientsMayAskForAnyTime) {
  options_.ttl = absl::InfiniteDuration();
  Reopen();
  EXPECT_EQ(Put("x", "data")->expires, absl::InfiniteFuture());
  UploadHeader header = Header("y", "data");
  header.ttl = absl::Hours(1000);
  EXPECT_EQ(Put(header, "data")->expires, now_ + absl::Hours(1000));
  header = Header("z", "data");
  header.ttl = absl::Seconds(315'576'000'000);
  EXPECT_EQ(GetErrorDetails(Put(header, "data").status())["field"], "header.ttl");
  Reopen();
  EXPECT_EQ(store_->Find("uploads/x")->expires, absl::InfiniteFuture());
  EXPECT_EQ(store_->Find("uploads/y")->expires, now_ + absl::Hours(1000));
}

TEST_F(UploadStoreTest, DeleteTakesUploadsOnly) {
  ASSERT_TRUE(Put("x", "data").ok());
  for (const char* name : {"x", "uploads/y", "../x", "", ".incoming/x"}) {
    EXPECT_EQ(ErrorReason(store_->Delete(name)), "LORA_NOT_FOUND") << name;
  }
  EXPECT_TRUE(store_->Delete("uploads/x").ok());
  EXPECT_THAT(Files(), IsEmpty());
  EXPECT_EQ(ErrorReason(store_->Delete("uploads/x")), "LORA_NOT_FOUND");
}

TEST_F(UploadStoreTest, ARestartKeepsFilesAndRemovesWhatWasOnItsWay) {
  ASSERT_TRUE(Put("alice/x", "data").ok());
  fs::create_directories(options_.folder + "/.incoming/abc");
  std::ofstream(options_.folder + "/.incoming/abc/y.safetensors") << "half";
  std::ofstream(options_.folder + "/uploads/.orphan.json") << "{}";
  Reopen();
  EXPECT_THAT(Files(), ElementsAre("uploads/alice", "uploads/alice/.x.json", "uploads/alice/x.safetensors"));
  EXPECT_EQ(store_->Find("uploads/alice/x")->expires, now_ + absl::Hours(24));
  EXPECT_TRUE(std::get<StoredUpload>(*store_->Begin(Header("alice/x", "data"))).existed);
  now_ += absl::Hours(25);
  Reopen();
  EXPECT_THAT(Files(), IsEmpty());
}

TEST_F(UploadStoreTest, AFileWithoutANoteOrWithAStrangeOneIsKeptFromItsWriting) {
  ASSERT_TRUE(Put("x", "data").ok());
  const fs::path note = options_.folder + "/uploads/.x.json";
  for (const std::string& text :
       {std::string(), std::string("nonsense"), std::string("[]"), std::string(9000, '['),
        std::string(R"({"version": 1, "bytes": "x", "expires_ms": 1})"),
        std::string(R"({"version": 1, "bytes": 4, "mtime_ns": 5, "expires_ms": 1})")}) {
    std::ofstream(note, std::ios::trunc) << text;
    Reopen();
    const auto found = store_->Find("uploads/x");
    ASSERT_TRUE(found) << text;
    EXPECT_LT(absl::AbsDuration(found->expires - now_ - absl::Hours(24)), absl::Minutes(5));
  }
  fs::remove(note);
  Reopen();
  EXPECT_TRUE(std::get<StoredUpload>(*store_->Begin(Header("x", "data"))).existed)
      << "the sum is worked out anew";
  EXPECT_EQ(ErrorReason(store_->Begin(Header("x", "atad")).status()), "UPLOAD_EXISTS");
}

TEST_F(UploadStoreTest, AFileThatSomebodyTookAwayIsNoLongerThere) {
  ASSERT_TRUE(Put("x", "data").ok());
  fs::remove(options_.folder + "/uploads/x.safetensors");
  auto again = Put("x", "data");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(again->existed);
  EXPECT_EQ(Data("uploads/x"), "data");
}

// A lower limit of the process while it lives.
class LowLimit {
 public:
  LowLimit(__rlimit_resource_t resource, rlim_t limit) : resource_(resource) {
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(resource_, &old_);
    rlimit low = old_;
    low.rlim_cur = limit;
    setrlimit(resource_, &low);
  }
  ~LowLimit() { setrlimit(resource_, &old_); }

 private:
  const __rlimit_resource_t resource_;
  rlimit old_ = {};
};

TEST_F(UploadStoreTest, AFullDiskIsSaidAndLeavesNothing) {
  const std::string kilo(1000, 'x');
  auto incoming = Begin(Header("x", kilo));
  absl::Status status;
  {
    LowLimit small(RLIMIT_FSIZE, 500);
    status = incoming->Write(0, kilo);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(status), "DISK_FULL");
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr(options_.folder)));
  incoming.reset();
  EXPECT_THAT(Files(), IsEmpty());
}

TEST_F(UploadStoreTest, ADiskThatIsFullWhenTheNoteIsWrittenIsTheSame) {
  {
    LowLimit small(RLIMIT_FSIZE, 10);
    EXPECT_EQ(ErrorReason(Put("x", "data").status()), "DISK_FULL");
  }
  EXPECT_THAT(Files(), IsEmpty());
  ASSERT_TRUE(Put("x", "data").ok());
  now_ += absl::Hours(1);
  {
    LowLimit small(RLIMIT_FSIZE, 10);
    EXPECT_EQ(ErrorReason(store_->Begin(Header("x", "data")).status()), "DISK_FULL");
  }
  EXPECT_THAT(Files(), ElementsAre("uploads/.x.json", "uploads/x.safetensors"));
  EXPECT_TRUE(std::get<StoredUpload>(*store_->Begin(Header("x", "data"))).existed);
}

// Root may read everything; not while this lives.
class NoOverride {
 public:
  NoOverride() {
    syscall(SYS_capget, &header_, old_);
    __user_cap_data_struct less[2] = {old_[0], old_[1]};
    less[0].effective &= ~(1u << CAP_DAC_OVERRIDE | 1u << CAP_DAC_READ_SEARCH);
    syscall(SYS_capset, &header_, less);
  }
  ~NoOverride() { syscall(SYS_capset, &header_, old_); }

 private:
  __user_cap_header_struct header_ = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct old_[2] = {};
};

TEST_F(UploadStoreTest, AFileThatCannotBeReadIsNotTakenForAnotherAndCanBeReplaced) {
  ASSERT_TRUE(Put("x", "data").ok());
  const std::string path = options_.folder + "/uploads/x.safetensors";
  fs::remove(options_.folder + "/uploads/.x.json");
  chmod(path.c_str(), 0);
  Reopen();
  NoOverride none;
  const absl::Status status = Put("x", "data").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(ErrorReason(status), "UPLOAD_FAILED");
  EXPECT_EQ(ErrorReason(Put("x", "another").status()), "UPLOAD_EXISTS") << "which its size says";
  UploadHeader header = Header("x", "data");
  header.replace = true;
  auto stored = Put(header, "data");
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_FALSE(stored->existed);
  EXPECT_EQ(Data("uploads/x"), "data");
  EXPECT_THAT(gone_, ElementsAre("uploads/x"));
  EXPECT_TRUE(Put("x", "data")->existed);
}

TEST_F(UploadStoreTest, AnUploadForWhichNoFileCanBeOpenedLeavesNothing) {
  const int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
  close(next);
  {
    LowLimit none(RLIMIT_NOFILE, static_cast<rlim_t>(next));
    EXPECT_EQ(ErrorReason(store_->Begin(Header("x", "data")).status()), "UPLOAD_FAILED");
  }
  EXPECT_THAT(Files(), IsEmpty());
}

TEST_F(UploadStoreTest, WhateverLiesWhereANoteBelongsTheServerStartsAndGoesOn) {
  ASSERT_TRUE(Put("x", "data").ok());
  const fs::path note = options_.folder + "/uploads/.x.json";
  const auto expect_that_it_goes_on = [&](const std::string& what) {
    SCOPED_TRACE(what);
    Reopen();
    const auto found = store_->Find("uploads/x");
    ASSERT_TRUE(found);
    EXPECT_TRUE(found->expires == absl::InfiniteFuture() ||
                (found->expires >= absl::UnixEpoch() && found->expires < now_ + absl::Hours(24 * 365 * 101)));
    // It is renewed, so the note can be written.
    const auto again = store_->Begin(Header("x", "data"));
    ASSERT_TRUE(again.ok()) << again.status();
    ASSERT_TRUE(std::holds_alternative<StoredUpload>(*again));
    Reopen();
    EXPECT_GE(store_->Find("uploads/x")->expires, now_ + absl::Hours(24) - absl::Milliseconds(1));
  };
  for (const auto& [name, make] : ThingsThatAreNoFile()) {
    fs::remove_all(note);
    fs::remove_all(note.string() + ".broken");
    make(note);
    expect_that_it_goes_on(name);
    EXPECT_TRUE(fs::exists(fs::symlink_status(note.string() + ".broken"))) << name;
  }
  fs::remove_all(note.string() + ".broken");
  const nlohmann::json good = nlohmann::json::parse(ReadFile(note));
  std::mt19937 random(7);
  for (int i = 0; i < 300; ++i) {
    const std::string text = DamagedJson(good, random);
    std::ofstream(note, std::ios::trunc) << text;
    Reopen();
    // One that says so may have expired.
    if (!store_->Find("uploads/x")) {
      ASSERT_TRUE(Put("x", "data").ok()) << text;
    }
  }
  // A time that no client can be told is none.
  ASSERT_TRUE(store_->Delete("uploads/x").ok());
  ASSERT_TRUE(Put("x", "data").ok());
  nlohmann::json late = nlohmann::json::parse(ReadFile(note));
  late["expires_ms"] = INT64_MAX;
  std::ofstream(note, std::ios::trunc) << late;
  Reopen();
  EXPECT_EQ(store_->Find("uploads/x")->expires, absl::InfiniteFuture());
  ASSERT_TRUE(store_->Delete("uploads/x").ok());
}

TEST_F(UploadStoreTest, WhateverLiesWhereTheLockBelongsGivesWay) {
  const fs::path lock = options_.folder + "/.lock";
  for (const auto& [name, make] : ThingsThatAreNoFile()) {
    store_.reset();
    fs::remove_all(lock);
    fs::remove_all(lock.string() + ".broken");
    make(lock);
    Reopen();
    ASSERT_NE(store_, nullptr) << name;
    EXPECT_EQ(ErrorReason(UploadStore::Open(options_).status()), "UPLOAD_DIR_IN_USE") << name;
  }
}

// What the server cannot do with its own folder: the client hears no path, and nothing stays.
TEST_F(UploadStoreTest, AnUploadThatTheDiskRefusesLeavesNothing) {
  const auto reason = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("upload_store_")));
    return ErrorReason(status);
  };
  const fs::path uploads = fs::path(options_.folder) / "uploads";
  const fs::path incoming = fs::path(options_.folder) / ".incoming";
  fs::remove(incoming);
  EXPECT_EQ(reason(Put("x", "data").status()), "UPLOAD_FAILED");
  fs::create_directory(incoming);
  // A file where a folder has to be, and folders where a file and its note have to be.
  std::ofstream(uploads / "file") << "x";
  EXPECT_EQ(reason(Put("file/x", "data").status()), "UPLOAD_FAILED");
  EXPECT_EQ(reason(Put("file/y/x", "data").status()), "UPLOAD_FAILED");
  fs::remove(uploads / "file");
  fs::create_directories(uploads / "x.safetensors/full");
  EXPECT_EQ(reason(Put("x", "data").status()), "UPLOAD_FAILED");
  EXPECT_FALSE(fs::exists(uploads / ".x.json")) << "a note without a file";
  fs::remove_all(uploads / "x.safetensors");
  fs::create_directories(uploads / ".x.json/full");
  EXPECT_EQ(reason(Put("x", "data").status()), "UPLOAD_FAILED");
  fs::remove_all(uploads / ".x.json");
  EXPECT_THAT(Files(), IsEmpty());
  EXPECT_FALSE(store_->Find("uploads/x"));
  // The quota has all of its bytes again.
  const std::string kilo(1000, 'x');
  EXPECT_TRUE(Put("a", kilo).ok() && Put("b", kilo).ok() && Put("c", kilo).ok());
}

TEST_F(UploadStoreTest, AFileThatIsNotReplacedAfterAllKeepsItsTime) {
  UploadHeader header = Header("x", "old");
  header.ttl = absl::Hours(2);
  ASSERT_TRUE(Put(header, "old").ok());
  const absl::Time expires = store_->Find("uploads/x")->expires;
  // Somebody tidies up what is on its way, at the worst of times.
  options_.check = [](const std::string&, const std::string& path, const std::function<bool()>&) {
    fs::remove(path);
    return absl::OkStatus();
  };
  Reopen();
  header = Header("x", "new");
  header.replace = true;
  EXPECT_EQ(ErrorReason(Put(header, "new").status()), "UPLOAD_FAILED");
  EXPECT_EQ(Data("uploads/x"), "old");
  EXPECT_THAT(gone_, IsEmpty());
  EXPECT_THAT(Files(), ElementsAre("uploads/.x.json", "uploads/x.safetensors"));
  EXPECT_EQ(store_->Find("uploads/x")->expires, expires);
  Reopen();
  EXPECT_EQ(store_->Find("uploads/x")->expires, expires);
}

TEST_F(UploadStoreTest, AFileWhoseTimeCannotBeRenewedKeepsTheTimeItHas) {
  ASSERT_TRUE(Put("x", "data").ok());
  const absl::Time expires = store_->Find("uploads/x")->expires;
  now_ += absl::Hours(1);
  const fs::path note = options_.folder + "/uploads/.x.json";
  fs::remove(note);
  fs::create_directories(note / "full");
  EXPECT_EQ(ErrorReason(store_->Begin(Header("x", "data")).status()), "UPLOAD_FAILED");
  EXPECT_EQ(store_->Find("uploads/x")->expires, expires);
  fs::remove_all(note);
  EXPECT_THAT(Files(), ElementsAre("uploads/x.safetensors"));
  EXPECT_EQ(std::get<StoredUpload>(*store_->Begin(Header("x", "data"))).expires, expires + absl::Hours(1));
}

TEST_F(UploadStoreTest, AFileThatCannotBeRemovedIsTriedAgainInAMinute) {
  ASSERT_TRUE(Put("x", "data").ok());
  const fs::path path = options_.folder + "/uploads/x.safetensors";
  fs::remove(path);
  fs::create_directories(path / "full");
  now_ += absl::Hours(24);
  store_->RemoveExpired();
  EXPECT_EQ(store_->next_expiry(), now_ + absl::Minutes(1));
  EXPECT_THAT(gone_, IsEmpty());
  fs::remove_all(path);
  store_->RemoveExpired();
  EXPECT_TRUE(store_->Find("uploads/x"));
  now_ += absl::Minutes(1);
  store_->RemoveExpired();
  EXPECT_FALSE(store_->Find("uploads/x"));
  EXPECT_THAT(gone_, ElementsAre("uploads/x"));
  EXPECT_THAT(Files(), IsEmpty());
}

TEST_F(UploadStoreTest, WhateverManyThreadsDoFilesAreWholeAndTheBooksBalance) {
  options_.check = [](const std::string&, const std::string&, const std::function<bool()>&) {
    return absl::OkStatus();
  };
  options_.on_gone = [](const std::string&) {};
  Reopen();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 60; ++i) {
        const std::string name = absl::StrCat("f", i % 2 == 0 ? "" : "/", (i + t) % 3);
        const std::string data(static_cast<size_t>(10 + 100 * ((i + t) % 5)), static_cast<char>('a' + t));
        UploadHeader header = Header(name, data);
        header.replace = (i + t) % 2 == 0;
        if (i % 7 == 6) {
          store_->Delete("uploads/" + name).IgnoreError();
        } else if (i % 11 == 10) {
          store_->RemoveExpired();
        } else {
          const absl::Status status = Put(header, data).status();
          EXPECT_TRUE(status.ok() || ErrorReason(status) == "UPLOAD_EXISTS" ||
                      ErrorReason(status) == "UPLOADS_FULL")
              << status;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t bytes = 0;
  for (const std::string& file : Files()) {
    if (!absl::EndsWith(file, ".safetensors")) continue;
    const std::string name(absl::StripSuffix(file, ".safetensors"));
    const std::string data = Data(name);
    EXPECT_EQ(data, std::string(data.size(), data[0]));
    ASSERT_TRUE(store_->Find(name)) << name;
    EXPECT_TRUE(std::get<StoredUpload>(*store_->Begin(Header(name, data))).existed) << name;
    bytes += static_cast<int64_t>(data.size());
  }
  // What is left of the quota is what the files leave of it, to the byte.
  std::vector<std::unique_ptr<UploadStore::Incoming>> fill;
  for (int64_t left = options_.total_bytes - bytes; left > 0; left -= options_.max_bytes) {
    const std::string data(static_cast<size_t>(std::min(left, options_.max_bytes)), 'x');
    fill.push_back(Begin(Header(absl::StrCat("fill", left), data)));
  }
  EXPECT_EQ(ErrorReason(Put("over", "x").status()), "UPLOADS_FULL");
}

TEST_F(UploadStoreTest, AFolderHasOneServer) {
  EXPECT_EQ(ErrorReason(UploadStore::Open(options_).status()), "UPLOAD_DIR_IN_USE");
}

TEST_F(UploadStoreTest, AFolderThatOthersCanChangeIsRefused) {
  options_.folder = (root_ / "open").string();
  fs::create_directories(options_.folder);
  chmod(options_.folder.c_str(), 0777);
  EXPECT_THAT(std::string(UploadStore::Open(options_).status().message()), HasSubstr("chmod 700"));
  std::ofstream(root_ / "file") << "x";
  options_.folder = (root_ / "file").string();
  EXPECT_EQ(ErrorReason(UploadStore::Open(options_).status()), "INVALID_CONFIG");
}

TEST_F(UploadStoreTest, WhatIsThereInsteadOfTheFolderOfUploadsIsRefused) {
  store_.reset();
  const fs::path uploads = fs::path(options_.folder) / "uploads";
  const auto refusal = [&] {
    const absl::Status status = UploadStore::Open(options_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ErrorReason(status), "INVALID_CONFIG");
    EXPECT_THAT(std::string(status.message()), HasSubstr("store/uploads'"));
    return std::string(status.message());
  };
  fs::remove(uploads);
  std::ofstream(uploads) << "x";
  EXPECT_THAT(refusal(), HasSubstr("is no folder; move it away"));
  EXPECT_EQ(ReadFile(uploads), "x");
  fs::remove(uploads);
  fs::create_directory(root_ / "elsewhere");
  fs::create_directory_symlink(root_ / "elsewhere", uploads);
  EXPECT_THAT(refusal(), HasSubstr("is a link"));
  fs::remove(uploads);
  fs::create_directory(uploads);
  chmod(uploads.c_str(), 0777);
  EXPECT_THAT(refusal(), HasSubstr("chmod 700"));
  chmod(uploads.c_str(), 0700);
  // Nobody's file is on its way at start: what is there goes.
  fs::remove(fs::path(options_.folder) / ".incoming");
  std::ofstream(fs::path(options_.folder) / ".incoming") << "x";
  Reopen();
  EXPECT_TRUE(Put("x", "data").ok());
}

TEST_F(UploadStoreTest, AFolderThatCannotBeMadeOrLockedIsRefused) {
  std::ofstream(root_ / "file") << "x";
  options_.folder = (root_ / "file/below").string();
  const absl::Status below = UploadStore::Open(options_).status();
  EXPECT_EQ(ErrorReason(below), "INVALID_CONFIG");
  EXPECT_THAT(std::string(below.message()), HasSubstr("cannot be made"));
  options_.folder = (root_ / "locked").string();
  // It cannot even be put aside.
  fs::create_directories(options_.folder + "/.lock");
  fs::create_directories(options_.folder + "/.lock.broken/full");
  const absl::Status locked = UploadStore::Open(options_).status();
  EXPECT_EQ(ErrorReason(locked), "INVALID_CONFIG");
  EXPECT_THAT(std::string(locked.message()), HasSubstr("cannot be locked"));
}

}  // namespace
}  // namespace latentd
