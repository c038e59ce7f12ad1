// Opening models: what is recognised, what is refused and how.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "cache/base/error.h"
#include "families/flux/flux_pipeline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;

// A copy of a tiny model that a test may damage.
class OpenGolden : public testing::Test {
 protected:
  OpenGolden() : folder_(absl::StrCat(testing::TempDir(), "/open_golden_test.", getpid())) {
    fs::remove_all(folder_);
    fs::copy(GoldenPath("tiny-schnell"), folder_, fs::copy_options::recursive);
    files_.name = "copy";
    files_.folder = folder_;
  }
  ~OpenGolden() override { fs::remove_all(folder_); }

  void Replace(const std::string& file, const std::string& from, const std::string& to) {
    std::stringstream text;
    text << std::ifstream(folder_ + "/" + file).rdbuf();
    const std::string changed = absl::StrReplaceAll(text.str(), {{from, to}});
    ASSERT_NE(changed, text.str()) << from;
    std::ofstream(folder_ + "/" + file) << changed;
  }
  void Write(const std::string& file, const std::string& text) {
    std::ofstream(folder_ + "/" + file) << text;
  }

  bool Detected() const { return AllFamilies()[0]->Detect(files_); }
  absl::StatusOr<std::unique_ptr<Pipeline>> Open() const { return AllFamilies()[0]->Open(files_); }
  std::string OpenError() const { return ErrorReason(Open().status()); }

  std::string folder_;
  ModelFiles files_;
};

TEST_F(OpenGolden, AFolderGivesItsComponentsAndDefaults) {
  ASSERT_TRUE(Detected());
  auto pipeline = Open();
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  std::vector<std::string> names;
  for (const Component& component : (*pipeline)->components()) names.push_back(component.name);
  EXPECT_THAT(names, ElementsAre("text_encoder", "text_encoder_2", "transformer", "vae"));
  EXPECT_EQ((*pipeline)->variant(), "schnell");
  EXPECT_EQ((*pipeline)->defaults().steps, 4);
  EXPECT_EQ((*pipeline)->defaults().guidance, 0);
  EXPECT_EQ((*pipeline)->defaults().max_sequence_length, 256);
}

TEST_F(OpenGolden, LatentdJsonSetsDefaultsAndThePreview) {
  std::string factors = "[0.5, 0, 0]";
  for (int i = 1; i < 16; ++i) factors += ", [0, 0, 0]";
  Write("latentd.json",
        absl::StrCat(R"({"defaults": {"width": 64, "height": 48, "steps": 9}, "latent_rgb": {"factors": [)",
                     factors, R"(], "bias": [0, -1, 1]}})"));
  auto pipeline = Open();
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  EXPECT_EQ((*pipeline)->defaults().width, 64);
  EXPECT_EQ((*pipeline)->defaults().height, 48);
  EXPECT_EQ((*pipeline)->defaults().steps, 9);
  const at::Tensor preview =
      dynamic_cast<const FluxPipeline&>(**pipeline).parts().preview.Render(at::ones({1, 16, 6, 8}));
  ASSERT_EQ(preview.sizes(), at::IntArrayRef({6, 8, 3}));
  EXPECT_EQ(preview[0][0][0].item<int>(), 191);  // 0.5 of [-1, 1]
  EXPECT_EQ(preview[5][7][1].item<int>(), 0);
  EXPECT_EQ(preview[0][0][2].item<int>(), 255);
}

TEST_F(OpenGolden, RealLatentSpacesHaveAPreviewAndOthersNone) {
  EXPECT_TRUE(
      dynamic_cast<const FluxPipeline&>(**Open()).parts().preview.Render(at::zeros({1, 16, 4, 4})).defined());
  Replace("vae/config.json", "\"scaling_factor\": 0.3611", "\"scaling_factor\": 0.7");
  EXPECT_FALSE(
      dynamic_cast<const FluxPipeline&>(**Open()).parts().preview.Render(at::zeros({1, 16, 4, 4})).defined());
}

TEST_F(OpenGolden, WorkingBytesGrowWithWhatIsAsked) {
  const auto pipeline = Open();
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  GenerateParams params;
  params.max_sequence_length = 64;
  auto small = WorkingBytesOf(**pipeline, params);
  params.width = params.height = 2048;
  params.max_sequence_length = 128;
  auto large = WorkingBytesOf(**pipeline, params);
  for (const char* component : {"transformer", "vae", "text_encoder_2"})
    EXPECT_GT(large[component], small[component]) << component;
  EXPECT_GT(small["text_encoder"], 0);
}

TEST_F(OpenGolden, BrokenSettingsAreRefused) {
  for (const char* text :
       {"{", "[]", R"({"defaults": {"steps": "9"}})", R"({"latent_rgb": {"factors": [["x"]]}})"}) {
    Write("latentd.json", text);
    EXPECT_EQ(OpenError(), "CORRUPT_FILE") << text;
  }
  for (const char* text : {R"({"defaults": {"steps": 0}})", R"({"defaults": {"width": -1}})",
                           R"({"latent_rgb": {"factors": [[1, 2, 3]]}})"}) {
    Write("latentd.json", text);
    EXPECT_EQ(OpenError(), "UNSUPPORTED_MODEL") << text;
  }
}

TEST_F(OpenGolden, OtherPipelinesAreRecognisedAndRefused) {
  for (const char* name : {"FluxFillPipeline", "FluxKontextPipeline"}) {
    Replace("model_index.json", "\"FluxPipeline\"", absl::StrCat("\"", name, "\""));
    EXPECT_TRUE(Detected()) << name;
    EXPECT_EQ(OpenError(), "UNSUPPORTED_MODEL") << name;
    Replace("model_index.json", absl::StrCat("\"", name, "\""), "\"FluxPipeline\"");
  }
  for (const char* name : {"Flux2Pipeline", "StableDiffusionXLPipeline"}) {
    Replace("model_index.json", "\"FluxPipeline\"", absl::StrCat("\"", name, "\""));
    EXPECT_FALSE(Detected()) << name;
    Replace("model_index.json", absl::StrCat("\"", name, "\""), "\"FluxPipeline\"");
  }
  Replace("model_index.json", "\"FluxPipeline\"", "\"FluxImg2ImgPipeline\"");
  EXPECT_TRUE(Open().ok());
}

TEST_F(OpenGolden, OtherInputChannelsAreRefused) {
  Replace("transformer/config.json", "\"in_channels\": 64", "\"in_channels\": 384");
  EXPECT_EQ(OpenError(), "UNSUPPORTED_MODEL");
}

TEST_F(OpenGolden, PartsThatDoNotFitEachOtherAreRefused) {
  Replace("transformer/config.json", "\"pooled_projection_dim\": 24", "\"pooled_projection_dim\": 25");
  EXPECT_EQ(OpenError(), "UNSUPPORTED_MODEL");
}

TEST_F(OpenGolden, MissingAndBrokenFilesHaveReasons) {
  const std::vector<std::pair<std::string, std::string>> broken = {
      {"tokenizer/vocab.json", "{"},      {"tokenizer/merges.txt", "a b c d"},
      {"tokenizer_2/spiece.model", "xx"}, {"transformer/config.json", "null"},
      {"text_encoder/config.json", "{]"}, {"text_encoder_2/config.json", ""},
      {"vae/config.json", "\"text\""},    {"scheduler/scheduler_config.json", "{\"shift\": []}"},
  };
  for (const auto& [file, text] : broken) {
    fs::rename(folder_ + "/" + file, folder_ + "/saved");
    EXPECT_EQ(OpenError(), "MISSING_FILE") << file;
    Write(file, text);
    EXPECT_EQ(OpenError(), "CORRUPT_FILE") << file;
    fs::rename(folder_ + "/saved", folder_ + "/" + file);
  }
  EXPECT_TRUE(Open().ok());
  for (const char* part : {"transformer", "text_encoder", "text_encoder_2", "vae"}) {
    for (const auto& entry : fs::directory_iterator(folder_ + "/" + part)) {
      if (entry.path().extension() != ".safetensors") continue;
      fs::rename(entry.path(), folder_ + "/saved");
      EXPECT_EQ(Open().status().code(), absl::StatusCode::kNotFound) << part;
      fs::rename(folder_ + "/saved", entry.path());
      break;
    }
  }
}

TEST_F(OpenGolden, AnAbsurdConfigIsRefusedBeforeAnythingIsAllocated) {
  Replace("transformer/config.json", "\"num_attention_heads\": 4", "\"num_attention_heads\": 999999999999");
  EXPECT_EQ(OpenError(), "UNSUPPORTED_MODEL");
}

TEST_F(OpenGolden, ASingleFileNeedsABase) {
  ModelFiles files;
  files.name = "native";
  files.file = GoldenPath("native/schnell.safetensors");
  EXPECT_TRUE(AllFamilies()[0]->Detect(files));
  EXPECT_EQ(ErrorReason(AllFamilies()[0]->Open(files).status()), "UNSUPPORTED_MODEL");
  files.base_folder = folder_;
  auto pipeline = AllFamilies()[0]->Open(files);
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  EXPECT_EQ((*pipeline)->variant(), "schnell");
  files.file = GoldenPath("native/dev.safetensors");
  EXPECT_EQ((*AllFamilies()[0]->Open(files))->variant(), "dev");
}

TEST_F(OpenGolden, FilesOfOtherArchitecturesAreNotDetected) {
  ModelFiles files;
  files.file = folder_ + "/text_encoder/model.safetensors";
  EXPECT_FALSE(AllFamilies()[0]->Detect(files));
  files.file = folder_ + "/no-such-file.safetensors";
  EXPECT_FALSE(AllFamilies()[0]->Detect(files));
  files.file = "";
  files.folder = folder_ + "/vae";
  EXPECT_FALSE(AllFamilies()[0]->Detect(files));
}

TEST_F(OpenGolden, PatchTargetsNameTheLayersOfEveryEncoder) {
  auto pipeline = Open();
  ASSERT_TRUE(pipeline.ok());
  for (const Component& component : (*pipeline)->components()) {
    EXPECT_EQ(component.patch_target.has_value(), component.name != "vae") << component.name;
    if (component.patch_target) {
      EXPECT_EQ(component.patch_target->layout, component.layout);
    }
  }
}

}  // namespace
}  // namespace latentd
