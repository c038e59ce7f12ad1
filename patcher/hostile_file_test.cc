// LoRA files as an attacker would make them: whole files on disk, through the same calls that a session uses.
// Each ends in a typed error before anything is applied, or is a file that can be used. Meant to run under
// AddressSanitizer, too.
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "cache/weights/weight_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "patcher/layer_patcher.h"

namespace latentd {
namespace {

constexpr int64_t kOut = 6, kIn = 8, kRank = 2;

class HostileFileTest : public testing::Test {
 protected:
  HostileFileTest() : path_(testing::TempDir() + absl::StrCat("hostile-", getpid(), ".safetensors")) {
    layout_->Add("a.weight", {kOut, kIn});
    layout_->Add("a.bias", {kOut});
    target_ = {.component = "transformer",
               .layout = layout_,
               .key_maps = {},
               .dotted_prefixes = {""},
               .flat_prefixes = {"lora_unet_"}};
  }
  ~HostileFileTest() override { std::filesystem::remove(path_); }

  static std::string WithLength(const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    std::string file(sizeof length, 0);
    std::memcpy(file.data(), &length, sizeof length);
    return file + header + data;
  }

  // {"a.lora_down.weight":{"dtype":"F32","shape":[2,8],"data_offsets":[0,64]}, …} and its data.
  struct Entry {
    std::string name;
    std::vector<int64_t> shape;
    std::vector<float> values;
    std::string dtype = "F32";
  };
  static std::string File(const std::vector<Entry>& entries) {
    std::string data;
    std::vector<std::string> fields;
    for (const Entry& e : entries) {
      const size_t begin = data.size();
      data.append(reinterpret_cast<const char*>(e.values.data()), e.values.size() * sizeof(float));
      fields.push_back(absl::StrCat("\"", e.name, "\":{\"dtype\":\"", e.dtype, "\",\"shape\":[",
                                    absl::StrJoin(e.shape, ","), "],\"data_offsets\":[", begin, ",",
                                    data.size(), "]}"));
    }
    return WithLength(absl::StrCat("{", absl::StrJoin(fields, ","), "}"), data);
  }
  static Entry Ones(const std::string& name, std::vector<int64_t> shape, float value = 1) {
    int64_t numbers = 1;
    for (int64_t extent : shape) numbers *= extent;
    return {name, std::move(shape), std::vector<float>(static_cast<size_t>(numbers), value)};
  }
  static std::vector<Entry> Pair(float value = 1) {
    return {Ones("a.lora_down.weight", {kRank, kIn}, value), Ones("a.lora_up.weight", {kOut, kRank}, value),
            Ones("a.alpha", {}, 2)};
  }

  // What a session does with a file, up to a picture: open, load, match, apply.
  absl::Status Use(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;
    ASSIGN_OR_RETURN(auto files, WeightFiles::Open(path_));
    ASSIGN_OR_RETURN(auto patch,
                     ModelPatch::Load(files, LoadContext([] { return false; }, [](int64_t, int64_t) {})));
    RETURN_IF_ERROR(LayerPatcher::Match(*patch, "lora", 1, {target_}).status());
    const WeightSet base(layout_, {{at::ones({kOut, kIn})}, {at::ones({kOut})}});
    for (const PatchMode mode : {PatchMode::kDirect, PatchMode::kSidecar}) {
      std::vector<PatchSpec> specs(1);
      specs[0].name = "lora";
      specs[0].patch = patch;
      ASSIGN_OR_RETURN(auto overlay, LayerPatcher::Apply(base, target_, std::move(specs), {.mode = mode}));
      used_ = overlay != nullptr;
    }
    return absl::OkStatus();
  }

  void ExpectRefused(const std::string& bytes, const std::string& reason) {
    const absl::Status status = Use(bytes);
    EXPECT_EQ(ErrorReason(status), reason) << status;
    EXPECT_FALSE(status.message().empty());
  }

  const std::string path_;
  std::shared_ptr<ComponentLayout> layout_ = std::make_shared<ComponentLayout>();
  PatchTarget target_;
  bool used_ = false;
};

TEST_F(HostileFileTest, TheFileThatTheOthersAreMadeOfIsSound) {
  EXPECT_TRUE(Use(File(Pair())).ok());
  EXPECT_TRUE(used_);
}

TEST_F(HostileFileTest, WhatIsNoWeightsSaysWhatItIs) {
  const auto says = [&](const std::string& bytes, const std::string& reason, const std::string& words) {
    const absl::Status status = Use(bytes);
    EXPECT_EQ(ErrorReason(status), reason) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(words));
  };
  says("", "CORRUPT_FILE", "is empty");
  says("<!doctype html><title>404</title>", "CORRUPT_FILE", "web page");
  says("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "CORRUPT_FILE", "git lfs pull");
  says("PK\x03\x04 and what torch.save puts behind it", "UNSAFE_FILE", "pickle");
  const std::string good = File(Pair());
  says(good.substr(0, good.size() - 5), "CORRUPT_FILE", "cut short");
  says(good.substr(0, 40), "CORRUPT_FILE", "cut short");
}

TEST_F(HostileFileTest, ARankOfABillion) {
  std::vector<Entry> entries = Pair();
  entries[0].shape = {1'000'000'000, kIn};
  entries[1].shape = {kOut, 1'000'000'000};
  ExpectRefused(File(entries), "CORRUPT_FILE");  // the header promises more than the file has
  // With no number at all, shapes do agree with the data.
  ExpectRefused(
      File({{"a.lora_down.weight", {1'000'000'000, 0}, {}}, {"a.lora_up.weight", {0, 1'000'000'000}, {}}}),
      "INVALID_LORA");
  // Products that overflow.
  entries[0].shape = {int64_t{1} << 62, 16};
  ExpectRefused(File(entries), "CORRUPT_FILE");
  entries[0].shape = {-1, -16};
  ExpectRefused(File(entries), "CORRUPT_FILE");
  // The largest that is read, on a tensor of the model's size, beyond the limit of ranks.
  ExpectRefused(File({Ones("a.lora_down.weight", {20'000, kIn}), Ones("a.lora_up.weight", {kOut, 20'000})}),
                "INVALID_LORA");
}

TEST_F(HostileFileTest, NumbersThatAreNotFinite) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const float value : {nan, inf, -inf}) {
    std::vector<Entry> entries = Pair();
    entries[2].values = {value};
    ExpectRefused(File(entries), "INVALID_LORA");
    entries = Pair();
    entries[1].values[3] = value;
    ExpectRefused(File(entries), "INVALID_LORA");
  }
}

TEST_F(HostileFileTest, ShapesThatLie) {
  std::vector<Entry> entries = Pair();
  entries[0].shape = {kRank, kIn - 1};
  ExpectRefused(File(entries), "CORRUPT_FILE");
  entries = Pair();
  entries[0].shape = {kIn, kRank};  // as many numbers, another matrix
  ExpectRefused(File(entries), "INVALID_LORA");
  entries = Pair();
  entries[0].shape = {1, 1, 1, 1, 1, 1, 1, 1, kRank * kIn};
  ExpectRefused(File(entries), "INVALID_LORA");
  entries = {Ones("a.lora_down.weight", {kRank, 2 * kIn}), Ones("a.lora_up.weight", {kOut, kRank})};
  ExpectRefused(File(entries), "LORA_MISMATCH");  // fits itself, not the model
  entries = Pair();
  entries[0].dtype = "I32";
  ExpectRefused(File(entries), "INVALID_LORA");
  entries[0].dtype = "F128";
  ExpectRefused(File(entries), "CORRUPT_FILE");
}

TEST_F(HostileFileTest, AMillionKeys) {
  std::vector<Entry> entries;
  for (int i = 0; i < 1'000'000; ++i) entries.push_back({absl::StrCat("b", i, ".alpha"), {0}, {}});
  const absl::Status status = Use(File(entries));
  EXPECT_THAT(ErrorReason(status), testing::AnyOf("INVALID_LORA", "CORRUPT_FILE")) << status;
}

TEST_F(HostileFileTest, AnotherFamilyAndNothingAtAll) {
  ExpectRefused(File({Ones("lora_unet_input_blocks_1_1_proj_in.lora_down.weight", {kRank, kIn}),
                      Ones("lora_unet_input_blocks_1_1_proj_in.lora_up.weight", {kOut, kRank})}),
                "LORA_MISMATCH");
  ExpectRefused(File({}), "INVALID_LORA");
  ExpectRefused("", "CORRUPT_FILE");
  ExpectRefused("PK\x03\x04 a zip with a pickle in it", "UNSAFE_FILE");
}

// Every cut and thousands of changed bytes: of the file's length, its header and its data.
TEST_F(HostileFileTest, WhateverIsDoneToAFileIsAnErrorOrAFile) {
  std::vector<Entry> entries = Pair();
  for (const char* name :
       {"hada_w1_a", "hada_w2_a", "lokr_w1", "oft_blocks", "diff", "w_norm", "dora_scale"}) {
    entries.push_back(Ones(absl::StrCat("b.", name), {2, 2}));
  }
  for (const std::string& sound : {File(Pair()), File(entries)}) {
    for (size_t length = 0; length < sound.size(); length += 3) {
      EXPECT_FALSE(Use(sound.substr(0, length)).ok()) << length;
    }
    std::mt19937 random(7);
    for (int i = 0; i < 1000; ++i) {
      std::string bytes = sound;
      for (int change = 0; change <= i % 3; ++change)
        bytes[random() % bytes.size()] = static_cast<char>(random());
      const absl::Status status = Use(bytes);
      EXPECT_TRUE(status.ok() || !ErrorReason(status).empty()) << status;
    }
    // Digits for digits: headers that parse, and say something else.
    for (int i = 0; i < 1000; ++i) {
      std::string bytes = sound;
      for (char& c : bytes) {
        if (c >= '0' && c <= '9' && random() % 16 == 0) c = static_cast<char>('0' + random() % 10);
      }
      const absl::Status status = Use(bytes);
      EXPECT_TRUE(status.ok() || !ErrorReason(status).empty()) << status;
    }
  }
}

}  // namespace
}  // namespace latentd
