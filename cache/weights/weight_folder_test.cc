#include "cache/weights/weight_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class WeightFolderTest : public testing::Test {
 protected:
  ~WeightFolderTest() override { fs::remove_all(folder_); }

  // The name of what is picked of a folder with these files, or the error's reason.
  std::string Pick(const std::vector<std::string>& files) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    for (const std::string& file : files) std::ofstream(folder_ / file) << "x";
    const auto picked = PickWeightFile(folder_.string());
    message_ = std::string(picked.status().message());
    return picked.ok() ? fs::path(*picked).filename().string() : ErrorReason(picked.status());
  }

  const fs::path folder_ = fs::path(testing::TempDir()) / absl::StrCat("weight_folder_", getpid()) / "unet";
  std::string message_;
};

// Which file goes before which is what ModelMixin.from_pretrained of diffusers 0.42 and
// PreTrainedModel.from_pretrained of transformers 5 do without a variant: diffusers asks for the index first,
// transformers for the whole file.
TEST_F(WeightFolderTest, TheNameThatTheLibraryWritesGoesFirst) {
  EXPECT_EQ(Pick({"a.safetensors", "diffusion_pytorch_model.safetensors",
                  "diffusion_pytorch_model.fp16.safetensors"}),
            "diffusion_pytorch_model.safetensors");
  EXPECT_EQ(Pick({"lora.safetensors", "model.safetensors"}), "model.safetensors");
  EXPECT_EQ(Pick({"x.safetensors", "diffusion_pytorch_model.fp16.safetensors"}),
            "diffusion_pytorch_model.fp16.safetensors");
  EXPECT_EQ(Pick({"model.safetensors", "diffusion_pytorch_model.fp16.safetensors"}), "model.safetensors");
}

TEST_F(WeightFolderTest, PlainShardsGoBeforeAWholeVariant) {
  for (const char* variant : {"non_ema", "fp16", "bf16"}) {
    EXPECT_EQ(Pick({absl::StrCat("diffusion_pytorch_model.", variant, ".safetensors"),
                    "diffusion_pytorch_model-00001-of-00002.safetensors",
                    "diffusion_pytorch_model-00002-of-00002.safetensors",
                    "diffusion_pytorch_model.safetensors.index.json"}),
              "diffusion_pytorch_model.safetensors.index.json")
        << variant;
  }
  EXPECT_EQ(
      Pick({"model-00001-of-00001.safetensors", "model.safetensors.index.json", "model.fp16.safetensors"}),
      "model.safetensors.index.json");
  EXPECT_EQ(Pick({"model.safetensors.index.json", "model.safetensors"}), "model.safetensors");
  EXPECT_EQ(Pick({"diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors",
                  "diffusion_pytorch_model-00001-of-00001.safetensors"}),
            "diffusion_pytorch_model.safetensors.index.json");
}

// diffusers fails for it.
TEST_F(WeightFolderTest, AnIndexWhoseShardsAreGoneGivesWayToAWholeFile) {
  EXPECT_EQ(Pick({"diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"}),
            "diffusion_pytorch_model.safetensors");
  EXPECT_EQ(Pick({"diffusion_pytorch_model.safetensors.index.json"}),
            "diffusion_pytorch_model.safetensors.index.json");
}

TEST_F(WeightFolderTest, BothSpellingsOfAVariantsIndexAreKnown) {
  for (const char* index : {"diffusion_pytorch_model.safetensors.index.fp16.json",
                            "diffusion_pytorch_model.fp16.safetensors.index.json"}) {
    EXPECT_EQ(Pick({index, "diffusion_pytorch_model.fp16-00001-of-00001.safetensors"}), index);
    EXPECT_EQ(Pick({index, "diffusion_pytorch_model.non_ema.safetensors",
                    "diffusion_pytorch_model.fp16-00001-of-00001.safetensors"}),
              index);
    EXPECT_EQ(Pick({index, "diffusion_pytorch_model.safetensors"}), "diffusion_pytorch_model.safetensors");
  }
}

TEST_F(WeightFolderTest, AFileOfAnotherNameIsTakenWhereItIsTheOnlyOne) {
  EXPECT_EQ(Pick({"ae.safetensors", "config.json"}), "ae.safetensors");
  EXPECT_EQ(Pick({"b.safetensors", "a.safetensors"}), "UNSUPPORTED_MODEL");
  EXPECT_THAT(message_, HasSubstr("unet has 2 files of weights (a.safetensors, b.safetensors)"));
  EXPECT_EQ(
      Pick({"m.safetensors.index.json", "m-00001-of-00001.safetensors", "a.safetensors", "b.safetensors"}),
      "m.safetensors.index.json");
}

TEST_F(WeightFolderTest, WhereThereIsNoneItSaysWhatThereIs) {
  EXPECT_EQ(Pick({"config.json", "a.json", "model-00001-of-00002.safetensors"}), "FILE_NOT_FOUND");
  EXPECT_EQ(Pick({"diffusion_pytorch_model.bin"}), "UNSAFE_FILE");
  EXPECT_THAT(message_, HasSubstr("diffusion_pytorch_model.bin is a pickle"));
  EXPECT_EQ(Pick({".hidden.safetensors"}), "FILE_NOT_FOUND");
}

}  // namespace
}  // namespace latentd
