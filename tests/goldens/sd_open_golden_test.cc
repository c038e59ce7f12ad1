// Opening SD models: what is recognised, what is refused and how.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "cache/base/error.h"
#include "families/sd/sd_open.h"
#include "families/sd/sd_pipeline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

const Family* Find(const ModelFiles& files) {
  const Family* found = nullptr;
  for (const Family* family : AllFamilies()) {
    if (!family->Detect(files)) continue;
    EXPECT_EQ(found, nullptr) << "two families know " << files.name;
    found = family;
  }
  return found;
}

std::vector<std::string> Names(const Pipeline& pipeline) {
  std::vector<std::string> names;
  for (const Component& component : pipeline.components()) names.push_back(component.name);
  return names;
}

ModelFiles Single(const std::string& model, const std::string& base) {
  ModelFiles files;
  files.name = model;
  files.file = GoldenPath("single/" + model + ".safetensors");
  if (!base.empty()) files.base_folder = GoldenPath(base);
  return files;
}

// A copy of a tiny model that a test may damage.
class SdOpenGolden : public testing::Test {
 protected:
  void Copy(const std::string& model) {
    fs::remove_all(folder_);
    fs::copy(GoldenPath(model), folder_, fs::copy_options::recursive);
    files_.name = "copy";
    files_.folder = folder_;
  }
  ~SdOpenGolden() override { fs::remove_all(folder_); }

  void Replace(const std::string& file, const std::string& from, const std::string& to) {
    std::stringstream text;
    text << std::ifstream(folder_ + "/" + file).rdbuf();
    const std::string changed = absl::StrReplaceAll(text.str(), {{from, to}});
    ASSERT_NE(changed, text.str()) << from;
    std::ofstream(folder_ + "/" + file) << changed;
  }
  absl::Status OpenStatus() const {
    const Family* family = Find(files_);
    return family == nullptr ? absl::NotFoundError("no family") : family->Open(files_).status();
  }

  const std::string folder_ = absl::StrCat(testing::TempDir(), "/sd_open_golden_test.", getpid());
  ModelFiles files_;
};

TEST_F(SdOpenGolden, FoldersAreOfOneFamilyAndSayWhatTheyAre) {
  struct Case {
    const char *model, *family, *variant, *sampler;
    int64_t side;
    std::vector<std::string> components;
  };
  for (const Case& c :
       {Case{"tiny-sd15", "sd15", "base", "pndm", 64, {"text_encoder", "unet", "vae"}},
        {"tiny-sd15-inpaint", "sd15", "inpaint", "pndm", 64, {"text_encoder", "unet", "vae"}},
        {"tiny-sdxl", "sdxl", "base", "euler", 64, {"text_encoder", "text_encoder_2", "unet", "vae"}},
        {"tiny-sdxl-inpaint",
         "sdxl",
         "inpaint",
         "euler",
         64,
         {"text_encoder", "text_encoder_2", "unet", "vae"}},
        {"tiny-sd2", "sd15", "base", "ddim", 96, {"text_encoder", "unet", "vae"}},
        {"tiny-sd15-lcm", "sd15", "lcm", "lcm", 64, {"text_encoder", "unet", "vae"}},
        {"tiny-sd15-no-middle", "sd15", "base", "pndm", 64, {"text_encoder", "unet", "vae"}},
        {"tiny-sdxl-pruned", "sdxl", "base", "euler", 64, {"text_encoder", "text_encoder_2", "unet", "vae"}},
        {"tiny-refiner", "sdxl", "refiner", "euler", 64, {"text_encoder_2", "unet", "vae"}}}) {
    Copy(c.model);
    const Family* family = Find(files_);
    ASSERT_NE(family, nullptr) << c.model;
    EXPECT_EQ(family->name(), c.family) << c.model;
    auto pipeline = family->Open(files_);
    ASSERT_TRUE(pipeline.ok()) << pipeline.status();
    EXPECT_EQ((*pipeline)->variant(), c.variant) << c.model;
    EXPECT_EQ((*pipeline)->defaults().sampler, c.sampler) << c.model;
    EXPECT_EQ((*pipeline)->defaults().width, c.side) << c.model;
    EXPECT_EQ(Names(**pipeline), c.components) << c.model;
    EXPECT_TRUE(
        dynamic_cast<const SdPipeline&>(**pipeline).parts().preview.Render(at::zeros({1, 4, 3, 5})).defined())
        << c.model;
    for (const Component& component : (*pipeline)->components()) {
      EXPECT_EQ(component.patch_target.has_value(), component.name != "vae") << component.name;
    }
    GenerateParams params;
    if (c.variant == std::string("inpaint") || c.variant == std::string("refiner"))
      params.SetPicture(MediaRole::kInit, at::zeros({8, 8, 3}, at::kByte));
    if ((*pipeline)->variant() == "inpaint")
      params.SetPicture(MediaRole::kMask, params.picture(MediaRole::kInit));
    auto small = WorkingBytesOf(**pipeline, params);
    EXPECT_GT(small["unet"], 0);
    GenerateParams large = params;
    large.width = large.height = 1024;
    auto whole = WorkingBytesOf(**pipeline, large);
    for (const char* component : {"unet", "vae"}) EXPECT_GT(whole[component], small[component]);
    large.tiles = DenoiseTiles{.width = 256, .height = 256, .overlap = 32};
    EXPECT_LT(WorkingBytesOf(**pipeline, large)["unet"], whole["unet"]);
  }
}

TEST_F(SdOpenGolden, ATrailingAncestralSchedulerIsADistilledModels) {
  Copy("tiny-sdxl");
  // The class is that of model_index.json, whichever saved the settings.
  Replace("model_index.json", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler");
  Replace("scheduler/scheduler_config.json", "\"leading\"", "\"trailing\"");
  auto pipeline = Find(files_)->Open(files_);
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  EXPECT_EQ((*pipeline)->variant(), "turbo");
  EXPECT_EQ((*pipeline)->defaults().guidance, 0);
  EXPECT_EQ((*pipeline)->defaults().steps, 4);
}

// One checkpoint under the names that people know: its base's settings, then what its name says, then its
// own.
TEST_F(SdOpenGolden, ACheckpointsNameSaysThatItWasDistilled) {
  Copy("tiny-sdxl");
  std::ofstream(folder_ + "/latentd.json") << R"({"defaults": {"steps": 20, "guidance": 6}})";
  struct Case {
    std::string name, own, variant, sampler;
    int64_t steps;
    double guidance;
    bool trailing;
  };
  for (const Case& c : {Case{"mix", "", "base", "euler", 20, 6, false},
                        {"mix", R"({"base": "m", "defaults": {"steps": 9}})", "base", "euler", 9, 6, false},
                        {"sdxl_lightning_8step", "", "lightning", "euler", 8, 1, true},
                        {"mixTurbo", R"({"defaults": {"guidance": 2}})", "turbo", "euler_a", 4, 2, true},
                        {"mix_LCM", "", "lcm", "lcm", 4, 1, false}}) {
    ModelFiles files = Single("tiny-sdxl", "");
    files.base_folder = folder_;
    const std::string file = absl::StrCat(folder_, "/", c.name, ".safetensors");
    fs::copy_file(files.file, file, fs::copy_options::overwrite_existing);
    files.file = file;
    if (!c.own.empty()) std::ofstream(absl::StrCat(folder_, "/", c.name, ".json")) << c.own;
    auto opened = Find(files)->Open(files);
    ASSERT_TRUE(opened.ok()) << opened.status();
    const Pipeline& pipeline = **opened;
    EXPECT_EQ(pipeline.variant(), c.variant) << c.name;
    EXPECT_EQ(pipeline.defaults().sampler, c.sampler) << c.name;
    EXPECT_EQ(pipeline.defaults().steps, c.steps) << c.name;
    EXPECT_EQ(pipeline.defaults().guidance, c.guidance) << c.name;
    auto parts = OpenSdModel(files, SdKind::kSdxl);
    ASSERT_TRUE(parts.ok()) << parts.status();
    EXPECT_EQ(parts->scheduler->own().schedule->config().spacing == TimestepSpacing::kTrailing, c.trailing)
        << c.name;
  }
}

TEST_F(SdOpenGolden, SchedulersThatNoSamplerStandsForAreRefusedByName) {
  Copy("tiny-sdxl");
  Replace("model_index.json", "EulerDiscreteScheduler", "IPNDMScheduler");
  EXPECT_EQ(ErrorReason(OpenStatus()), "UNSUPPORTED_MODEL");
  EXPECT_THAT(std::string(OpenStatus().message()), HasSubstr("IPNDMScheduler"));
}

TEST_F(SdOpenGolden, AModelOfEdmIsDrawnByItsOwnSamplersOnly) {
  Copy("tiny-sdxl");
  Replace("model_index.json", "EulerDiscreteScheduler", "EDMEulerScheduler");
  auto pipeline = Find(files_)->Open(files_);
  ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  EXPECT_EQ((*pipeline)->defaults().sampler, "euler");
  for (const auto& [field, change] :
       std::vector<std::pair<std::string, std::function<void(GenerateParams&)>>>{
           {"", [](GenerateParams&) {}},
           {"", [](GenerateParams& p) { p.sampler = "dpmpp_2m"; }},
           {"params.sampler", [](GenerateParams& p) { p.sampler = "ddim"; }},
           {"params.denoising_end", [](GenerateParams& p) { p.denoising_end = 0.5; }},
           {"params.schedule", [](GenerateParams& p) { p.schedule = "beta"; }},
           {"params.mask_image.gradient", [](GenerateParams& p) {
              p.SetPicture(MediaRole::kInit, at::zeros({64, 64, 3}, at::kByte));
              p.SetPicture(MediaRole::kMask, at::zeros({64, 64, 3}, at::kByte));
              p.gradient_mask = true;
            }}}) {
    GenerateParams params;
    change(params);
    const absl::Status status = (*pipeline)->Prepare(params).status();
    EXPECT_EQ(field.empty() ? "" : GetErrorDetails(status)["field"], field) << status;
    EXPECT_EQ(status.ok(), field.empty()) << status;
  }
}

// A checkpoint with tensors of these names and nothing else.
std::shared_ptr<const WeightFiles> Marks(const std::string& path, const std::vector<std::string>& names) {
  std::string header;
  for (const std::string& name : names) {
    const size_t at = 4 * static_cast<size_t>(&name - names.data());
    absl::StrAppend(&header, header.empty() ? "{" : ", ", "\"", name,
                    "\": {\"dtype\": \"F32\", \"shape\": [1], \"data_offsets\": [", at, ", ", at + 4, "]}");
  }
  header += "}";
  const auto size = static_cast<uint64_t>(header.size());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << header << std::string(4 * names.size(), '\0');
  file.close();
  auto files = WeightFiles::Open(path);
  EXPECT_TRUE(files.ok()) << files.status();
  return files.ok() ? *files : nullptr;
}

TEST_F(SdOpenGolden, MarksInACheckpointGoBeforeItsBasesScheduler) {
  Copy("tiny-sdxl");
  const auto read = [&](const std::vector<std::string>& names) {
    return ReadScheduler(Marks(folder_ + "/marks.safetensors", names), folder_, SdKind::kSdxl);
  };
  EXPECT_EQ((*read({"x"}))->own().schedule->config().prediction, Prediction::kEpsilon);
  EXPECT_EQ((*read({"v_pred"}))->own().schedule->config().prediction, Prediction::kVelocity);
  EXPECT_FALSE((*read({"v_pred"}))->own().schedule->config().zero_terminal_snr);
  const auto both = *read({"v_pred", "ztsnr"});
  EXPECT_TRUE(both->own().schedule->config().zero_terminal_snr);
  EXPECT_EQ(both->own().schedule->config().spacing, TimestepSpacing::kTrailing);
  EXPECT_FALSE(both->For("heun")->schedule->config().zero_terminal_snr) << "diffusers' class has it not";
  for (const char* mark : {"edm_mean", "edm_vpred.sigma_max"}) {
    const absl::Status status = read({mark}).status();
    EXPECT_EQ(ErrorReason(status), "UNSUPPORTED_MODEL");
    EXPECT_THAT(std::string(status.message()), HasSubstr(mark));
  }
  Replace("model_index.json", "EulerDiscreteScheduler", "EDMDPMSolverMultistepScheduler");
  EXPECT_TRUE(read({"edm_mean"}).ok());
  EXPECT_FALSE(read({"edm_vpred.sigma_max"}).ok());
  Replace("scheduler/scheduler_config.json", "\"epsilon\"", "\"v_prediction\"");
  EXPECT_TRUE(read({"edm_vpred.sigma_max"}).ok());
}

TEST_F(SdOpenGolden, OtherTasksAndVersionsAreRefusedByName) {
  Copy("tiny-sd15");
  for (const char* name : {"StableDiffusionInstructPix2PixPipeline", "StableDiffusionDepth2ImgPipeline"}) {
    Replace("model_index.json", "\"StableDiffusionPipeline\"", absl::StrCat("\"", name, "\""));
    EXPECT_EQ(ErrorReason(OpenStatus()), "UNSUPPORTED_MODEL");
    EXPECT_THAT(std::string(OpenStatus().message()), HasSubstr(name));
    Replace("model_index.json", absl::StrCat("\"", name, "\""), "\"StableDiffusionPipeline\"");
  }
  Replace("model_index.json", "\"StableDiffusionPipeline\"", "\"StableDiffusion3Pipeline\"");
  EXPECT_EQ(Find(files_), nullptr);
  Replace("model_index.json", "\"StableDiffusion3Pipeline\"", "\"StableDiffusionPipeline\"");
  Replace("unet/config.json", "\"cross_attention_dim\": 24", "\"cross_attention_dim\": 1024");
  EXPECT_EQ(ErrorReason(OpenStatus()), "UNSUPPORTED_MODEL");
  EXPECT_THAT(std::string(OpenStatus().message()), HasSubstr("text encoders give 24"));
  Replace("unet/config.json", "\"cross_attention_dim\": 1024", "\"cross_attention_dim\": 25");
  EXPECT_THAT(std::string(OpenStatus().message()), HasSubstr("text encoders give 24"));
  Replace("unet/config.json", "\"cross_attention_dim\": 25", "\"cross_attention_dim\": 24");
  Replace("unet/config.json", "\"in_channels\": 4", "\"in_channels\": 8");
  EXPECT_THAT(std::string(OpenStatus().message()), HasSubstr("InstructPix2Pix"));
}

TEST_F(SdOpenGolden, UNetsOfOtherKindsAreRefusedBeforeAnythingIsAllocated) {
  const std::vector<std::pair<std::string, std::string>> changes = {
      {"\"act_fn\": \"silu\"", "\"act_fn\": \"mish\""},
      {"\"class_embed_type\": null", "\"class_embed_type\": \"timestep\""},
      {"\"mid_block_type\": \"UNetMidBlock2DCrossAttn\"",
       "\"mid_block_type\": \"UNetMidBlock2DSimpleCrossAttn\""},
      {"\"UpBlock2D\"", "\"AttnUpBlock2D\""},
      {"\"norm_num_groups\": 4", "\"norm_num_groups\": 5"},
      {"\"layers_per_block\": 2", "\"layers_per_block\": 99999999"},
      {"\"attention_head_dim\": 4", "\"attention_head_dim\": 0"},
      {"\"transformer_layers_per_block\": 1", "\"transformer_layers_per_block\": [1, 2]"},
      {"\"transformer_layers_per_block\": 1",
       "\"transformer_layers_per_block\": [[1, 2], [1, 1], [1, 1], [1, 1]]"},
      {"\"transformer_layers_per_block\": 1", "\"transformer_layers_per_block\": [[1], [1, 1, 1], [1], [1]]"},
      {"\"addition_embed_type\": null", "\"addition_embed_type\": \"text_image\""},
  };
  for (const auto& [from, to] : changes) {
    Copy("tiny-sd15");
    Replace("unet/config.json", from, to);
    EXPECT_EQ(ErrorReason(OpenStatus()), "UNSUPPORTED_MODEL") << to;
  }
  Copy("tiny-sd15");
  Replace("unet/config.json", "\"attention_head_dim\": 4", "\"attention_head_dim\": \"four\"");
  EXPECT_EQ(ErrorReason(OpenStatus()), "CORRUPT_FILE");
}

TEST_F(SdOpenGolden, MissingFilesHaveReasons) {
  Copy("tiny-sdxl");
  for (const char* file : {"unet/config.json", "text_encoder_2/config.json", "vae/config.json",
                           "tokenizer/vocab.json", "scheduler/scheduler_config.json"}) {
    fs::rename(folder_ + "/" + file, folder_ + "/saved");
    EXPECT_EQ(ErrorReason(OpenStatus()), "MISSING_FILE") << file;
    fs::rename(folder_ + "/saved", folder_ + "/" + file);
  }
  EXPECT_TRUE(OpenStatus().ok());
}

TEST_F(SdOpenGolden, ACheckpointNeedsABaseOfItsKind) {
  for (const auto& [model, family] : {std::pair{"tiny-sd15", "sd15"},
                                      {"tiny-sd15-inpaint", "sd15"},
                                      {"tiny-sdxl", "sdxl"},
                                      {"tiny-refiner", "sdxl"}}) {
    const Family* found = Find(Single(model, ""));
    ASSERT_NE(found, nullptr) << model;
    EXPECT_EQ(found->name(), family);
    EXPECT_EQ(ErrorReason(found->Open(Single(model, "")).status()), "UNSUPPORTED_MODEL");
  }
  for (const auto& [model, base] : {std::pair{"tiny-sdxl", "tiny-refiner"},
                                    {"tiny-refiner", "tiny-sdxl"},
                                    {"tiny-sd15", "tiny-sdxl"},
                                    {"tiny-sdxl", "tiny-sd15"}}) {
    const ModelFiles files = Single(model, base);
    const absl::Status status = Find(files)->Open(files).status();
    EXPECT_EQ(ErrorReason(status), "UNSUPPORTED_MODEL") << model << " on " << base;
  }
}

}  // namespace
}  // namespace latentd
