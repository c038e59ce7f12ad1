// Every layer type against peft or the formula, merged into fp32 and bf16 weights, whichever mode is asked
// for.
#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "patcher/layer_patcher.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

constexpr double kTolerance = 1e-5;

struct Case {
  const char* file;
  const char* type;
  PatchMode mode;
};

class LayerTypesGolden : public testing::TestWithParam<Case> {
 protected:
  LayerTypesGolden() {
    ModelFiles files;
    files.name = "tiny-dev";
    files.folder = GoldenPath("tiny-dev");
    pipeline = OpenModel(files);
    for (const Component& c : pipeline->components()) {
      if (c.name == "transformer") transformer = &c;
    }
    base = Load(*transformer);
    auto opened = WeightFiles::Open(GoldenPath(absl::StrCat("loras/type-", GetParam().file, ".safetensors")));
    EXPECT_TRUE(opened.ok()) << opened.status();
    auto loaded = ModelPatch::Load(*opened, LoadContext([] { return false; }, [](int64_t, int64_t) {}));
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    patch = *loaded;
    expected = *WeightFiles::Open(GoldenPath(absl::StrCat("layers/", GetParam().file, ".safetensors")));
  }

  const ComponentLayout& layout() const { return *transformer->layout; }

  // The same weights, stored as `type`.
  std::shared_ptr<const WeightSet> As(const WeightSet& set, at::ScalarType type) const {
    std::vector<Weight> weights;
    for (size_t i = 0; i < layout().tensors().size(); ++i) {
      weights.push_back({set[Slot{static_cast<int32_t>(i)}].data.to(type)});
    }
    return std::make_shared<const WeightSet>(transformer->layout, std::move(weights));
  }

  std::shared_ptr<const Overlay> Apply(const WeightSet& weights, double weight, PatchMode mode,
                                       std::vector<PatchReport>* reports = nullptr) const {
    std::vector<PatchSpec> specs(1);
    specs[0].name = "lora";
    specs[0].patch = patch;
    specs[0].weight = weight;
    auto overlay =
        LayerPatcher::Apply(weights, *transformer->patch_target, std::move(specs), {.mode = mode}, reports);
    EXPECT_TRUE(overlay.ok()) << overlay.status();
    return *overlay;
  }

  // What a weight is under an overlay, however it got there.
  at::Tensor Patched(const WeightSet& weights, const Overlay& overlay, Slot slot) const {
    if (const Sidecar* sidecar = overlay.sidecar(slot))
      return weights[slot].data + sidecar->up.mm(sidecar->down);
    const at::Tensor* merged = overlay.merged(slot);
    return merged == nullptr ? weights[slot].data : *merged;
  }

  std::unique_ptr<Pipeline> pipeline;
  const Component* transformer = nullptr;
  std::shared_ptr<const WeightSet> base;
  std::shared_ptr<const ModelPatch> patch;
  std::shared_ptr<const WeightFiles> expected;
};

TEST_P(LayerTypesGolden, Fp32WeightsAgreeWithTheOracle) {
  for (const PatchLayer& layer : patch->layers()) EXPECT_EQ(layer.type, GetParam().type);
  auto full = Apply(*base, 1, GetParam().mode);
  auto half = Apply(*base, 0.5, GetParam().mode);
  double error = 0;
  for (const auto& [name, entry] : expected->tensors()) {
    const Slot slot = layout().Find(name);
    ASSERT_TRUE(slot) << name;
    const at::Tensor want = *expected->Read(name), before = (*base)[slot].data;
    EXPECT_GT(RelativeError(before, want), 100 * kTolerance) << name << " is not changed";
    error = std::max(error, RelativeError(Patched(*base, *full, slot), want));
    error = std::max(error, RelativeError(Patched(*base, *half, slot), (before + want) / 2));
  }
  EXPECT_LE(Report(absl::StrCat("type-", GetParam().file), error), kTolerance);
}

TEST_P(LayerTypesGolden, WeightsThatAreNotExpectedToChangeDoNot) {
  auto overlay = Apply(*base, 1, GetParam().mode);
  for (const TensorDecl& tensor : layout().tensors()) {
    const Slot slot = layout().Find(tensor.name);
    if (expected->tensors().count(tensor.name) != 0) continue;
    EXPECT_EQ(overlay->merged(slot), nullptr) << tensor.name;
    EXPECT_EQ(overlay->sidecar(slot), nullptr) << tensor.name;
  }
}

TEST_P(LayerTypesGolden, Bf16WeightsAreTheFp32ResultRoundedOnce) {
  const auto stored = As(*base, at::kBFloat16), upcast = As(*stored, at::kFloat);
  auto rounded = Apply(*stored, 0.5, GetParam().mode), exact = Apply(*upcast, 0.5, GetParam().mode);
  for (const auto& [name, entry] : expected->tensors()) {
    const Slot slot = layout().Find(name);
    if (rounded->sidecar(slot) != nullptr) continue;  // nothing is rounded
    ASSERT_EQ(rounded->merged(slot)->scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(*rounded->merged(slot), exact->merged(slot)->to(at::kBFloat16))) << name;
  }
}

TEST_P(LayerTypesGolden, TheReportCountsHowEachTensorMetItsPatch) {
  std::vector<PatchReport> reports(1);
  auto overlay = Apply(*base, 1, GetParam().mode, &reports);
  int64_t merged = 0, beside = 0;
  for (const TensorDecl& tensor : layout().tensors()) {
    const Slot slot = layout().Find(tensor.name);
    merged += overlay->merged(slot) != nullptr ? 1 : 0;
    beside += overlay->sidecar(slot) != nullptr ? 1 : 0;
  }
  EXPECT_EQ(reports[0].direct_tensors, merged);
  EXPECT_EQ(reports[0].sidecar_tensors, beside);
  EXPECT_EQ(merged + beside, static_cast<int64_t>(expected->tensors().size()));
  const bool low_rank =
      std::string(GetParam().type).substr(0, 5) == "LoRA+" && std::string(GetParam().type) != "LoRA+DoRA";
  EXPECT_EQ(beside > 0, low_rank && GetParam().mode != PatchMode::kDirect);
  const auto size = LayerPatcher::OverlayBytes(
      layout(), 4, [](Slot) { return StorageForm::kPlain; }, *transformer->patch_target,
      [&] {
        std::vector<PatchSpec> specs(1);
        specs[0].patch = patch;
        return specs;
      }(),
      {.mode = GetParam().mode});
  ASSERT_TRUE(size.ok());
  EXPECT_EQ(size->merged > 0, merged > 0);
  EXPECT_EQ(size->beside > 0, beside > 0);
}

std::vector<Case> Cases() {
  constexpr std::pair<const char*, const char*> kFiles[] = {{"lora-bias", "LoRA+bias"},
                                                            {"lora-diff-b", "LoRA+bias diff"},
                                                            {"dora-peft", "LoRA+DoRA"},
                                                            {"dora-columns", "LoRA+DoRA"},
                                                            {"dora-of-lokr", "LoKr+DoRA"},
                                                            {"loha", "LoHa"},
                                                            {"lokr", "LoKr"},
                                                            {"lokr-full", "LoKr"},
                                                            {"lokr-products", "LoKr"},
                                                            {"full", "full diff"},
                                                            {"ia3-peft", "IA3"},
                                                            {"ia3-rows", "IA3"},
                                                            {"ia3-columns", "IA3"},
                                                            {"glora", "GLoRA"},
                                                            {"glora-old", "GLoRA"},
                                                            {"oft", "OFT"},
                                                            {"oft-constraint", "OFT"},
                                                            {"oft-rescaled", "OFT"},
                                                            {"oft-by-part", "OFT"},
                                                            {"boft", "BOFT"},
                                                            {"norm", "norm"}};
  std::vector<Case> cases;
  for (const auto& [file, type] : kFiles) {
    for (PatchMode mode : {PatchMode::kDirect, PatchMode::kSidecar}) cases.push_back({file, type, mode});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(All, LayerTypesGolden, testing::ValuesIn(Cases()), [](const auto& info) {
  std::string name = info.param.file;
  std::replace(name.begin(), name.end(), '-', '_');
  return name + (info.param.mode == PatchMode::kDirect ? "_direct" : "_sidecar");
});

}  // namespace
}  // namespace latentd
