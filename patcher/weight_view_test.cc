#include "patcher/weight_view.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "patcher/layer_patcher.h"

namespace latentd {
namespace {

class WeightViewTest : public testing::Test {
 protected:
  WeightViewTest() {
    at::manual_seed(1);
    weight = layout->Add("w.weight", {24, 40});
    bias = layout->Add("w.bias", {24});
    w = at::randn({24, 40});
    b = at::randn({24});
    x = at::randn({7, 40});
  }
  WeightSet Set(const at::Tensor& w_, const at::Tensor& b_) const { return WeightSet(layout, {{w_}, {b_}}); }

  // The same numbers at an address that is no multiple of 16.
  static at::Tensor Misaligned(const at::Tensor& t) {
    at::Tensor room = at::empty({t.numel() + 8}, t.options());
    at::Tensor shifted = room.narrow(0, 1, t.numel()).view(t.sizes());
    shifted.copy_(t);
    EXPECT_FALSE(IsComputeAligned(shifted));
    return shifted;
  }

  std::shared_ptr<ComponentLayout> layout = std::make_shared<ComponentLayout>();
  Slot weight, bias;
  at::Tensor w, b, x;
};

TEST_F(WeightViewTest, ALinearLayerIsTheFormula) {
  const WeightSet set = Set(w, b);
  const WeightView view(set, nullptr);
  const at::Tensor expected = x.to(at::kDouble).mm(w.to(at::kDouble).t()) + b.to(at::kDouble);
  EXPECT_TRUE(at::allclose(view.Linear(weight, bias, x).to(at::kDouble), expected, 1e-5, 1e-5));
}

TEST_F(WeightViewTest, WhereAWeightLiesInMemoryChangesNoBit) {
  const WeightSet set = Set(w, b), moved = Set(Misaligned(w), Misaligned(b));
  const WeightView view(set, nullptr), moved_view(moved, nullptr);
  for (int rows : {1, 7}) {
    const at::Tensor some = x.narrow(0, 0, rows);
    EXPECT_TRUE(at::equal(view.Linear(weight, bias, some), moved_view.Linear(weight, bias, some)));
  }
  EXPECT_TRUE(at::equal(view(weight), moved_view(weight)));
  EXPECT_TRUE(IsComputeAligned(moved_view(weight)));
  EXPECT_TRUE(IsComputeAligned(moved_view(bias)));
}

TEST_F(WeightViewTest, StoredInBf16MeansComputedWithTheUpcastWeight) {
  const at::Tensor w16 = w.to(at::kBFloat16), b16 = b.to(at::kBFloat16);
  const WeightSet stored = Set(w16, b16), upcast = Set(w16.to(at::kFloat), b16.to(at::kFloat));
  const WeightView view(stored, nullptr), reference(upcast, nullptr);
  EXPECT_TRUE(at::equal(view.Linear(weight, bias, x), reference.Linear(weight, bias, x)));
  EXPECT_EQ(view.Stored(weight).scalar_type(), at::kBFloat16);
}

TEST_F(WeightViewTest, AMissingBiasIsLeftOut) {
  const WeightSet set = Set(w, b);
  const WeightView view(set, nullptr);
  EXPECT_TRUE(at::allclose(view.Linear(weight, {}, x) + b, view.Linear(weight, bias, x), 1e-5, 1e-6));
}

// A LoRA of rank 2 for the layer "w", all ones.
std::shared_ptr<const ModelPatch> OnesLora() {
  const std::string path = absl::StrCat(testing::TempDir(), "/ones.", getpid(), ".safetensors");
  const std::string header = R"({"w.lora_A.weight":{"dtype":"F32","shape":[2,40],"data_offsets":[0,320]},)"
                             R"("w.lora_B.weight":{"dtype":"F32","shape":[24,2],"data_offsets":[320,512]}})";
  const uint64_t size = header.size();
  const std::vector<float> ones(128, 1.0f);
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&size), sizeof(size)) << header;
  out.write(reinterpret_cast<const char*>(ones.data()), 512);
  out.close();
  auto files = WeightFiles::Open(path);
  EXPECT_TRUE(files.ok()) << files.status();
  auto patch = ModelPatch::Load(*files, LoadContext([] { return false; }, [](int64_t, int64_t) {}));
  EXPECT_TRUE(patch.ok()) << patch.status();
  std::remove(path.c_str());
  return *patch;
}

// What a device's copy of a patch is to that device: the same layers, there.
void MoveTo(at::Device device, const ModelPatch& patch) {
  for (const PatchLayer& layer : patch.layers()) {
    const_cast<PatchLayer&>(layer).ForEachTensor([&](at::Tensor& tensor) { tensor = tensor.to(device); });
  }
}

TEST_F(WeightViewTest, ItIsWhereItsWeightsAre) {
  const WeightSet here = Set(w, b), there = Set(w.to(at::kMeta), b.to(at::kMeta)),
                  none = Set({}, b.to(at::kMeta));
  EXPECT_EQ(WeightView(here, nullptr).device(), at::kCPU);
  EXPECT_EQ(WeightView(there, nullptr).device(), at::kMeta);
  EXPECT_EQ(WeightView(none, nullptr).device(), at::kMeta);
}

// Storage types take different ways to the compute type; meta computes shapes and refuses other devices.
TEST_F(WeightViewTest, ALinearLayerStaysOnTheDeviceOfItsWeights) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const auto options = at::TensorOptions(type).device(at::kMeta);
    const WeightSet set = Set(at::empty({24, 40}, options), at::empty({24}, options));
    const WeightView view(set, nullptr);
    const at::Tensor y = view.Linear(weight, bias, at::empty({2, 7, 40}, at::kMeta));
    EXPECT_EQ(y.device(), at::kMeta);
    EXPECT_EQ(y.sizes(), at::IntArrayRef({2, 7, 24}));
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    EXPECT_EQ(view(weight).device(), at::kMeta);
  }
}

TEST_F(WeightViewTest, WhatIsComputedBesideALayerIsWhereThePatchIs) {
  const PatchTarget target = {
      .component = "c", .layout = layout, .key_maps = {}, .dotted_prefixes = {""}, .flat_prefixes = {}};
  for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kMeta)}) {
    std::vector<PatchSpec> specs(1);
    specs[0].name = "ones";
    specs[0].patch = OnesLora();
    specs[0].weight = 0.5;
    MoveTo(device, *specs[0].patch);
    // Host weights for what Apply asks of them; the device's for the view.
    const WeightSet host = Set(w, b), there = Set(w.to(device), b.to(device));
    const auto overlay = LayerPatcher::Apply(host, target, std::move(specs), {.mode = PatchMode::kSidecar});
    ASSERT_TRUE(overlay.ok()) << overlay.status();
    const Sidecar* sidecar = (*overlay)->sidecar(weight);
    ASSERT_NE(sidecar, nullptr);
    EXPECT_EQ(sidecar->down.device(), device);
    EXPECT_EQ(sidecar->up.device(), device);

    const WeightView view(there, overlay->get()), plain(there, nullptr);
    const at::Tensor y = view.Linear(weight, bias, x.to(device));
    EXPECT_EQ(y.device(), device);
    EXPECT_EQ(y.sizes(), at::IntArrayRef({7, 24}));
    if (!device.is_cpu()) continue;
    // 0.5 · up · down · x = 0.5 · 2 · Σx.
    EXPECT_TRUE(at::allclose(y, plain.Linear(weight, bias, x) + x.sum(1, true), 1e-4, 1e-4));
  }
}

}  // namespace
}  // namespace latentd
