// FLUX.1 against diffusers: every block, the transformer, whole runs.
#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "families/flux/flux_keys.h"
#include "families/flux/flux_pipeline.h"
#include "families/flux/flux_transformer.h"
#include "families/nn/rope.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

// Where a case's weights come from: a diffusers folder, or a native file.
struct Source {
  const char* name;
  const char* folder;  // has transformer/config.json
  const char* file;    // below the goldens; "" = the folder's own
  const char* golden;
};

ModelFiles Files(const std::string& folder, const std::string& file = "") {
  ModelFiles files;
  files.name = folder + file;
  if (file.empty()) {
    files.folder = folder.front() == '/' ? folder : GoldenPath(folder);
  } else {
    files.file = GoldenPath(file);
    files.base_folder = GoldenPath(folder);
  }
  return files;
}

struct Loaded {
  std::shared_ptr<const FluxTransformer> transformer;
  std::shared_ptr<const WeightSet> weights;
};

Loaded LoadTransformer(const Source& source) {
  const std::unique_ptr<Pipeline> pipeline = OpenModel(Files(source.folder, source.file));
  Loaded loaded;
  loaded.transformer = static_cast<const FluxPipeline&>(*pipeline).parts().transformer;
  for (const Component& component : pipeline->components()) {
    if (component.name == "transformer") loaded.weights = Load(component);
  }
  return loaded;
}

// The wide transformer fits no tiny text encoder, so it is opened without a pipeline.
Loaded LoadWide() {
  const std::string path = GoldenPath("native/wide-bf16.safetensors");
  const auto files = WeightFiles::Open(path);
  const auto config = FluxConfig::Infer(**files, "", FluxConfig());
  Loaded loaded;
  loaded.transformer = std::make_shared<const FluxTransformer>(*config);
  loaded.weights = Load(path, loaded.transformer->layout(), FluxNativeKeys());
  return loaded;
}

void CheckTransformer(const std::string& name, const Golden& golden, const Loaded& loaded) {
  const c10::InferenceMode inference;
  const FluxTransformer& transformer = *loaded.transformer;
  const WeightView view(*loaded.weights, nullptr);
  const FluxText text =
      transformer.PrepareText(view, golden["t5"], golden.Int("rows"), golden.Int("columns"));
  const FluxConditioning conditioning =
      transformer.PrepareConditioning(view, golden["pooled"], golden.Double("guidance"));
  const at::Tensor vec =
      transformer.Modulation(view, static_cast<float>(golden.Double("sigma")), conditioning);
  const at::Tensor expected_vec = at::silu(golden["temb"]);
  EXPECT_LE(Report(name + " modulation input", RelativeError(vec, expected_vec)), kBlockTolerance);

  auto check_blocks = [&](const std::string& kind, const auto& blocks) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      const std::string key = absl::StrCat(kind, ".", i);
      FluxTokens tokens = FluxTokens::Join(golden[key + ".in.text"], golden[key + ".in.image"]);
      blocks[i](view, tokens, expected_vec, text.rope);
      const double error = std::max(RelativeError(tokens.text, golden[key + ".out.text"]),
                                    RelativeError(tokens.image, golden[key + ".out.image"]));
      EXPECT_LE(Report(name + " " + key, error), kBlockTolerance);
    }
  };
  check_blocks("double", transformer.double_blocks());
  check_blocks("single", transformer.single_blocks());
  EXPECT_LE(Report(name + " velocity",
                   RelativeError(transformer(view, golden["x"], vec, text), golden["velocity"])),
            kBlockTolerance);
}

class FluxTransformerGolden : public testing::TestWithParam<Source> {};

TEST_P(FluxTransformerGolden, BlocksAndVelocityAgree) {
  CheckTransformer(GetParam().name, Golden(GetParam().golden), LoadTransformer(GetParam()));
}
INSTANTIATE_TEST_SUITE_P(
    All, FluxTransformerGolden,
    testing::Values(
        Source{"dev", "tiny-dev", "", "transformer-dev"},
        Source{"dev native", "tiny-dev", "native/dev.safetensors", "transformer-dev"},
        Source{"dev one file", "tiny-dev", "native/dev-diffusers-names.safetensors", "transformer-dev"},
        Source{"schnell", "tiny-schnell", "", "transformer-schnell"},
        Source{"schnell native", "tiny-schnell", "native/schnell.safetensors", "transformer-schnell"},
        Source{"dev in fp8", "tiny-dev", "native/fp8.safetensors", "transformer-fp8"},
        Source{"dev in fp8 with scales", "tiny-dev", "native/fp8-scaled.safetensors",
               "transformer-fp8-scaled"},
        // Guidance is seen in the file, not taken from the folder that lends the rest.
        Source{"dev on schnell", "tiny-schnell", "native/dev.safetensors", "transformer-dev"}),
    [](const auto& info) { return "Case" + std::to_string(info.index); });

TEST(FluxTransformerWideGolden, PublishedHeadsStoredInBf16AgreeWithUpcastWeights) {
  CheckTransformer("wide", Golden("transformer-wide"), LoadWide());
}

// ------------------------------------------------------------------------------------------------- runs

GenerateParams Params(const Golden& golden) {
  GenerateParams params;
  params.prompt = golden.Text("prompt");
  if (golden.Has("negative")) params.negative_prompt = golden.Text("negative");
  if (golden.Has("second")) params.prompt_2 = golden.Text("second");
  if (golden.Has("negative_second")) params.negative_prompt_2 = golden.Text("negative_second");
  params.width = golden.Int("width");
  params.height = golden.Int("height");
  params.steps = golden.Int("steps");
  params.guidance = golden.Double("guidance");
  params.true_cfg_scale = golden.Double("true_cfg_scale");
  params.max_sequence_length = golden.Int("length");
  if (golden.Has("init_image")) {
    params.SetPicture(MediaRole::kInit, golden["init_image"]);
    params.strength = golden.Double("strength");
  }
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    params.seeds.push_back(static_cast<uint64_t>(golden.Ints(absl::StrCat("seed.", i))[0]));
  }
  return params;
}

void CheckRun(const std::string& name, const Golden& golden, const Pipeline& pipeline) {
  const RunResult result = Generate(pipeline, Params(golden));
  for (const auto& [key, tensor] : result.conditioning) {
    EXPECT_TRUE(tensor.is_cpu() && tensor.is_contiguous()) << key;
  }
  EXPECT_LE(Report(name + " t5", RelativeError(result.conditioning.at("t5"), golden["t5"])), kBlockTolerance);
  EXPECT_LE(Report(name + " pooled", RelativeError(result.conditioning.at("pooled"), golden["pooled"])),
            kBlockTolerance);
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
    EXPECT_LE(difference.max().item<int>(), 1);
    EXPECT_LE(Report(absl::StrCat(name, " share of bytes off by one"),
                     difference.to(at::kDouble).mean().item<double>()),
              1e-3);
  }
}

class FluxRunGolden : public testing::TestWithParam<Source> {};

TEST_P(FluxRunGolden, LatentsOfEveryStepAndPixelsAgree) {
  const Source& source = GetParam();
  CheckRun(source.name, Golden(source.golden), *OpenModel(Files(source.folder, source.file)));
}
INSTANTIATE_TEST_SUITE_P(All, FluxRunGolden,
                         testing::Values(Source{"txt2img dev", "tiny-dev", "", "run-dev"},
                                         Source{"txt2img dev native", "tiny-dev", "native/dev.safetensors",
                                                "run-dev"},
                                         Source{"txt2img schnell", "tiny-schnell", "", "run-schnell"},
                                         Source{"txt2img schnell native", "tiny-schnell",
                                                "native/schnell.safetensors", "run-schnell"},
                                         Source{"true CFG", "tiny-dev", "", "run-true-cfg"},
                                         Source{"second prompts", "tiny-dev", "", "run-second"},
                                         Source{"second negative", "tiny-dev", "", "run-second-negative"},
                                         Source{"true CFG from nothing", "tiny-dev", "", "run-unguided"},
                                         Source{"img2img", "tiny-dev", "", "run-img2img"},
                                         Source{"bf16 weights", "tiny-bf16", "", "run-bf16"}),
                         [](const auto& info) { return "Case" + std::to_string(info.index); });

TEST(FluxDemoGolden, DemoModelAgrees) {
  if (!Golden::Exists("demo-run")) FAIL() << "the demo model is missing from deploy/demo/models";
  for (const char* name : {"demo-run", "demo-img2img"}) {
    const Golden golden(name);
    CheckRun(name, golden, *OpenModel(Files(golden.Setting("folder"))));
  }
}

TEST(FluxBatch, APictureDoesNotDependOnItsBatch) {
  const auto pipeline = OpenModel(Files("tiny-dev"));
  for (const char* name : {"run-dev", "run-img2img"}) {
    GenerateParams params = Params(Golden(name));
    const RunResult both = Generate(*pipeline, params);
    params.seeds = {params.seeds[1]};
    const RunResult alone = Generate(*pipeline, params);
    EXPECT_TRUE(at::equal(both.latents.back().narrow(0, 1, 1), alone.latents.back())) << name;
    EXPECT_TRUE(at::equal(both.pixels[1], alone.pixels[0])) << name;
  }
}

TEST(FluxBatch, TheSameRequestGivesTheSameBytes) {
  const auto pipeline = OpenModel(Files("tiny-schnell"));
  const GenerateParams params = Params(Golden("run-schnell"));
  EXPECT_TRUE(at::equal(Generate(*pipeline, params).pixels[0], Generate(*pipeline, params).pixels[0]));
}

}  // namespace
}  // namespace latentd
