// Files that diffusers saved, with the strength of their layers in the header, against peft's merged weights.
// Modules have their canonical names, so that no family is needed.
#include <cmath>
#include <cstdlib>
#include <fstream>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "patcher/layer_patcher.h"

namespace latentd {
namespace {

constexpr double kTolerance = 1e-5;

std::string Path(const std::string& below) {
  const char* folder = std::getenv("LATENTD_GOLDENS");
  return absl::StrCat(folder == nullptr ? "build/goldens" : folder, "/", below);
}

// A component of a model, as it lies in its folder.
struct Base {
  PatchTarget target;
  std::shared_ptr<const WeightSet> weights;
};
Base Open(const std::string& model, const std::string& component) {
  const auto files = WeightFiles::Open(Path(absl::StrCat(model, "/", component)));
  EXPECT_TRUE(files.ok()) << files.status();
  auto layout = std::make_shared<ComponentLayout>();
  std::vector<Weight> weights;
  for (const auto& [name, entry] : (*files)->tensors()) {
    layout->Add(std::string(absl::StripPrefix(name, "text_model.")), entry.info->shape);
    weights.push_back({*(*files)->Read(name)});
  }
  Base base;
  base.target.component = component;
  base.target.layout = layout;
  base.target.dotted_prefixes = {absl::StrCat(component, ".text_model."), absl::StrCat(component, "."), ""};
  base.weights = std::make_shared<const WeightSet>(layout, std::move(weights));
  return base;
}

double RelativeError(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

class AdaptersGolden : public testing::Test {
 protected:
  // What of the file `name` changes in a component; all of it is as in `expected`.
  void Check(const std::shared_ptr<const ModelPatch>& patch, const Base& base, const WeightFiles& expected) {
    std::vector<PatchSpec> specs(1);
    specs[0].name = "lora";
    specs[0].patch = patch;
    const auto overlay =
        LayerPatcher::Apply(*base.weights, base.target, std::move(specs), {.mode = PatchMode::kDirect});
    ASSERT_TRUE(overlay.ok()) << overlay.status();
    for (const TensorDecl& tensor : base.target.layout->tensors()) {
      const std::string key = absl::StrCat(base.target.component, ".", tensor.name);
      const Slot slot = base.target.layout->Find(tensor.name);
      const at::Tensor before = (*base.weights)[slot].data;
      const at::Tensor* merged = *overlay == nullptr ? nullptr : (*overlay)->merged(slot);
      if (expected.tensors().count(key) == 0) {
        EXPECT_EQ(merged, nullptr) << key << " is changed";
        continue;
      }
      ++seen_;
      ASSERT_NE(merged, nullptr) << key << " is not changed";
      const at::Tensor want = expected.Read(key)->reshape(before.sizes());
      EXPECT_GT(RelativeError(before, want), 100 * kTolerance) << key;
      error_ = std::max(error_, RelativeError(*merged, want));
    }
  }

  size_t seen_ = 0;
  double error_ = 0;
};

TEST_F(AdaptersGolden, WeightsAreThoseThatPeftMerges) {
  std::ifstream in(Path("adapters/manifest.json"));
  const auto manifest = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(manifest.is_object());
  ASSERT_EQ(manifest.size(), 19u);
  for (const auto& [name, components] : manifest.items()) {
    SCOPED_TRACE(name);
    const auto opened = WeightFiles::Open(Path(absl::StrCat("adapters/", name, ".safetensors")));
    ASSERT_TRUE(opened.ok()) << opened.status();
    const auto patch = ModelPatch::Load(*opened, LoadContext([] { return false; }, [](int64_t, int64_t) {}));
    ASSERT_TRUE(patch.ok()) << patch.status();
    const auto expected = *WeightFiles::Open(Path(absl::StrCat("adapters/", name, "-merged.safetensors")));
    seen_ = 0;
    error_ = 0;
    for (const auto& component : components["components"]) {
      Check(*patch, Open(components["model"].get<std::string>(), component.get<std::string>()), *expected);
    }
    EXPECT_EQ(seen_, expected->tensors().size());
    EXPECT_LT(error_, kTolerance);
    std::printf("%-18s %4zu weights  %.1e\n", name.c_str(), seen_, error_);
  }
}

}  // namespace
}  // namespace latentd
