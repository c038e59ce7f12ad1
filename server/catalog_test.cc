#include "server/catalog.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAreArray;

class CatalogTest : public ::testing::Test {
 protected:
  CatalogTest() : root_(fs::path(::testing::TempDir()) / absl::StrCat("catalog_", getpid())) {
    fs::create_directories(root_);
  }
  ~CatalogTest() override { fs::remove_all(root_); }

  void Write(const std::string& file) const {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << "x";
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const LoraFile& lora : Catalog({}, {root_.string()}, {}).Loras()) names.push_back(lora.name);
    return names;
  }

  const fs::path root_;
};

TEST_F(CatalogTest, NamesArePathsBelowTheRoot) {
  for (const char* file : {"a.safetensors", "b/c.safetensors", "b/d.txt", ".hidden/e.safetensors",
                           "b/.f.safetensors", "1/2/3/4/5/6/g.safetensors", "1/2/3/4/5/6/7/h.safetensors"}) {
    Write(file);
  }
  fs::create_directory_symlink(root_ / "b", root_ / "link");
  EXPECT_EQ(Names(), (std::vector<std::string>{"1/2/3/4/5/6/g", "a", "b/c"}));
}

// As a folder that goes away between two looks: of an upload that has ended, or whose last file was removed.
TEST_F(CatalogTest, AFolderThatCannotBeReadHidesNothingElse) {
  std::vector<std::string> names;
  for (int i = 0; i < 20; ++i) {
    names.push_back(absl::StrCat("f", i));
    Write(absl::StrCat("f", i, ".safetensors"));
    fs::create_directory(root_ / absl::StrCat("d", i));
  }
  // One folder can be open, and none below it.
  const int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
  close(next);
  rlimit old = {};
  getrlimit(RLIMIT_NOFILE, &old);
  rlimit few = old;
  few.rlim_cur = static_cast<rlim_t>(next) + 1;
  setrlimit(RLIMIT_NOFILE, &few);
  const std::vector<std::string> found = Names();
  setrlimit(RLIMIT_NOFILE, &old);
  EXPECT_THAT(found, UnorderedElementsAreArray(names));
}

TEST_F(CatalogTest, AChangeOfAnyFileIsAnotherModelWhateverElseIsInTheFolder) {
  const fs::path model = root_ / "m";
  fs::copy("deploy/demo/models/shapes-flux", model, fs::copy_options::recursive);
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(model)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  for (int i = 0; i < 20; ++i) Write(absl::StrCat("m/deep", i, "/2/3/4/5/6/7/x.txt"));
  Catalog catalog({root_.string()}, {});
  const auto id = [&] {
    const auto opened = catalog.Model("m");
    return opened.ok() ? (*opened)->id : opened.status().ToString();
  };
  std::string before = id();
  EXPECT_THAT(before, StartsWith("m@"));
  EXPECT_EQ(id(), before);
  for (const fs::path& file : files) {
    fs::last_write_time(file, fs::last_write_time(file) + std::chrono::seconds(1));
    const std::string after = id();
    EXPECT_NE(after, before) << file;
    before = after;
  }
}

}  // namespace
}  // namespace latentd
