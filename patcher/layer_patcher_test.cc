// What becomes of a tensor that patches meet: parts of a model with strengths of their own, values that are
// set, and an input that grows. Expected values are the formulas, written out on whole matrices.
#include "patcher/layer_patcher.h"

#include <algorithm>

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "cache/device.h"
#include "cache/model_cache.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "patcher/block_weights.h"
#include "patcher/weight_view.h"

namespace latentd {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

constexpr int64_t kOut = 6, kIn = 4, kRank = 2;

TEST(BlockWeights, TheLongestPathCounts) {
  const BlockWeights blocks = {{"transformer", 0.5}, {"transformer.blocks.1", 2}, {"text_encoder", 0}};
  EXPECT_EQ(BlockFactor(blocks, "transformer", "blocks.0.to_q.weight"), 0.5);
  EXPECT_EQ(BlockFactor(blocks, "transformer", "blocks.1.to_q.weight"), 2);
  EXPECT_EQ(BlockFactor(blocks, "transformer", "blocks.11.to_q.weight"), 0.5);  // cut at dots
  EXPECT_EQ(BlockFactor(blocks, "text_encoder", "blocks.1.to_q.weight"), 0);
  EXPECT_EQ(BlockFactor(blocks, "text_encoder_2", "blocks.1.to_q.weight"), 1);
}

TEST(BlockWeights, EqualTextsMeanEqualStrengths) {
  const BlockWeights blocks = {{"a", 0.5}, {"a.b", 2}, {"c", 0}};
  EXPECT_EQ(StrengthText(0.25, blocks, "a"), "0.25[a=0.5,a.b=2]");
  EXPECT_EQ(StrengthText(0.25, blocks, "c"), "0.25[c=0]");
  EXPECT_EQ(StrengthText(0.25, blocks, "d"), "0.25");
}

class LayerPatcherTest : public testing::Test {
 protected:
  LayerPatcherTest() {
    at::manual_seed(5);
    first = layout->Add("blocks.0.weight", {kOut, kIn});
    second = layout->Add("blocks.1.weight", {kOut, kIn});
    norm = layout->Add("norm.weight", {kOut});
    base = std::make_unique<WeightSet>(
        layout, std::vector<Weight>{{at::randn({kOut, kIn})}, {at::randn({kOut, kIn})}, {at::randn({kOut})}});
    target = {.component = "transformer",
              .layout = layout,
              .key_maps = {},
              .dotted_prefixes = {""},
              .growable = {"blocks.0.weight"},
              .flat_prefixes = {}};
  }

  static Tensors Pair(const std::string& name, int64_t columns = kIn) {
    return {{name + ".lora_A.weight", at::randn({kRank, columns})},
            {name + ".lora_B.weight", at::randn({kOut, kRank})}};
  }
  // up · down of a pair.
  static at::Tensor Product(const Tensors& file, const std::string& name) {
    return file.at(name + ".lora_B.weight").mm(file.at(name + ".lora_A.weight"));
  }

  static PatchSpec Spec(const Tensors& file, double weight = 1, BlockWeights blocks = {},
                        const std::string& name = "lora") {
    auto patch = ModelPatch::FromTensors(file);
    EXPECT_TRUE(patch.ok()) << patch.status();
    PatchSpec spec;
    spec.name = name;
    spec.patch = *std::move(patch);
    spec.weight = weight;
    spec.blocks = std::move(blocks);
    return spec;
  }

  std::shared_ptr<const Overlay> Apply(PatchSpec spec, PatchMode mode = PatchMode::kDirect) {
    std::vector<PatchSpec> specs;
    specs.push_back(std::move(spec));
    return Apply(std::move(specs), mode);
  }
  std::shared_ptr<const Overlay> Apply(std::vector<PatchSpec> specs, PatchMode mode) {
    auto overlay = LayerPatcher::Apply(*base, target, std::move(specs), {.mode = mode});
    EXPECT_TRUE(overlay.ok()) << overlay.status();
    return *overlay;
  }

  void ExpectWeight(const Overlay* overlay, Slot slot, const at::Tensor& expected) {
    const WeightView view(*base, overlay);
    EXPECT_TRUE(at::allclose(view(slot), expected, 1e-5, 1e-6)) << view(slot) << expected;
  }

  std::shared_ptr<ComponentLayout> layout = std::make_shared<ComponentLayout>();
  Slot first, second, norm;
  std::unique_ptr<WeightSet> base;
  PatchTarget target;
};

TEST_F(LayerPatcherTest, BlocksHaveStrengthsOfTheirOwn) {
  Tensors file = Pair("blocks.0");
  file.merge(Pair("blocks.1"));
  for (const PatchMode mode : {PatchMode::kDirect, PatchMode::kSidecar}) {
    const auto overlay = Apply(Spec(file, 0.5, {{"transformer", 3}, {"transformer.blocks.1", -1}}), mode);
    const WeightView view(*base, overlay.get());
    const at::Tensor x = at::randn({3, kIn});
    EXPECT_TRUE(at::allclose(view.Linear(first, {}, x),
                             x.mm(((*base)[first].data + 1.5 * Product(file, "blocks.0")).t()), 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(view.Linear(second, {}, x),
                             x.mm(((*base)[second].data - 0.5 * Product(file, "blocks.1")).t()), 1e-5, 1e-5));
  }
}

TEST_F(LayerPatcherTest, ABlockOfStrengthZeroIsNotTouched) {
  Tensors file = Pair("blocks.0");
  file.merge(Pair("blocks.1"));
  const auto overlay = Apply(Spec(file, 1, {{"transformer.blocks.0", 0}}));
  EXPECT_EQ(overlay->merged(first), nullptr);
  EXPECT_NE(overlay->merged(second), nullptr);
  EXPECT_EQ(Apply(Spec(file, 1, {{"transformer", 0}})), nullptr);
}

TEST_F(LayerPatcherTest, APathBelowWhichNothingChangesIsRefused) {
  const auto patch = ModelPatch::FromTensors(Pair("blocks.0"));
  ASSERT_TRUE(patch.ok());
  EXPECT_TRUE(LayerPatcher::Match(**patch, "lora", 1, {target}, {{"transformer.blocks.0", 2}}).ok());
  for (const char* path : {"transformer.blocks.1", "transformer.bloc", "unet", "blocks.0"}) {
    const auto report = LayerPatcher::Match(**patch, "lora", 1, {target}, {{path, 2}});
    EXPECT_EQ(report.status().code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_THAT(std::string(report.status().message()), testing::HasSubstr(path));
  }
}

// As two experts have them.
TEST_F(LayerPatcherTest, ALayerOfTwoComponentsIsForBothUnlessThePatchIsLimited) {
  PatchTarget other = target;
  other.component = "transformer_2";
  const PatchSpec spec = Spec(Pair("blocks.0"));
  const auto match = [&](const std::vector<std::string>& only) {
    return LayerPatcher::Match(*spec.patch, "lora", 1, {target, other}, {}, only);
  };
  const std::map<std::string, int64_t> both = {{"transformer", 1}, {"transformer_2", 1}};
  const std::map<std::string, int64_t> second_alone = {{"transformer_2", 1}};
  EXPECT_EQ(match({})->matched, both);
  EXPECT_EQ(match({"transformer", "transformer_2"})->matched, both);
  const auto limited = match({"transformer_2"});
  ASSERT_TRUE(limited.ok()) << limited.status();
  EXPECT_EQ(limited->matched, second_alone);
  EXPECT_EQ(limited->unmatched_count, 0);
  for (const auto& [component, applies] : {std::pair(target, false), {other, true}}) {
    PatchSpec held = Spec(Pair("blocks.0"));
    held.match = limited->match;
    std::vector<PatchSpec> specs;
    specs.push_back(std::move(held));
    const auto overlay = LayerPatcher::Apply(*base, component, std::move(specs), {});
    ASSERT_TRUE(overlay.ok()) << overlay.status();
    EXPECT_EQ(*overlay != nullptr, applies) << component.component;
  }
  for (const char* wrong : {"vae", ""}) {
    EXPECT_EQ(GetErrorDetails(match({wrong}).status())["field"], "loras.only") << wrong;
  }
}

TEST_F(LayerPatcherTest, AValueThatIsSetIsNotScaled) {
  const at::Tensor value = at::randn({kOut}), diff = at::randn({kOut});
  const Tensors set = {{"norm.scale", value}}, add = {{"norm.w_norm", diff}};
  ExpectWeight(Apply(Spec(set, 0.25)).get(), norm, value);
  EXPECT_EQ(Apply(Spec(set, 0)), nullptr);
  // What is added goes on top, whatever the order of names.
  for (const char* name : {"a", "z"}) {
    std::vector<PatchSpec> specs;
    specs.push_back(Spec(set, 1, {}, "m"));
    specs.push_back(Spec(add, 0.5, {}, name));
    ExpectWeight(Apply(std::move(specs), PatchMode::kAuto).get(), norm, value + 0.5 * diff);
  }
  std::vector<PatchSpec> both;
  both.push_back(Spec({{"norm.scale", diff}}, 1, {}, "b"));
  both.push_back(Spec(set, 1, {}, "a"));
  ExpectWeight(Apply(std::move(both), PatchMode::kAuto).get(), norm, diff);
}

TEST_F(LayerPatcherTest, AnInputGrowsByWhatThePatchBrings) {
  const Tensors wide = Pair("blocks.0", 2 * kIn), plain = Pair("blocks.0");
  at::Tensor expected = 0.5 * Product(wide, "blocks.0");
  expected.narrow(1, 0, kIn).add_((*base)[first].data).add_(Product(plain, "blocks.0"), 2);
  for (const PatchMode mode : {PatchMode::kAuto, PatchMode::kDirect, PatchMode::kSidecar}) {
    std::vector<PatchSpec> specs;
    specs.push_back(Spec(wide, 0.5, {}, "wide"));
    specs.push_back(Spec(plain, 2, {}, "plain"));
    const auto overlay = Apply(std::move(specs), mode);
    ExpectWeight(overlay.get(), first, expected);
    EXPECT_EQ(overlay->sidecar(first), nullptr);
  }
  const auto report = LayerPatcher::Match(*Spec(wide).patch, "wide", 1, {target});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->grown, (std::map<std::string, int64_t>{{"transformer.blocks.0.weight", 2 * kIn}}));
}

// Sizes that no block of the kernel divides, ranks that add up, and both types that it knows, against
// products of whole matrices; in fp16 by another way.
TEST_F(LayerPatcherTest, MergedInOnePassIsTheSumRoundedOnce) {
  for (const auto& [rows, columns] : {std::pair{1, 1}, {3, 255}, {4, 256}, {7, 519}, {64, 1030}}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      auto one = std::make_shared<ComponentLayout>();
      const Slot slot = one->Add("a.weight", {rows, columns});
      const at::Tensor weight = at::randn({rows, columns}).to(type);
      const WeightSet set(one, {{weight}});
      const PatchTarget where = {.component = "transformer",
                                 .layout = one,
                                 .key_maps = {},
                                 .dotted_prefixes = {""},
                                 .flat_prefixes = {}};
      at::Tensor expected = weight.to(at::kDouble);
      std::vector<PatchSpec> specs;
      for (const int64_t rank : {1, 5}) {
        const Tensors file = {{"a.lora_A.weight", at::randn({rank, columns})},
                              {"a.lora_B.weight", at::randn({rows, rank})}};
        expected +=
            0.5 * file.at("a.lora_B.weight").to(at::kDouble).mm(file.at("a.lora_A.weight").to(at::kDouble));
        specs.push_back(Spec(file, 0.5, {}, rank == 1 ? "a" : "b"));
      }
      const auto overlay = LayerPatcher::Apply(set, where, std::move(specs), {.mode = PatchMode::kDirect});
      ASSERT_TRUE(overlay.ok()) << overlay.status();
      const at::Tensor got = (*overlay)->merged(slot)->to(at::kDouble);
      EXPECT_EQ((*overlay)->merged(slot)->scalar_type(), type);
      const at::Tensor rounded = expected.to(at::kFloat).to(type).to(at::kDouble);
      if (type == at::kFloat) {
        EXPECT_TRUE(at::allclose(got, expected, 1e-5, 1e-5));
      } else {  // the fp32 sum may lie on the other side of a tie
        EXPECT_LE(got.ne(rounded).sum().item<int64_t>(), 1 + got.numel() / 500);
        EXPECT_TRUE(at::allclose(got, rounded, 1e-2, 1e-2));
      }
    }
  }
}

// 8-bit floats would round a difference away: what can be computed beside them is, whatever was asked for.
TEST_F(LayerPatcherTest, EightBitFloatsAreNotMergedInto) {
  const double scale = 0.25;
  const at::Tensor numbers = at::randn({kOut, kIn}).to(at::kFloat8_e4m3fn);
  base = std::make_unique<WeightSet>(layout, std::vector<Weight>{{numbers, StorageForm::kFloat8, scale},
                                                                 {numbers, StorageForm::kFloat8, scale},
                                                                 {at::ones({kOut})}});
  const at::Tensor value = numbers.to(at::kFloat) * scale, x = at::randn({3, kIn});
  const Tensors pair = Pair("blocks.0"), full = {{"blocks.1.diff", at::randn({kOut, kIn})}};
  for (const PatchMode mode : {PatchMode::kDirect, PatchMode::kAuto, PatchMode::kSidecar}) {
    Tensors both = pair;
    both.insert(full.begin(), full.end());
    const auto overlay = Apply(Spec(both, 0.5), mode);
    EXPECT_NE(overlay->sidecar(first), nullptr);
    EXPECT_EQ(overlay->merged(first), nullptr);
    ASSERT_NE(overlay->merged(second), nullptr);
    EXPECT_EQ(overlay->merged(second)->scalar_type(), at::kBFloat16);
    const WeightView view(*base, overlay.get());
    EXPECT_TRUE(at::allclose(view.Linear(first, {}, x), x.mm((value + 0.5 * Product(pair, "blocks.0")).t()),
                             1e-5, 1e-5));
    const at::Tensor merged = (value + 0.5 * full.at("blocks.1.diff")).to(at::kBFloat16);
    EXPECT_TRUE(at::equal(view(second), merged.to(at::kFloat)));
  }
  const WeightView view(*base, nullptr);
  EXPECT_TRUE(at::equal(view(first), value));
  EXPECT_TRUE(at::equal(view.Rows(first, at::tensor({4, 0, 4}, at::kLong)),
                        value.index_select(0, at::tensor({4, 0, 4}, at::kLong))));
}

// Where some weights are in 8-bit floats and some are not, the modes merge different tensors: their records
// are not taken for each other, in whatever order they are asked for.
TEST_F(LayerPatcherTest, ModesOnMixedStorageDoNotTakeEachOthersRecords) {
  base = std::make_unique<WeightSet>(
      layout, std::vector<Weight>{{at::randn({kOut, kIn}).to(at::kFloat8_e4m3fn), StorageForm::kFloat8, 1},
                                  {at::randn({kOut, kIn})},
                                  {at::randn({kOut})}});
  Tensors file = Pair("blocks.0");
  file.merge(Pair("blocks.1"));
  file["norm.diff"] = at::randn({kOut});  // merged in all modes
  const auto patch = ModelPatch::FromTensors(file);
  ASSERT_TRUE(patch.ok()) << patch.status();
  const Loader loader{.kind = "lora", .estimated_bytes = (*patch)->bytes(), .load = [&](const LoadContext&) {
                        return absl::StatusOr<std::shared_ptr<const Resource>>(*patch);
                      }};
  const at::Tensor x = at::randn({3, kIn});
  const at::Tensor expected[] = {x.mm(((*base)[first].To(at::kFloat) + Product(file, "blocks.0")).t()),
                                 x.mm(((*base)[second].data + Product(file, "blocks.1")).t())};
  std::vector<PatchMode> order = {PatchMode::kAuto, PatchMode::kDirect, PatchMode::kSidecar};
  do {
    RamBudget ram(int64_t{1} << 20);
    CpuDevice cpu(&ram);
    ModelCache cache(&ram, {&cpu});
    for (const PatchMode mode : order) {
      std::vector<PatchSpec> specs(1);
      specs[0].name = "lora";
      specs[0].handle = *cache.Lock({"lora@1", ""}, loader, {.owner = "test"});
      specs[0].patch = *patch;
      const auto overlay = LayerPatcher::Apply(*base, target, std::move(specs),
                                               {.mode = mode,
                                                .device = &cpu,
                                                .cache = &cache,
                                                .component = {"model@1", "transformer"},
                                                .owner = "test"});
      ASSERT_TRUE(overlay.ok()) << overlay.status();
      const WeightView view(*base, overlay->get());
      EXPECT_TRUE(at::allclose(view.Linear(first, {}, x), expected[0], 1e-5, 1e-5));
      EXPECT_TRUE(at::allclose(view.Linear(second, {}, x), expected[1], 1e-5, 1e-5))
          << static_cast<int>(mode);
      EXPECT_TRUE(at::allclose(view(norm), (*base)[norm].data + file.at("norm.diff")));
    }
    int64_t records = 0;
    for (const RecordStats& record : cache.Stats().records) records += record.kind == "merged" ? 1 : 0;
    EXPECT_EQ(records, 2);  // auto and sidecar merge the same
  } while (std::next_permutation(order.begin(), order.end()));
}

// What merging takes for a while is promised, too: a budget that holds the result alone is refused.
TEST_F(LayerPatcherTest, MergingAsksForItsScratchMemory) {
  const Tensors difference = {{"blocks.0.diff", at::randn({kOut, kIn})}};
  const int64_t merged = kOut * kIn * static_cast<int64_t>(sizeof(float));
  for (const auto& [file, scratch] :
       {std::pair{difference, 4 * merged}, {Pair("blocks.0"), kRank * (2 * kOut + 3 * kIn) * int64_t{4}}}) {
    for (const int64_t missing : {1, 0}) {
      RamBudget ram(merged + scratch - missing);
      CpuDevice device(&ram);
      std::vector<PatchSpec> specs;
      specs.push_back(Spec(file));
      const auto overlay = LayerPatcher::Apply(
          *base, target, std::move(specs), {.mode = PatchMode::kDirect, .device = &device, .owner = "test"});
      EXPECT_EQ(overlay.ok(), missing == 0) << overlay.status();
      if (!overlay.ok()) continue;
      EXPECT_EQ((*overlay)->bytes(), merged);
    }
  }
}

TEST_F(LayerPatcherTest, OnlyWhatMayGrowGrows) {
  for (const Tensors& file : {Pair("blocks.1", 2 * kIn),     // another weight
                              Pair("blocks.0", kIn - 1),     // narrower
                              Pair("blocks.0", 1000 * kIn),  // no input layer has that many
                              Tensors{{"blocks.0.diff", at::randn({kOut, 2 * kIn})}}}) {
    const auto patch = ModelPatch::FromTensors(file);
    ASSERT_TRUE(patch.ok()) << patch.status();
    EXPECT_EQ(ErrorReason(LayerPatcher::Match(**patch, "lora", 1, {target}).status()), "LORA_MISMATCH");
  }
}

}  // namespace
}  // namespace latentd
