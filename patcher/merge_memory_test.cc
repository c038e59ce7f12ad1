// What merging asks for beside its result is enough: every layer type against LibTorch's own count of bytes.
#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "c10/util/ThreadLocalDebugInfo.h"
#include "gtest/gtest.h"
#include "patcher/layer_patcher.h"

namespace latentd {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

constexpr int64_t kRows = 256, kColumns = 384;

// LibTorch's hook for profilers.
class PeakCounter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    net += bytes;
    most = std::max(most, net);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t net = 0, most = 0;
};

Tensors With(Tensors tensors, const std::string& key, const at::Tensor& value) {
  tensors[key] = value;
  return tensors;
}

// Files for a linear layer `a`, [kRows, kColumns].
std::map<std::string, Tensors> LinearFiles() {
  const Tensors lora = {{"a.lora_A.weight", at::randn({8, kColumns})},
                        {"a.lora_B.weight", at::randn({kRows, 8})}};
  return {{"lora", lora},
          {"diff", {{"a.diff", at::randn({kRows, kColumns})}}},
          {"bf16 diff", {{"a.diff", at::randn({kRows, kColumns}).to(at::kBFloat16)}}},
          {"dora rows", With(lora, "a.lora_magnitude_vector", at::rand({kRows}))},
          {"dora columns", With(lora, "a.dora_scale", at::rand({1, kColumns}))},
          {"loha",
           {{"a.hada_w1_a", at::randn({kRows, 8})},
            {"a.hada_w1_b", at::randn({8, kColumns})},
            {"a.hada_w2_a", at::randn({kRows, 8})},
            {"a.hada_w2_b", at::randn({8, kColumns})}}},
          {"lokr", {{"a.lokr_w1", at::randn({16, 16})}, {"a.lokr_w2", at::randn({16, 24})}}},
          {"ia3", {{"a.weight", at::randn({kColumns})}, {"a.on_input", at::scalar_tensor(1)}}},
          {"glora",
           {{"a.a1.weight", at::randn({kColumns, 8})},
            {"a.a2.weight", at::randn({8, kColumns})},
            {"a.b1.weight", at::randn({kRows, 8})},
            {"a.b2.weight", at::randn({8, kColumns})}}},
          {"oft", {{"a.oft_blocks", at::randn({4, 64, 64})}}},
          {"boft", {{"a.oft_blocks", at::randn({2, 4, 64, 64})}}},
          {"oft of one block", {{"a.oft_blocks", at::randn({1, 256, 256})}}},
          {"boft of large blocks", {{"a.oft_blocks", at::randn({1, 2, 128, 128})}}},
          {"sparse", With(With(With(lora, "a.bias_indices", at::zeros({2, 9}, at::kShort)), "a.bias_values",
                               at::randn({9})),
                          "a.bias_size", at::tensor({256, 384}, at::kShort))}};
}

// Files for a convolution `a`, [kRows, 48, 3, 3].
std::map<std::string, Tensors> ConvolutionFiles() {
  const auto factor = [](int64_t in, int64_t out) { return at::randn({in, out}); };
  return {
      {"locon",
       {{"a.lora_down.weight", at::randn({8, 48, 3, 3})}, {"a.lora_up.weight", at::randn({kRows, 8, 1, 1})}}},
      {"locon with a core",
       {{"a.lora_down.weight", at::randn({32, 48, 1, 1})},
        {"a.lora_mid.weight", at::randn({32, 32, 3, 3})},
        {"a.lora_up.weight", at::randn({kRows, 32, 1, 1})}}},
      {"loha with cores",
       {{"a.hada_t1", at::randn({8, 8, 3, 3})},
        {"a.hada_w1_a", factor(8, kRows)},
        {"a.hada_w1_b", factor(8, 48)},
        {"a.hada_t2", at::randn({8, 8, 3, 3})},
        {"a.hada_w2_a", factor(8, kRows)},
        {"a.hada_w2_b", factor(8, 48)}}},
      {"diff", {{"a.diff", at::randn({kRows, 48, 3, 3})}}}};
}

// Where a file's `a` is found.
struct Place {
  std::string name;
  std::vector<std::pair<std::string, std::vector<int64_t>>> weights;
  KeyMap map;
  std::map<std::string, Tensors> (*files)();
};

void CheckPlace(const Place& place, at::ScalarType type) {
  auto layout = std::make_shared<ComponentLayout>();
  std::vector<Weight> numbers;
  for (const auto& [name, shape] : place.weights) {
    layout->Add(name, shape);
    numbers.push_back({at::randn(shape).to(type)});
  }
  const WeightSet weights(layout, std::move(numbers));
  const PatchTarget target = {.component = "transformer",
                              .layout = layout,
                              .key_maps = {&place.map},
                              .dotted_prefixes = {""},
                              .flat_prefixes = {}};
  for (const auto& [name, file] : place.files()) {
    const auto patch = ModelPatch::FromTensors(file);
    ASSERT_TRUE(patch.ok()) << name << ": " << patch.status();
    for (const int count : {1, 2}) {
      auto specs = [&] {
        std::vector<PatchSpec> all(static_cast<size_t>(count));
        for (size_t i = 0; i < all.size(); ++i) {
          all[i].name = absl::StrCat(i);
          all[i].patch = *patch;
        }
        return all;
      };
      const ApplyOptions options = {.mode = PatchMode::kDirect};
      const auto size = LayerPatcher::OverlayBytes(
          *layout, static_cast<double>(c10::elementSize(type)), [](Slot) { return StorageForm::kPlain; },
          target, specs(), options);
      ASSERT_TRUE(size.ok()) << name << ": " << size.status();
      auto counter = std::make_shared<PeakCounter>();
      {
        const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
        const auto overlay = LayerPatcher::Apply(weights, target, specs(), options);
        ASSERT_TRUE(overlay.ok()) << name << ": " << overlay.status();
        ASSERT_NE(*overlay, nullptr) << name;
      }
      const std::string what = absl::StrCat(count, " × ", name, ", ", place.name);
      EXPECT_GE(counter->most, size->merged) << what;
      EXPECT_LE(counter->most, size->merged + size->merging) << what << " on " << type;
    }
  }
}

TEST(MergeMemoryTest, MergingTakesNoMoreThanItAsksFor) {
  at::manual_seed(5);
  const std::vector<Place> places = {
      {"alone", {{"a.weight", {kRows, kColumns}}}, KeyMap({}), LinearFiles},
      {"in parts",
       {{"q.weight", {128, kColumns}}, {"k.weight", {64, kColumns}}, {"v.weight", {64, kColumns}}},
       KeyMap({{"a", {"q", "k", "v"}}}),
       LinearFiles},
      {"halves swapped",
       {{"b.weight", {kRows, kColumns}}},
       KeyMap({{"a", {"b"}, KeyTransform::kSwapHalves}}),
       LinearFiles},
      {"a convolution", {{"a.weight", {kRows, 48, 3, 3}}}, KeyMap({}), ConvolutionFiles}};
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const Place& place : places) CheckPlace(place, type);
  }
}

}  // namespace
}  // namespace latentd
