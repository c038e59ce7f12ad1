// FLUX.1 drawing after a control image, against diffusers' control pipeline: a control model in both layouts,
// and a text-to-image model whose input layer a control LoRA grows.
#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "patcher/layer_patcher.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

ModelFiles FilesOf(const std::string& folder, const std::string& file = "") {
  ModelFiles files;
  files.name = folder;
  (file.empty() ? files.folder : files.base_folder) = GoldenPath(folder);
  if (!file.empty()) files.file = GoldenPath(file);
  return files;
}

GenerateParams Params(const Golden& golden) {
  GenerateParams params;
  params.prompt = golden.Text("prompt");
  params.width = golden.Int("width");
  params.height = golden.Int("height");
  params.steps = golden.Int("steps");
  params.guidance = golden.Double("guidance");
  params.max_sequence_length = golden.Int("length");
  params.SetPicture(MediaRole::kControl, golden["control_image"]);
  params.seeds = {static_cast<uint64_t>(golden.Ints("seed")[0])};
  return params;
}

void Check(const std::string& name, const Golden& golden, const RunResult& result) {
  double error = 0;
  for (size_t k = 0; k < result.latents.size(); ++k) {
    error = std::max(error, RelativeError(result.latents[k], golden[absl::StrCat("latents.", k + 1)]));
  }
  EXPECT_LE(Report(name + " latents", error), kRunTolerance);
  EXPECT_LE((result.pixels[0].to(at::kInt) - golden["pixels"].to(at::kInt)).abs().max().item<int>(), 1);
}

TEST(FluxControlGolden, AControlModelAgrees) {
  const Golden golden("run-control");
  for (const ModelFiles& files :
       {FilesOf("tiny-control"), FilesOf("tiny-dev", "native/control.safetensors")}) {
    const auto pipeline = OpenModel(files);
    EXPECT_EQ(pipeline->variant(), "dev-control");
    Check(files.file.empty() ? "control model" : "control model native", golden,
          Generate(*pipeline, Params(golden)));
  }
}

TEST(FluxControlGolden, AControlLoraAgrees) {
  const Golden golden("run-control-lora");
  const auto pipeline = OpenModel(FilesOf("tiny-dev"));
  const auto files = WeightFiles::Open(GoldenPath("loras/control.safetensors"));
  ASSERT_TRUE(files.ok()) << files.status();
  const auto patch = ModelPatch::Load(*files, LoadContext([] { return false; }, [](int64_t, int64_t) {}));
  ASSERT_TRUE(patch.ok()) << patch.status();
  for (const PatchMode mode : {PatchMode::kAuto, PatchMode::kDirect, PatchMode::kSidecar}) {
    Overlays overlays;
    GenerateParams params = Params(golden);
    for (const Component& component : pipeline->components()) {
      if (component.name != "transformer") continue;
      const double weight = golden.Double("weight");
      const auto report = LayerPatcher::Match(**patch, "control", weight, {*component.patch_target});
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->unmatched_count, 0);
      params.grown_inputs = report->grown.at("transformer.x_embedder.weight");
      std::vector<PatchSpec> specs(1);
      specs[0].name = "control";
      specs[0].patch = *patch;
      specs[0].weight = weight;
      auto overlay =
          LayerPatcher::Apply(*Load(component), *component.patch_target, std::move(specs), {.mode = mode});
      ASSERT_TRUE(overlay.ok()) << overlay.status();
      overlays[component.name] = *overlay;
    }
    Check(absl::StrCat("control LoRA, mode ", static_cast<int>(mode)), golden,
          Generate(*pipeline, params, overlays));
  }
}

}  // namespace
}  // namespace latentd
