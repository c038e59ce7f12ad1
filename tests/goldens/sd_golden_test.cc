// SD 1.5 and SDXL against diffusers: whole runs, from folders and from checkpoints in one file.
#include "ATen/ATen.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "families/encoders/text_embedding.h"
#include "families/sd/sd_pipeline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

ModelFiles Folder(const std::string& model) {
  ModelFiles files;
  files.name = model;
  files.folder = GoldenPath(model);
  return files;
}

ModelFiles Checkpoint(const std::string& model, const std::string& base) {
  ModelFiles files;
  files.name = model;
  files.file = GoldenPath("single/" + model + ".safetensors");
  files.base_folder = GoldenPath(base);
  return files;
}

// "640,512"
std::vector<int64_t> Numbers(const std::string& text) {
  std::vector<int64_t> numbers;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    int64_t number = 0;
    EXPECT_TRUE(absl::SimpleAtoi(part, &number)) << text;
    numbers.push_back(number);
  }
  return numbers;
}

// Those that the case's prompts name, read from their files.
void AddEmbeddings(const std::string& names, GenerateParams& params,
                   std::vector<std::shared_ptr<const TextEmbedding>>& vectors) {
  const std::vector<std::string> all = absl::StrSplit(names, ',', absl::SkipEmpty());
  for (const std::string& name : all) {
    const auto files = WeightFiles::Open(GoldenPath(absl::StrCat("embeddings/", name, ".safetensors")));
    ASSERT_TRUE(files.ok()) << files.status();
    const auto embedding = TextEmbedding::Load(*files, EmbeddingsOf(**files)->at(0),
                                               LoadContext([] { return false; }, [](int64_t, int64_t) {}));
    ASSERT_TRUE(embedding.ok()) << embedding.status();
    params.embedding_names[name] = params.embeddings.size();
    params.embeddings.push_back({.name = name, .id = name, .tokens = (*embedding)->shape().tokens});
    vectors.push_back(*embedding);
  }
}

using Vectors = std::vector<std::shared_ptr<const TextEmbedding>>;

// `vectors`: of what its prompts name.
GenerateParams Params(const Golden& golden, Vectors* vectors = nullptr) {
  GenerateParams params;
  if (golden.HasSetting("embeddings")) AddEmbeddings(golden.Setting("embeddings"), params, *vectors);
  params.prompt = golden.Text("prompt");
  if (golden.Has("negative")) params.negative_prompt = golden.Text("negative");
  if (golden.Has("prompt_2")) params.prompt_2 = golden.Text("prompt_2");
  if (golden.Has("negative_2")) params.negative_prompt_2 = golden.Text("negative_2");
  params.width = golden.Int("width");
  params.height = golden.Int("height");
  params.steps = golden.Int("steps");
  params.guidance = golden.Double("guidance");
  params.sampler = golden.Setting("sampler");
  if (const std::string schedule = golden.Setting("schedule"); !schedule.empty()) params.schedule = schedule;
  if (const std::string syntax = golden.Setting("syntax"); !syntax.empty()) params.prompt_syntax = syntax;
  auto number = [&](const char* key, std::optional<double>& value) {
    if (golden.HasSetting(key)) value = golden.Double(key);
  };
  number("strength", params.strength);
  number("guidance_rescale", params.guidance_rescale);
  number("denoising_start", params.denoising_start);
  number("denoising_end", params.denoising_end);
  number("aesthetic_score", params.aesthetic_score);
  number("negative_aesthetic_score", params.negative_aesthetic_score);
  if (golden.HasSetting("clip_skip")) params.clip_skip = golden.Int("clip_skip");
  // diffusers writes height and top first.
  if (golden.HasSetting("original_size")) {
    const auto size = Numbers(golden.Setting("original_size"));
    params.original_size = PixelSize{.width = size[1], .height = size[0]};
  }
  if (golden.HasSetting("target_size")) {
    const auto size = Numbers(golden.Setting("target_size"));
    params.target_size = PixelSize{.width = size[1], .height = size[0]};
  }
  if (golden.HasSetting("crops_coords_top_left")) {
    const auto point = Numbers(golden.Setting("crops_coords_top_left"));
    params.crop = PixelPoint{.left = point[1], .top = point[0]};
  }
  if (golden.HasSetting("tiles")) {
    const auto tiles = Numbers(golden.Setting("tiles"));
    params.tiles = DenoiseTiles{.width = tiles[0], .height = tiles[1], .overlap = tiles[2]};
  }
  if (golden.Has("init_image")) params.SetPicture(MediaRole::kInit, golden["init_image"]);
  if (golden.Has("mask_image")) params.SetPicture(MediaRole::kMask, golden["mask_image"]);
  std::vector<at::Tensor> latents;
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    params.seeds.push_back(static_cast<uint64_t>(golden.Ints(absl::StrCat("seed.", i))[0]));
    if (golden.Has(absl::StrCat("from.", i))) latents.push_back(golden[absl::StrCat("from.", i)]);
  }
  if (!latents.empty()) params.init_latents = at::cat(latents);
  return params;
}

void CheckRun(const std::string& name, const Golden& golden, const Pipeline& pipeline,
              const Overlays& overlays = {}) {
  Vectors vectors;
  GenerateParams params = Params(golden, &vectors);
  const RunResult result = Generate(pipeline, std::move(params), overlays, std::move(vectors));
  for (const auto& [key, tensor] : result.conditioning) {
    EXPECT_TRUE(tensor.is_cpu() && tensor.is_contiguous()) << key;
  }
  ASSERT_EQ(static_cast<int64_t>(result.latents.size()), golden.Int("ran")) << name;
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    double error = 0;
    for (size_t k = 0; k < result.latents.size(); ++k) {
      error = std::max(error, RelativeError(result.latents[k].narrow(0, i, 1),
                                            golden[absl::StrCat("latents.", i, ".", k + 1)]));
    }
    EXPECT_LE(Report(absl::StrCat(name, " latents of picture ", i), error), kRunTolerance);
    // A value that lies on the edge between two bytes may fall to either side.
    const at::Tensor difference =
        (result.pixels[static_cast<size_t>(i)].to(at::kInt) - golden[absl::StrCat("pixels.", i)].to(at::kInt))
            .abs();
    EXPECT_LE(difference.max().item<int>(), 1) << name;
  }
}

class SdRunGolden : public testing::TestWithParam<const char*> {};

TEST_P(SdRunGolden, LatentsOfEveryStepAndPixelsAgree) {
  const Golden golden(GetParam());
  CheckRun(GetParam(), golden, *OpenModel(Folder(golden.Setting("model"))));
}
INSTANTIATE_TEST_SUITE_P(
    All, SdRunGolden,
    testing::Values("sd15-text", "sd15-odd", "sd15-ancestral", "sd15-rescaled", "sd15-image",
                    "sd15-image-unipc", "sd15-blend", "sd15-blend-all", "sd15-concat", "sd15-concat-some",
                    "sd15-compel", "sdxl-compel", "sdxl-text", "sdxl-odd", "sdxl-one-pass", "sdxl-image",
                    "sdxl-blend", "sdxl-concat", "refiner-image", "hand-over-euler-base",
                    "hand-over-euler-refiner", "hand-over-dpmpp_2m-base", "hand-over-dpmpp_2m-refiner",
                    "tiles-multistep", "tiles-ancestral", "sd15-embedding", "sd15-embedding-cut",
                    "sd15-embedding-compel", "sd15-embedding-long", "sdxl-embedding", "sdxl-embedding-compel",
                    "sd15-schedule", "sd15-schedule-image", "sd15-joined", "sdxl-schedule-joined",
                    "sd15-blend-heun", "sd15-blend-pndm", "sd15-image-lms", "sd15-image-pndm",
                    "sdxl-blend-kdpm_2_a", "sd2-text", "sd2-image", "lcm-text", "no-middle-text",
                    "pruned-text", "pruned-image"),
    [](const auto& info) { return "Case" + std::to_string(info.index); });

struct Single {
  const char *model, *base, *golden;
};
class SdCheckpointGolden : public testing::TestWithParam<Single> {};

TEST_P(SdCheckpointGolden, TensorsAndPicturesAreThoseOfTheFolder) {
  const Single& single = GetParam();
  const auto folder = OpenModel(Folder(single.model));
  const auto file = OpenModel(Checkpoint(single.model, single.base));
  EXPECT_EQ(file->family(), folder->family());
  EXPECT_EQ(file->variant(), folder->variant());
  ASSERT_EQ(file->components().size(), folder->components().size());
  for (size_t i = 0; i < folder->components().size(); ++i) {
    const Component &ours = file->components()[i], &theirs = folder->components()[i];
    ASSERT_EQ(ours.name, theirs.name);
    const auto a = Load(ours), b = Load(theirs);
    ASSERT_EQ(ours.layout->tensors().size(), theirs.layout->tensors().size());
    for (size_t t = 0; t < theirs.layout->tensors().size(); ++t) {
      const Slot slot{static_cast<int32_t>(t)};
      EXPECT_TRUE(at::equal((*a)[slot].data, (*b)[slot].data))
          << ours.name << " " << theirs.layout->tensors()[t].name;
    }
  }
  CheckRun(absl::StrCat(single.golden, ", one file"), Golden(single.golden), *file);
}
INSTANTIATE_TEST_SUITE_P(
    All, SdCheckpointGolden,
    testing::Values(Single{"tiny-sd15", "tiny-sd15", "sd15-text"},
                    // The mask is seen in the file, not taken from the folder that lends the rest.
                    Single{"tiny-sd15-inpaint", "tiny-sd15", "sd15-concat"},
                    Single{"tiny-sdxl", "tiny-sdxl", "sdxl-text"},
                    Single{"tiny-sdxl-inpaint", "tiny-sdxl", "sdxl-concat"},
                    Single{"tiny-refiner", "tiny-refiner", "refiner-image"},
                    Single{"tiny-sd2", "tiny-sd2", "sd2-text"}),
    [](const auto& info) { return "Case" + std::to_string(info.index); });

TEST(SdLoraGolden, EveryNamingIsThatOfPeftMergedAndBeside) {
  for (const char* name : {"sd15-lora", "sdxl-lora"}) {
    const Golden golden(name);
    const auto pipeline = OpenModel(Folder(golden.Setting("model")));
    const at::Tensor without = Generate(*pipeline, Params(golden)).latents.back();
    EXPECT_GT(RelativeError(without, golden[absl::StrCat("latents.0.", golden.Int("ran"))]), 0.01);
    for (const char* naming : {"kohya", "kohya-ldm", "diffusers"}) {
      const std::string path = GoldenPath(absl::StrCat("loras/", name, "-", naming, ".safetensors"));
      for (PatchMode mode : {PatchMode::kDirect, PatchMode::kAuto}) {
        CheckRun(absl::StrCat(name, " ", naming, mode == PatchMode::kDirect ? " merged" : " beside"), golden,
                 *pipeline, ApplyLora(*pipeline, path, 0.8, mode));
      }
    }
  }
}

TEST(SdBatch, APictureDoesNotDependOnItsBatch) {
  for (const char* name : {"sd15-text", "sd15-image", "sd15-blend", "sd15-concat", "sdxl-text"}) {
    const Golden golden(name);
    const auto pipeline = OpenModel(Folder(golden.Setting("model")));
    GenerateParams params = Params(golden);
    const RunResult both = Generate(*pipeline, params);
    params.seeds = {params.seeds[1]};
    const RunResult alone = Generate(*pipeline, params);
    EXPECT_TRUE(at::equal(both.latents.back().narrow(0, 1, 1), alone.latents.back())) << name;
    EXPECT_TRUE(at::equal(both.pixels[1], alone.pixels[0])) << name;
  }
}

TEST(SdTiles, OneThatIsLargerThanThePictureIsThePicture) {
  const Golden golden("sd15-text");
  const auto pipeline = OpenModel(Folder("tiny-sd15"));
  GenerateParams params = Params(golden);
  const RunResult whole = Generate(*pipeline, params);
  params.tiles = DenoiseTiles{.width = 1024, .height = 1024, .overlap = 32};
  EXPECT_TRUE(at::equal(Generate(*pipeline, params).latents.back(), whole.latents.back()));
}

TEST(SdGuidanceList, HasAGuidanceForEachStepAndItsLastForTheRest) {
  const Golden golden("sd15-text");
  const auto pipeline = OpenModel(Folder("tiny-sd15"));
  GenerateParams params = Params(golden);
  params.seeds.resize(1);
  const RunResult constant = Generate(*pipeline, params);
  params.guidance_list = {7.5, 7.5};
  EXPECT_TRUE(at::equal(Generate(*pipeline, params).latents.back(), constant.latents.back()));
  params.guidance_list = {7.5, 7.5, 1.0};
  const RunResult changed = Generate(*pipeline, params);
  EXPECT_TRUE(at::equal(changed.latents[1], constant.latents[1]));
  EXPECT_FALSE(at::equal(changed.latents[2], constant.latents[2]));
}

TEST(SdGradientMask, DarkerPlacesAreRepaintedLater) {
  const Golden golden("sd15-blend");
  const auto pipeline = OpenModel(Folder("tiny-sd15"));
  GenerateParams params = Params(golden);
  params.seeds.resize(1);
  params.sampler = "euler";
  auto last = [&](double grey) {
    params.SetPicture(MediaRole::kMask, at::full({16, 16, 3}, static_cast<int64_t>(grey * 255), at::kByte));
    params.gradient_mask = true;
    return Generate(*pipeline, params).latents.back();
  };
  const at::Tensor white = last(1), grey = last(0.3), black = last(0);
  params.gradient_mask.reset();
  params.SetPicture(MediaRole::kMask, at::full({16, 16, 3}, 255, at::kByte));
  EXPECT_TRUE(at::equal(white, Generate(*pipeline, params).latents.back()));
  params.SetPicture(MediaRole::kMask, at::zeros({16, 16, 3}, at::kByte));
  EXPECT_TRUE(at::equal(black, Generate(*pipeline, params).latents.back()));
  const double near = (grey - black).abs().max().item<double>(),
               far = (white - black).abs().max().item<double>();
  EXPECT_GT(near, 0);
  EXPECT_LT(near, far);
}

}  // namespace
}  // namespace latentd
