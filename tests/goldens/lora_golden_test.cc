// One LoRA in every naming, in text encoders and transformer, direct and sidecar, against peft.
#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "patcher/layer_patcher.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

constexpr double kWeight = 0.75;  // as in loras.py

std::shared_ptr<const ModelPatch> LoadPatchFile(const std::string& path) {
  const LoadContext context([] { return false; }, [](int64_t, int64_t) {});
  auto files = WeightFiles::Open(path);
  EXPECT_TRUE(files.ok()) << files.status();
  auto patch = ModelPatch::Load(*files, context);
  EXPECT_TRUE(patch.ok()) << patch.status();
  return *patch;
}

std::shared_ptr<const ModelPatch> LoadPatch(const std::string& name) {
  return LoadPatchFile(GoldenPath(absl::StrCat("loras/", name, ".safetensors")));
}

std::unique_ptr<Pipeline> TinyDev() {
  ModelFiles files;
  files.name = "tiny-dev";
  files.folder = GoldenPath("tiny-dev");
  return OpenModel(files);
}

std::vector<PatchTarget> Targets(const Pipeline& pipeline) {
  std::vector<PatchTarget> targets;
  for (const Component& c : pipeline.components()) {
    if (c.patch_target) targets.push_back(*c.patch_target);
  }
  return targets;
}

PatchSpec Spec(std::shared_ptr<const ModelPatch> patch, double weight, const std::string& name = "lora") {
  PatchSpec spec;
  spec.name = name;
  spec.patch = std::move(patch);
  spec.weight = weight;
  return spec;
}

Overlays OverlaysOf(const Pipeline& pipeline, const std::shared_ptr<const ModelPatch>& patch,
                    PatchMode mode) {
  Overlays overlays;
  for (const Component& component : pipeline.components()) {
    if (!component.patch_target) continue;
    std::vector<PatchSpec> specs;
    specs.push_back(Spec(patch, kWeight));
    auto overlay =
        LayerPatcher::Apply(*Load(component), *component.patch_target, std::move(specs), {.mode = mode});
    EXPECT_TRUE(overlay.ok()) << overlay.status();
    overlays[component.name] = *overlay;
  }
  return overlays;
}

struct Case {
  const char* naming;
  PatchMode mode;
};

class LoraGolden : public testing::TestWithParam<Case> {};

// Runs the golden's request with a LoRA on every component and compares each latent.
void CheckRun(const std::string& name, const Golden& golden, const Pipeline& pipeline,
              const Overlays& overlays) {
  GenerateParams params;
  params.prompt = golden.Text("prompt");
  params.width = golden.Int("width");
  params.height = golden.Int("height");
  params.steps = golden.Int("steps");
  params.guidance = golden.Double("guidance");
  params.max_sequence_length = golden.Int("length");
  params.seeds = {static_cast<uint64_t>(golden.Ints("seed.0")[0])};
  const RunResult result = Generate(pipeline, params, overlays);
  EXPECT_LE(Report(name + " t5", RelativeError(result.conditioning.at("t5"), golden["t5"])), kBlockTolerance);
  EXPECT_LE(Report(name + " pooled", RelativeError(result.conditioning.at("pooled"), golden["pooled"])),
            kBlockTolerance);
  double error = 0;
  for (size_t k = 0; k < result.latents.size(); ++k) {
    error = std::max(error, RelativeError(result.latents[k], golden[absl::StrCat("latents.0.", k + 1)]));
  }
  EXPECT_LE(Report(name + " latents", error), kRunTolerance);
}

const char* ModeName(PatchMode mode) { return mode == PatchMode::kDirect ? " direct" : " sidecar"; }

TEST_P(LoraGolden, AWholeRunAgreesWithPeft) {
  const Golden golden("run-lora");
  const std::unique_ptr<Pipeline> pipeline = TinyDev();
  const auto patch = LoadPatch(GetParam().naming);
  const auto report = LayerPatcher::Match(*patch, "lora", kWeight, Targets(*pipeline));
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->unmatched_count, 0) << testing::PrintToString(report->unmatched);
  EXPECT_EQ(report->matched.size(), 3u);

  CheckRun(absl::StrCat(GetParam().naming, ModeName(GetParam().mode)), golden, *pipeline,
           OverlaysOf(*pipeline, patch, GetParam().mode));
}

// Stored in bf16: merged weights are rounded once to it, so only the sidecar meets peft's fp32 numbers.
TEST(DemoLoraGolden, TheDemosLorasAgreeWithDiffusersOwnLoader) {
  for (const char* name : {"dusk", "checker"}) {
    const std::string name_of_case = absl::StrCat("demo-lora-", name);
    if (!Golden::Exists(name_of_case)) FAIL() << "the demo model is missing from deploy/demo/models";
    const Golden golden(name_of_case);
    ModelFiles files;
    files.name = "demo";
    files.folder = golden.Setting("folder");
    const std::unique_ptr<Pipeline> pipeline = OpenModel(files);
    const auto patch = LoadPatchFile(absl::StrCat(files.folder, "/../../loras/", name, ".safetensors"));
    CheckRun(name_of_case, golden, *pipeline, OverlaysOf(*pipeline, patch, PatchMode::kSidecar));
  }
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const char* naming :
       {"diffusers", "peft", "adapter", "kohya", "kohya-te3", "kohya-diffusers", "bfl", "bfl-bare"}) {
    for (PatchMode mode : {PatchMode::kDirect, PatchMode::kSidecar}) cases.push_back({naming, mode});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(All, LoraGolden, testing::ValuesIn(Cases()), [](const auto& info) {
  std::string name = info.param.naming;
  std::replace(name.begin(), name.end(), '-', '_');
  return name + (info.param.mode == PatchMode::kDirect ? "_direct" : "_sidecar");
});

// ---------------------------------------------------------------------------------------------- LayerPatcher

class LayerPatcherTest : public testing::Test {
 protected:
  LayerPatcherTest() {
    for (const Component& c : pipeline->components()) {
      if (c.name == "transformer") transformer = &c;
    }
    weights = Load(*transformer);
    slot = transformer->layout->Find("transformer_blocks.0.attn.to_q.weight");
  }
  std::shared_ptr<const Overlay> Apply(std::vector<PatchSpec> specs, PatchMode mode) {
    auto overlay =
        LayerPatcher::Apply(*weights, *transformer->patch_target, std::move(specs), {.mode = mode});
    EXPECT_TRUE(overlay.ok()) << overlay.status();
    return *overlay;
  }
  std::vector<PatchSpec> Two(const std::string& first, const std::string& second) {
    std::vector<PatchSpec> specs;
    specs.push_back(Spec(LoadPatch(first), 0.5, first));
    specs.push_back(Spec(LoadPatch(second), -0.25, second));
    return specs;
  }

  std::unique_ptr<Pipeline> pipeline = TinyDev();
  const Component* transformer = nullptr;
  std::shared_ptr<const WeightSet> weights;
  Slot slot;
};

TEST_F(LayerPatcherTest, DirectIsTheFormulaRoundedOnce) {
  auto overlay = Apply(Two("diffusers", "kohya"), PatchMode::kDirect);
  const LowRank* layer = nullptr;
  auto patch = LoadPatch("diffusers");
  for (const PatchLayer& l : patch->layers()) {
    if (l.name == "transformer.transformer_blocks.0.attn.to_q") layer = l.low_rank();
  }
  ASSERT_NE(layer, nullptr);
  const at::Tensor expected = (*weights)[slot].data.to(at::kDouble) +
                              (0.5 - 0.25) * layer->up.to(at::kDouble).mm(layer->down.to(at::kDouble));
  EXPECT_LE(RelativeError(*overlay->merged(slot), expected), 1e-6);
}

TEST_F(LayerPatcherTest, TheOrderOfSpecsDoesNotChangeABit) {
  for (PatchMode mode : {PatchMode::kDirect, PatchMode::kSidecar}) {
    auto ab = Two("diffusers", "kohya");
    auto ba = Two("diffusers", "kohya");
    std::swap(ba[0], ba[1]);
    auto x = Apply(std::move(ab), mode), y = Apply(std::move(ba), mode);
    if (mode == PatchMode::kDirect) {
      EXPECT_TRUE(at::equal(*x->merged(slot), *y->merged(slot)));
    } else {
      EXPECT_TRUE(at::equal(x->sidecar(slot)->up, y->sidecar(slot)->up));
      EXPECT_TRUE(at::equal(x->sidecar(slot)->down, y->sidecar(slot)->down));
      EXPECT_EQ(x->sidecar(slot)->down.size(0), 8);  // two of rank 4, side by side
    }
  }
}

TEST_F(LayerPatcherTest, WeightZeroLeavesNothingToDo) {
  std::vector<PatchSpec> specs;
  specs.push_back(Spec(LoadPatch("diffusers"), 0));
  EXPECT_EQ(Apply(std::move(specs), PatchMode::kAuto), nullptr);
}

TEST_F(LayerPatcherTest, BaseWeightsAreNeverWritten) {
  std::vector<at::Tensor> before;
  for (const TensorDecl& t : transformer->layout->tensors()) {
    before.push_back((*weights)[transformer->layout->Find(t.name)].data.clone());
  }
  for (PatchMode mode : {PatchMode::kDirect, PatchMode::kSidecar}) {
    auto overlay = Apply(Two("diffusers", "kohya"), mode);
    const WeightView view(*weights, overlay.get());
    view.Linear(slot, {},
                at::ones({3, transformer->layout->tensors()[static_cast<size_t>(slot.index)].shape[1]}));
  }
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(at::equal(before[i], (*weights)[Slot{static_cast<int32_t>(i)}].data));
  }
}

TEST_F(LayerPatcherTest, AnOverlayKeepsItsLorasLockedUntilItEnds) {
  RamBudget ram(int64_t{1} << 30);
  ModelCache cache(&ram, {});
  const std::string path = GoldenPath("loras/diffusers.safetensors");
  auto files = *WeightFiles::Open(path);
  const Loader loader{"lora", files->tensor_bytes(),
                      [&](const LoadContext& c) -> absl::StatusOr<std::shared_ptr<const Resource>> {
                        auto patch = ModelPatch::Load(files, c);
                        if (!patch.ok()) return patch.status();
                        return *patch;
                      }};
  LockHandle handle = *cache.Lock({"lora", ""}, loader, {.owner = "session"});
  std::vector<PatchSpec> specs;
  specs.push_back(Spec(std::static_pointer_cast<const ModelPatch>(handle.resource()), 1));
  specs.back().handle = handle.Share();
  auto overlay = Apply(std::move(specs), PatchMode::kSidecar);
  handle.Release();  // the session lets go; the overlay does not
  EXPECT_EQ(cache.Stats().records.at(0).lock_count, 1);
  EXPECT_EQ(cache.Trim(MemoryBudget::kUnlimited), 0);
  overlay = nullptr;
  EXPECT_EQ(cache.Stats().records.at(0).lock_count, 0);
  EXPECT_GT(cache.Trim(MemoryBudget::kUnlimited), 0);
}

TEST_F(LayerPatcherTest, AnOverlaysOwnTensorsArePromisedFirst) {
  RamBudget ram(1 << 10);
  CpuDevice cpu(&ram);
  std::vector<PatchSpec> specs;
  specs.push_back(Spec(LoadPatch("diffusers"), 1));
  auto overlay = LayerPatcher::Apply(*weights, *transformer->patch_target, std::move(specs),
                                     {.mode = PatchMode::kDirect, .device = &cpu, .owner = "session"});
  EXPECT_EQ(overlay.status().code(), absl::StatusCode::kFailedPrecondition) << overlay.status();
  EXPECT_EQ(ram.stats().reserved_bytes + ram.stats().in_use_bytes, 0);
}

}  // namespace
}  // namespace latentd
