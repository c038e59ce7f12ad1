#include "cache/weights/weight_files.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "ATen/ops/equal.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

class WeightFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    folder = testing::TempDir() + "/weights_" + std::to_string(getpid());
    std::filesystem::create_directories(folder);
  }
  void TearDown() override { std::filesystem::remove_all(folder); }

  // A file of fp32 vectors; `pad` moves the data by so many bytes.
  std::string Write(const std::string& name,
                    const std::vector<std::pair<std::string, std::vector<float>>>& tensors, size_t pad = 0) {
    std::string header = "{", data;
    for (const auto& [tensor, values] : tensors) {
      absl::StrAppend(&header, header.size() > 1 ? "," : "", "\"", tensor,
                      "\":{\"dtype\":\"F32\",\"shape\":[", values.size(), "],\"data_offsets\":[", data.size(),
                      ",", data.size() + 4 * values.size(), "]}");
      data.append(reinterpret_cast<const char*>(values.data()), 4 * values.size());
    }
    header += "}";
    while ((8 + header.size()) % 16 != pad) header += " ";
    uint64_t length = header.size();
    std::ofstream out(folder + "/" + name, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), 8);
    out << header << data;
    return folder + "/" + name;
  }

  LoadContext always{[] { return false; }, [](int64_t, int64_t) {}};
  std::string folder;
};

std::shared_ptr<ComponentLayout> LayoutOf(std::vector<std::pair<std::string, int64_t>> names) {
  auto layout = std::make_shared<ComponentLayout>();
  for (auto& [name, size] : names) layout->Add(name, {size});
  return layout;
}

TEST_F(WeightFilesTest, AlignedOrNotTheNumbersAndTheAlignmentAreTheSame) {
  for (size_t pad : {0u, 4u, 8u}) {
    auto files = *WeightFiles::Open(Write("a.safetensors", {{"x", {1, 2, 3, 4}}}, pad));
    const at::Tensor x = *files->Read("x");
    EXPECT_EQ(reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16, 0u) << pad;
    EXPECT_TRUE(at::equal(x, at::tensor({1.f, 2.f, 3.f, 4.f})));
  }
}

TEST_F(WeightFilesTest, ShardsAreOneSetOfTensors) {
  Write("m-00001-of-00002.safetensors", {{"x", {1}}});
  Write("m-00002-of-00002.safetensors", {{"y", {2}}});
  std::ofstream(folder + "/m.safetensors.index.json")
      << R"({"weight_map":{"x":"m-00001-of-00002.safetensors","y":"m-00002-of-00002.safetensors"}})";
  auto files = WeightFiles::Open(folder);
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ((*files)->tensors().size(), 2u);
  auto set = LoadWeights(*files, LayoutOf({{"x", 1}, {"y", 1}}), nullptr, "", always);
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ((*set)->bytes(), 8);
}

TEST_F(WeightFilesTest, AShardOutsideOfTheFolderIsRefused) {
  for (const char* name : {"../x.safetensors", "/etc/x.safetensors", ".x.safetensors", "x.bin"}) {
    std::ofstream(folder + "/m.safetensors.index.json") << R"({"weight_map":{"x":")" << name << "\"}}";
    EXPECT_EQ(ErrorReason(WeightFiles::Open(folder + "/m.safetensors.index.json").status()), "CORRUPT_FILE")
        << name;
  }
}

TEST_F(WeightFilesTest, PicklesAreRefusedWhateverTheirName) {
  for (const char* start : {"PK\x03\x04....", "\x80\x02}q......"}) {
    std::ofstream(folder + "/model.SafeTensors.safetensors") << start << "................";
    EXPECT_EQ(ErrorReason(WeightFiles::Open(folder).status()), "UNSAFE_FILE");
  }
}

TEST_F(WeightFilesTest, AHeaderLengthThatReadsLikeAPickleIsNone) {
  const std::string header = R"({"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})";
  const uint64_t length = 0x280;  // bytes 80 02 00 …, as protocol 2 begins
  std::ofstream out(folder + "/a.safetensors", std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), 8);
  out << header << std::string(length - header.size(), ' ');
  out.close();
  EXPECT_TRUE(WeightFiles::Open(folder).ok());
}

TEST_F(WeightFilesTest, MissingUnknownAndMisshapenTensorsAreNamed) {
  auto files = *WeightFiles::Open(Write("a.safetensors", {{"x", {1, 2}}, {"position_ids", {0}}}));
  auto error = [&](std::vector<std::pair<std::string, int64_t>> layout) {
    return LoadWeights(files, LayoutOf(std::move(layout)), nullptr, "", always).status();
  };
  EXPECT_TRUE(error({{"x", 2}}).ok());
  EXPECT_EQ(GetErrorDetails(error({{"x", 2}, {"y", 1}})).at("sample"), "y");
  EXPECT_EQ(ErrorReason(error({{"x", 3}})), "WEIGHTS_MISMATCH");
  EXPECT_EQ(GetErrorDetails(error({{"position_ids", 1}})).at("sample"), "x");
}

TEST_F(WeightFilesTest, ALoadStopsBetweenTensors) {
  auto files = *WeightFiles::Open(Write("a.safetensors", {{"x", {1}}, {"y", {2}}}));
  int asked = 0;
  LoadContext context([&] { return ++asked > 1; }, [](int64_t, int64_t) {});
  EXPECT_TRUE(
      absl::IsCancelled(LoadWeights(files, LayoutOf({{"x", 1}, {"y", 1}}), nullptr, "", context).status()));
  EXPECT_EQ(asked, 2);
}

TEST_F(WeightFilesTest, AFileCutShortWhileInUseHasChanged) {
  std::vector<float> many(100'000, 1.f);
  const std::string path = Write("a.safetensors", {{"x", many}});
  auto files = *WeightFiles::Open(path);
  auto set = *LoadWeights(files, LayoutOf({{"x", 100'000}}), nullptr, "", always);
  EXPECT_TRUE(set->Check().ok());
  ASSERT_EQ(truncate(path.c_str(), 4096), 0);
  volatile float last = static_cast<const float*>((*set)[Slot{0}].data.const_data_ptr())[99'999];
  (void)last;
  EXPECT_EQ(ErrorReason(set->Check()), "FILE_CHANGED");
  EXPECT_EQ(set->Check().code(), absl::StatusCode::kAborted);
}

TEST_F(WeightFilesTest, AReplacedFileHasAnotherFingerprint) {
  const std::string before = (*WeightFiles::Open(Write("a.safetensors", {{"x", {1}}})))->fingerprint();
  Write("b.safetensors", {{"x", {2}}});
  std::filesystem::rename(folder + "/b.safetensors", folder + "/a.safetensors");
  EXPECT_NE((*WeightFiles::Open(folder + "/a.safetensors"))->fingerprint(), before);
}

TEST_F(WeightFilesTest, AnIdentityIsOfTheFileAndNotOfItsName) {
  const std::string path = Write("a.safetensors", {{"x", {1}}});
  EXPECT_EQ(WeightFiles::FingerprintAt(path), (*WeightFiles::Open(path))->fingerprint());
  const auto held = *WeightFiles::Open(path);
  std::filesystem::rename(path, folder + "/b.safetensors");
  EXPECT_FALSE(held->at_its_place());
  EXPECT_EQ((*WeightFiles::Open(folder + "/b.safetensors"))->fingerprint(), held->fingerprint());
  EXPECT_TRUE(held->at_its_place());
}

// ------------------------------------------------------------------------------------- what a component
// takes

// A layout whose tensors have these shapes.
std::shared_ptr<ComponentLayout> LayoutOfShapes(
    std::vector<std::pair<std::string, std::vector<int64_t>>> shapes) {
  auto layout = std::make_shared<ComponentLayout>();
  for (auto& [name, shape] : shapes) layout->Add(name, shape);
  return layout;
}

TEST_F(WeightFilesTest, AComponentTakesItsOwnWeightsWhateverElseItsFileHolds) {
  const std::vector<float> ema(10'000, 0.f);
  auto files = *WeightFiles::Open(Write(
      "a.safetensors", {{"model.x", {1, 2, 3}}, {"model.y", {4}}, {"vae.x", {5, 6}}, {"model_ema.x", ema}}));
  auto model = LayoutOf({{"x", 3}, {"y", 1}}), vae = LayoutOf({{"x", 2}});
  EXPECT_EQ(WeightBytes(*files, *model, nullptr, "model."), 16);
  EXPECT_EQ(WeightBytes(*files, *vae, nullptr, "vae."), 8);
  EXPECT_EQ((*LoadWeights(files, model, nullptr, "model.", always))->bytes(), 16);
  EXPECT_EQ((*LoadWeights(files, vae, nullptr, "vae.", always))->bytes(), 8);
  EXPECT_EQ(WeightBytesByType(*files, *vae, nullptr, "vae."), (std::map<DType, int64_t>{{DType::kF32, 8}}));
}

TEST_F(WeightFilesTest, SharesOfAFusedTensorTakeWhatTheyAreAndTiedOnesAreThereOnce) {
  auto files = *WeightFiles::Open(
      Write("a.safetensors",
            {{"qkv.weight", {1, 2, 3, 4, 5, 6}}, {"swap.weight", {1, 2}}, {"tied.weight", {7, 8, 9}}}));
  const KeyMap map({{"qkv", {"q", "k", "v"}}, {"swap", {"s"}, KeyTransform::kSwapHalves}, {"tied", {"t"}}});
  auto layout = LayoutOfShapes(
      {{"q.weight", {2}}, {"k.weight", {2}}, {"v.weight", {2}}, {"s.weight", {2}}, {"t.weight", {3}}});
  EXPECT_EQ(WeightBytes(*files, *layout, &map, ""), 4 * 11);
  EXPECT_EQ((*LoadWeights(files, layout, &map, "", always))->bytes(), 4 * 11);
}

TEST_F(WeightFilesTest, OneAndTheSameIsWhatIsReadFromTheSameFilesInTheSameWay) {
  auto a = *WeightFiles::Open(Write("a.safetensors", {{"x", {1}}})),
       b = *WeightFiles::Open(Write("b.safetensors", {{"x", {1}}}));
  auto layout = LayoutOf({{"x", 1}});
  const KeyMap map(std::vector<KeyRule>{{"y", {"x"}}}), other(std::vector<KeyRule>{{"z", {"x"}}});
  const std::string same = WeightsFingerprint(*a, *layout, &map, "");
  EXPECT_EQ(
      WeightsFingerprint(**WeightFiles::Open(folder + "/a.safetensors"), *LayoutOf({{"x", 1}}), &map, ""),
      same);
  EXPECT_NE(WeightsFingerprint(*b, *layout, &map, ""), same);
  EXPECT_NE(WeightsFingerprint(*a, *LayoutOf({{"x", 2}}), &map, ""), same);
  EXPECT_NE(WeightsFingerprint(*a, *LayoutOf({{"w", 1}}), &map, ""), same);
  EXPECT_NE(WeightsFingerprint(*a, *layout, &other, ""), same);
  EXPECT_NE(WeightsFingerprint(*a, *layout, nullptr, ""), same);
  EXPECT_NE(WeightsFingerprint(*a, *layout, &map, "p."), same);
}

TEST_F(WeightFilesTest, WhatChangedIsNotLoaded) {
  const std::string path = Write("a.safetensors", {{"x", {1}}});
  auto files = *WeightFiles::Open(path);
  Write("a.safetensors", {{"x", {2}}});
  EXPECT_EQ(ErrorReason(LoadWeights(files, LayoutOf({{"x", 1}}), nullptr, "", always).status()),
            "FILE_CHANGED");
}

TEST_F(WeightFilesTest, ACopyOnADeviceIsWithinItsMemory) {
  auto files = *WeightFiles::Open(Write("a.safetensors", {{"x", {1, 2}}, {"y", {3}}}));
  auto set = *LoadWeights(files, LayoutOf({{"x", 2}, {"y", 1}}), nullptr, "", always);
  SimDevice sim({.index = 0, .memory_bytes = 1 << 20});
  {
    auto copy = *set->CopyTo(sim, {}, nullptr, {});
    EXPECT_EQ(sim.allocated_bytes(), 128);  // two tensors, each padded
    EXPECT_TRUE(at::equal(static_cast<const WeightSet&>(*copy)[Slot{0}].data, (*set)[Slot{0}].data));
  }
  EXPECT_EQ(sim.allocated_bytes(), 0);
  sim.FailCopy(2);
  EXPECT_EQ(ErrorReason(set->CopyTo(sim, {}, nullptr, {}).status()), "COPY_FAILED");
  EXPECT_EQ(sim.allocated_bytes(), 0);
}

}  // namespace
}  // namespace latentd
