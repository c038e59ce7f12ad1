#include "server/catalog/catalog.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/catalog/garbage_files.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
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
  EXPECT_EQ(Names(), (std::vector<std::string>{"1/2/3/4/5/6/g", "a", "b/c"}));
}

TEST_F(CatalogTest, NamesAreWhateverFilesAreCalledButForControlCharacters) {
  const std::string longest(255 - 12, 'x');
  const std::vector<std::string> names = {"a b, [c] (d)", "caps",  "e'f\"g\\h",
                                          "i:j@k,l=1",    longest, "猫 🐈/ü"};
  for (const std::string& name : names) {
    if (name != "caps") Write(absl::StrCat(name, ".safetensors"));
  }
  Write("caps.SafeTensors");
  Write("new\nline.safetensors");
  Write("del\x7f.safetensors");
  Write("c1\xc2\x85.safetensors");
  Write("latin\xe9.safetensors");
  EXPECT_THAT(Names(), UnorderedElementsAreArray(names));
  const Catalog catalog({}, {root_.string()}, {});
  for (const std::string& name : names) EXPECT_TRUE(catalog.Lora(name).ok()) << name;
  std::vector<std::string> unserved;
  for (const Unserved& one : catalog.UnservedLoras()) unserved.push_back(one.name);
  EXPECT_THAT(unserved, ElementsAre("c1\\u0085.safetensors", "del\\u007f.safetensors",
                                    "latin\\xe9.safetensors", "new\\nline.safetensors"));
}

// A hub's cache has its files under names of their contents, and links to them; and people link folders.
TEST_F(CatalogTest, LinksAreFollowedInsideOfTheRoots) {
  const fs::path elsewhere = root_.string() + "_elsewhere";
  fs::create_directories(elsewhere / "more");
  std::ofstream(elsewhere / "out.safetensors") << "x";
  std::ofstream(elsewhere / "more/deep.safetensors") << "x";
  Write("hub/blobs/0123abcd");
  Write("b/c.safetensors");
  fs::create_directories(root_ / "hub/snapshots/1");
  fs::create_symlink("../../blobs/0123abcd", root_ / "hub/snapshots/1/x.safetensors");
  fs::create_directory_symlink(root_ / "b", root_ / "link");
  fs::create_directory_symlink(root_, root_ / "b/circle");
  fs::create_symlink(elsewhere / "out.safetensors", root_ / "out.safetensors");
  fs::create_directory_symlink(elsewhere / "more", root_ / "v1.5");
  fs::create_symlink("gone", root_ / "gone.safetensors");
  fs::create_symlink("../notes.txt", root_ / "notes.txt");
  const auto names = [&](bool follow) {
    std::vector<std::string> out;
    for (const LoraFile& lora : Catalog({}, {root_.string()}, {}, follow).Loras()) out.push_back(lora.name);
    return out;
  };
  EXPECT_THAT(names(false), ElementsAre("b/c", "hub/snapshots/1/x", "link/c"));
  EXPECT_THAT(names(true), ElementsAre("b/c", "hub/snapshots/1/x", "link/c", "out", "v1.5/deep"));
  const Catalog catalog({}, {root_.string()}, {});
  EXPECT_EQ(ErrorReason(catalog.Lora("out").status()), "LORA_NOT_FOUND");
  EXPECT_EQ(ErrorReason(catalog.Lora("v1.5/deep").status()), "LORA_NOT_FOUND");
  EXPECT_TRUE(Catalog({}, {root_.string()}, {}, true).Lora("out").ok());
  std::map<std::string, std::string> unserved;
  for (const Unserved& one : catalog.UnservedLoras()) unserved[one.name] = one.problem;
  EXPECT_EQ(unserved.size(), 3u);
  EXPECT_THAT(unserved["out.safetensors"], HasSubstr("follow_links"));
  EXPECT_THAT(unserved["v1.5"], HasSubstr("follow_links"));
  EXPECT_THAT(unserved["gone.safetensors"], HasSubstr("link to nothing"));
  fs::remove_all(elsewhere);
}

TEST_F(CatalogTest, OfTwoFilesWithOneNameOneIsServedAndTheOtherTold) {
  for (const char* file : {"1/a.safetensors", "1/a.SAFETENSORS", "2/a.safetensors", "1/b.SAFETENSORS"})
    Write(file);
  const Catalog catalog({}, {(root_ / "1").string(), (root_ / "2").string()}, {});
  std::vector<std::string> paths;
  for (const LoraFile& lora : catalog.Loras()) paths.push_back(fs::path(lora.path).lexically_relative(root_));
  EXPECT_THAT(paths, ElementsAre("1/a.safetensors", "1/b.SAFETENSORS"));
  std::vector<std::string> unserved;
  for (const Unserved& one : catalog.UnservedLoras()) unserved.push_back(one.name);
  EXPECT_THAT(unserved, ElementsAre("a.SAFETENSORS", "a.safetensors"));
}

TEST_F(CatalogTest, WhatLooksLikeWeightsAndIsNotServedSaysWhy) {
  for (const char* file : {"a.ckpt", "b.sft", "c.safetensors.part", "notes.txt", "preview.png", "config.json",
                           "1/2/3/4/5/6/7/h.safetensors"}) {
    Write(file);
  }
  std::ofstream(root_ / "pickle.pt") << "PK\x03\x04";
  fs::create_directory(root_ / "folder.safetensors");
  mkfifo((root_ / "pipe.safetensors").c_str(), 0600);
  std::map<std::string, std::string> problems;
  for (const Unserved& one : Catalog({}, {root_.string()}, {}).UnservedLoras())
    problems[one.name] = one.problem;
  EXPECT_THAT(problems, testing::ElementsAre(testing::Pair("1/2/3/4/5/6/7", HasSubstr("below 6 folders")),
                                             testing::Pair("a.ckpt", HasSubstr("is not called .safetensors")),
                                             testing::Pair("b.sft", HasSubstr("is not called .safetensors")),
                                             testing::Pair("c.safetensors.part", HasSubstr("did not end")),
                                             testing::Pair("folder.safetensors", "is a folder"),
                                             testing::Pair("pickle.pt", HasSubstr("pickle")),
                                             testing::Pair("pipe.safetensors", "is no regular file")));
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

class ModelFilesTest : public CatalogTest {
 protected:
  ModelFilesTest() { Copy("m"); }
  void Copy(const std::string& name) const {
    fs::copy("deploy/demo/models/shapes-flux", root_ / name, fs::copy_options::recursive);
  }
  // Another transformer: the same shapes, other numbers.
  void Change(const fs::path& file) const {
    std::fstream out(file, std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(-4096, std::ios::end);
    const std::string other(4096, '\1');
    out.write(other.data(), 4096);
  }
  std::string Id(const std::string& name = "m") {
    const auto opened = catalog_.Model(name);
    return opened.ok() ? (*opened)->id : opened.status().ToString();
  }
  ModelKey Part(const std::string& name, const std::string& component) {
    return (*catalog_.Model(name))->part(component).key;
  }

  const fs::path transformer_ = root_ / "m/transformer/diffusion_pytorch_model.safetensors";
  Catalog catalog_{{root_.string()}, {}};
};

TEST_F(ModelFilesTest, WhatChangesNoByteLeavesTheModelAsItIs) {
  const auto before = *catalog_.Model("m");
  chmod(transformer_.c_str(), 0400);
  EXPECT_EQ(*catalog_.Model("m"), before);
  fs::create_hard_link(transformer_, root_ / "link");
  fs::remove(root_ / "link");
  EXPECT_EQ(*catalog_.Model("m"), before);
  fs::rename(transformer_, root_ / "moved");
  fs::rename(root_ / "moved", transformer_);
  EXPECT_EQ(*catalog_.Model("m"), before);
  fs::rename(root_ / "m", root_ / "n");
  fs::rename(root_ / "n", root_ / "m");
  EXPECT_EQ(*catalog_.Model("m"), before);
  EXPECT_TRUE(before->Check().ok());
}

TEST_F(ModelFilesTest, AFileThatIsWrittenToIsAnotherModelWhateverItsTimes) {
  for (const char* file : {"transformer/diffusion_pytorch_model.safetensors",
                           "tokenizer/tokenizer_config.json", "scheduler/scheduler_config.json"}) {
    const auto before = *catalog_.Model("m");
    const fs::path path = root_ / "m" / file;
    const auto time = fs::last_write_time(path);
    if (path.extension() == ".safetensors") {
      Change(path);
    } else {
      std::fstream(path, std::ios::in | std::ios::out).seekp(-1, std::ios::end) << ' ';
    }
    fs::last_write_time(path, time);
    const auto after = catalog_.Model("m");
    ASSERT_TRUE(after.ok()) << after.status();
    EXPECT_NE((*after)->id, before->id) << file;
    EXPECT_EQ(before->Check().ok(), path.extension() != ".safetensors") << "settings were read";
    EXPECT_TRUE((*after)->Check().ok());
  }
}

TEST_F(ModelFilesTest, ModelsOfTheSameFilesShareWhatIsReadFromThem) {
  for (const char* name : {"a", "b"}) {
    fs::copy_file(transformer_, root_ / absl::StrCat(name, ".safetensors"));
    std::ofstream(root_ / absl::StrCat(name, ".json")) << R"({"base": "m"})";
  }
  for (const char* component : {"text_encoder", "text_encoder_2", "vae"}) {
    EXPECT_EQ(Part("a", component), Part("m", component)) << component;
    EXPECT_EQ(Part("b", component), Part("m", component)) << component;
  }
  EXPECT_FALSE(Part("a", "transformer") == Part("m", "transformer"));
  EXPECT_FALSE(Part("a", "transformer") == Part("b", "transformer"));
  EXPECT_NE(Id("a"), Id("b"));
}

// Two files swap their places each time that a model of one of them is opened, at some moment of that:
// whoever has opened one has the weights that its key stands for.
TEST_F(ModelFilesTest, FilesThatChangePlacesWhileTheyAreOpenedNeverGiveOneModelTheWeightsOfAnother) {
  Copy("n");
  const fs::path other = root_ / "n/transformer/diffusion_pytorch_model.safetensors";
  Change(other);
  const auto last_bytes = [](const OpenModel& model) {
    const WeightFiles& files = *model.component("transformer").files;
    std::string bytes;
    int64_t end = 0;
    for (const auto& [name, entry] : files.tensors()) {
      if (entry.info->offset + entry.info->bytes <= end) continue;
      end = entry.info->offset + entry.info->bytes;
      const at::Tensor tensor = *files.Alias(name);
      bytes.assign(static_cast<const char*>(tensor.const_data_ptr()) + tensor.nbytes() - 16, 16);
    }
    return bytes;
  };
  constexpr int kRounds = 60;
  std::atomic<int> asked = 0;
  std::thread mover([&] {
    for (int i = 1; i <= kRounds; ++i) {
      while (asked < i) std::this_thread::yield();
      fs::rename(transformer_, root_ / "moved");
      fs::rename(other, transformer_);
      fs::rename(root_ / "moved", other);
    }
  });
  std::map<ModelKey, std::string> known;  // what a record of that key holds
  std::set<std::string> contents;
  int opened = 0;
  for (int i = 1; i <= kRounds; ++i) {
    asked = i;
    const auto model = catalog_.Model(i / 2 % 2 == 0 ? "m" : "n");
    if (!model.ok()) continue;
    ++opened;
    const auto [it, fresh] = known.emplace((*model)->part("transformer").key, last_bytes(**model));
    EXPECT_EQ(it->second, last_bytes(**model));
    contents.insert(it->second);
  }
  mover.join();
  EXPECT_GT(opened, 0);
  EXPECT_EQ(contents.size(), 2u);
}

TEST_F(ModelFilesTest, WithoutDescriptorsAModelIsNotSaidToBeMissing) {
  const int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
  close(next);
  rlimit old = {};
  getrlimit(RLIMIT_NOFILE, &old);
  rlimit none = old;
  none.rlim_cur = static_cast<rlim_t>(next);
  setrlimit(RLIMIT_NOFILE, &none);
  const absl::Status status = catalog_.Model("m").status();
  setrlimit(RLIMIT_NOFILE, &old);
  EXPECT_EQ(ErrorReason(status), "OUT_OF_DESCRIPTORS") << status;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(catalog_.Model("m").ok());
}

TEST_F(ModelFilesTest, WhatIsGoneOrReplacedIsKeptByThoseWhoHaveItAlone) {
  auto held = *catalog_.Model("m");
  const std::string id = held->id;
  EXPECT_THAT(catalog_.TakeUnused(), IsEmpty());
  fs::copy_file(transformer_, root_ / "new");
  fs::rename(root_ / "new", transformer_);
  EXPECT_THAT(catalog_.TakeUnused(), IsEmpty()) << "somebody has it";
  EXPECT_TRUE(held->Check().ok());
  std::weak_ptr<const OpenModel> gone = held;
  held = nullptr;
  EXPECT_TRUE(gone.expired());
  EXPECT_THAT(catalog_.TakeUnused(), ElementsAre(id));
  EXPECT_THAT(catalog_.TakeUnused(), IsEmpty());
  gone = *catalog_.Model("m");
  fs::remove_all(root_ / "m");
  EXPECT_FALSE(gone.expired());
  EXPECT_FALSE(catalog_.Model("m").ok());
  EXPECT_TRUE(gone.expired());
  EXPECT_EQ(catalog_.TakeUnused().size(), 1u);
}

TEST_F(CatalogTest, ALorasIdIsOfWhatWasOpened) {
  fs::copy_file("deploy/demo/loras/dusk.safetensors", root_ / "a.safetensors");
  fs::copy_file("deploy/demo/loras/checker.safetensors", root_ / "b.safetensors");
  const Catalog catalog({}, {root_.string()});
  const LoraFile a = *catalog.Lora("a");
  const std::string id = a.Request()->key.id;
  EXPECT_EQ(id, a.id);
  fs::rename(root_ / "b.safetensors", root_ / "a.safetensors");  // after it was found
  EXPECT_NE(a.Request()->key.id, id);
  EXPECT_EQ(a.Request()->key.id, catalog.Lora("a")->id);
}

// A demo model whose files can be changed, in a root of its own beside a folder that is in none.
class HostileModelTest : public CatalogTest {
 protected:
  HostileModelTest() : models_(root_ / "models"), model_(models_ / "m"), outside_(root_ / "outside") {
    fs::create_directories(models_);
    fs::copy("deploy/demo/models/shapes-flux", model_, fs::copy_options::recursive);
    fs::copy(model_, outside_, fs::copy_options::recursive);
  }
  absl::Status Open(const std::string& name = "m") const {
    return Catalog({models_.string()}, {}).Model(name).status();
  }
  void Replace(const std::string& file, const fs::path& target) const {
    fs::remove_all(model_ / file);
    fs::create_symlink(target, model_ / file);
  }

  const fs::path models_, model_, outside_;
};

TEST_F(HostileModelTest, LinksThatStayInTheRootAreFollowed) {
  fs::rename(model_ / "vae", models_ / "shared_vae");
  Replace("vae", "../shared_vae");
  fs::rename(model_ / "scheduler/scheduler_config.json", models_ / "schedule.json");
  Replace("scheduler/scheduler_config.json", models_ / "schedule.json");
  Replace("notes.txt", "nowhere");
  EXPECT_TRUE(Open().ok()) << Open();
}

TEST_F(HostileModelTest, LinksThatLeadOutOfTheRootAreRefused) {
  for (const char* file : {"model_index.json", "transformer/config.json", "text_encoder_2",
                           "tokenizer_2/spiece.model", "scheduler/scheduler_config.json", "latentd.json"}) {
    fs::remove_all(model_);
    fs::copy(outside_, model_, fs::copy_options::recursive);
    ASSERT_TRUE(Open().ok());
    for (const fs::path& target :
         {outside_ / file, fs::relative(outside_ / file, (model_ / file).parent_path())}) {
      Replace(file, target);
      EXPECT_EQ(ErrorReason(Open()), "UNSAFE_FILE") << file << " -> " << target;
    }
  }
  // By way of a folder in the root.
  fs::remove_all(model_);
  fs::copy(outside_, model_, fs::copy_options::recursive);
  fs::rename(model_ / "vae", models_ / "shared_vae");
  Replace("vae", "../shared_vae");
  fs::remove(models_ / "shared_vae/config.json");
  fs::create_symlink(outside_ / "vae/config.json", models_ / "shared_vae/config.json");
  EXPECT_EQ(ErrorReason(Open()), "UNSAFE_FILE");
}

TEST_F(HostileModelTest, LinksInACircleEndTheLook) {
  fs::create_directory_symlink("..", model_ / "up");
  fs::create_directory_symlink(".", model_ / "self");
  EXPECT_TRUE(Open().ok()) << Open();
}

// Whatever stands for a settings file: an error, and no thread that hangs.
TEST_F(HostileModelTest, SettingsThatAreNoFileAreAnErrorAtOnce) {
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(model_)) {
    const std::string extension = entry.path().extension().string();
    if (entry.is_regular_file() && extension != ".safetensors")
      files.push_back(entry.path().lexically_relative(model_).string());
  }
  EXPECT_GT(files.size(), 10u);
  for (const std::string& file : files) {
    for (const auto& [name, make] : ThingsThatAreNoFile()) {
      if (file == "model_index.json" && name != "a gigabyte of nothing") continue;  // then there is no model
      fs::remove_all(model_ / file);
      make(model_ / file);
      const absl::Status status = Open();
      // Some files no family reads.
      if (!status.ok()) {
        EXPECT_THAT(ErrorReason(status),
                    ::testing::AnyOf("CORRUPT_FILE", "MISSING_FILE", "UNSAFE_FILE", "UNSUPPORTED_MODEL"))
            << file << " is " << name;
      }
      fs::remove_all(model_ / file);
      fs::copy(outside_ / file, model_ / file);
    }
  }
  for (const char* file : {"transformer/config.json", "tokenizer_2/spiece.model", "latentd.json"}) {
    fs::remove(model_ / file);
    mkfifo((model_ / file).c_str(), 0600);
    EXPECT_EQ(ErrorReason(Open()), "CORRUPT_FILE") << file;
    fs::remove(model_ / file);
    fs::copy(outside_ / file, model_ / file);
  }
}

TEST_F(HostileModelTest, TheSidecarOfASingleFileIsReadWithTheSameCare) {
  fs::copy(outside_ / "transformer", models_, fs::copy_options::recursive);
  fs::path weights;
  for (const auto& entry : fs::directory_iterator(models_)) {
    if (entry.path().extension() == ".safetensors") weights = entry.path();
  }
  fs::rename(weights, models_ / "one.safetensors");
  const fs::path sidecar = models_ / "one.json";
  std::ofstream(sidecar) << R"({"base": "m"})";
  EXPECT_TRUE(Open("one").ok()) << Open("one");
  for (const std::string text : {"", "[]", "3", "{\"base\": 3}", "{\"base\": {}}", "{}"}) {
    std::ofstream(sidecar, std::ios::trunc) << text;
    EXPECT_EQ(ErrorReason(Open("one")), "UNSUPPORTED_MODEL") << text;
  }
  fs::remove(sidecar);
  mkfifo(sidecar.c_str(), 0600);
  EXPECT_EQ(ErrorReason(Open("one")), "CORRUPT_FILE");
  fs::remove(sidecar);
  std::ofstream(sidecar) << R"({"base": "m"})";
  Replace("vae", outside_ / "vae");
  EXPECT_EQ(ErrorReason(Open("one")), "UNSAFE_FILE");
}

}  // namespace
}  // namespace latentd
