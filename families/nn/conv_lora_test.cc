// What is computed beside a convolution is the convolution with the patched kernel: against ATen's, in double
// precision, with the difference written out.
#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "families/nn/layers.h"
#include "gtest/gtest.h"
#include "patcher/layer_patcher.h"
#include "patcher/weight_view.h"

namespace latentd {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

struct Case {
  int64_t in, out, side, stride, height, width;
};

class ConvLoraTest : public testing::TestWithParam<Case> {
 protected:
  ConvLoraTest() {
    at::manual_seed(11);
    const auto [in, out, side, stride, height, width] = GetParam();
    conv = Conv2d::Describe(*layout, "conv", in, out, side, stride, side / 2);
    kernel =
        at::randn({out, in, side, side}) / static_cast<double>(side) / std::sqrt(static_cast<double>(in));
    bias = at::randn({out});
    x = at::randn({2, in, height, width});
  }

  PatchTarget Target() const { return {"unet", layout, {}, {""}, {}, {}}; }

  // A file with a LoRA of the convolution.
  Tensors Lora(int64_t rank) const {
    const Case& c = GetParam();
    return {{"conv.lora_down.weight", at::randn({rank, c.in, c.side, c.side}) / std::sqrt(9.0 * c.in)},
            {"conv.lora_up.weight", at::randn({c.out, rank, 1, 1})}};
  }
  // The same with a core.
  Tensors Tucker(int64_t rank) const {
    const Case& c = GetParam();
    return {{"conv.lora_down.weight", at::randn({rank, c.in, 1, 1}) / std::sqrt(static_cast<double>(c.in))},
            {"conv.lora_mid.weight", at::randn({rank, rank, c.side, c.side}) / std::sqrt(9.0 * rank)},
            {"conv.lora_up.weight", at::randn({c.out, rank, 1, 1})}};
  }
  static at::Tensor Delta(const Tensors& file) {
    const at::Tensor up = file.at("conv.lora_up.weight").to(at::kDouble).flatten(1);
    const at::Tensor down = file.at("conv.lora_down.weight").to(at::kDouble);
    if (file.count("conv.lora_mid.weight") == 0) return at::einsum("or,rikl->oikl", {up, down});
    return at::einsum("om,mnkl,ni->oikl",
                      {up, file.at("conv.lora_mid.weight").to(at::kDouble), down.flatten(1)});
  }

  std::shared_ptr<const Overlay> Apply(const WeightSet& weights, const std::vector<Tensors>& files,
                                       const std::vector<double>& strengths, PatchMode mode) {
    std::vector<PatchSpec> specs;
    for (size_t i = 0; i < files.size(); ++i) {
      PatchSpec spec;
      spec.name = absl::StrCat("lora", i);
      spec.patch = *ModelPatch::FromTensors(files[i]);
      spec.weight = strengths[i];
      specs.push_back(std::move(spec));
    }
    reports.assign(files.size(), {});
    auto overlay = LayerPatcher::Apply(weights, Target(), std::move(specs), {.mode = mode}, &reports);
    EXPECT_TRUE(overlay.ok()) << overlay.status();
    return *overlay;
  }

  void ExpectSum(const std::vector<Tensors>& files, const std::vector<double>& strengths) {
    const Case& c = GetParam();
    at::Tensor patched = kernel.to(at::kDouble);
    for (size_t i = 0; i < files.size(); ++i) patched = patched + Delta(files[i]) * strengths[i];
    const at::Tensor expected = at::conv2d(x.to(at::kDouble), patched, bias.to(at::kDouble),
                                           {c.stride, c.stride}, {c.side / 2, c.side / 2});
    const WeightSet weights(layout, {{kernel}, {bias}});
    for (const PatchMode mode : {PatchMode::kAuto, PatchMode::kSidecar, PatchMode::kDirect}) {
      const auto overlay = Apply(weights, files, strengths, mode);
      const bool beside = mode != PatchMode::kDirect;
      EXPECT_EQ(overlay->sidecar(conv.weight) != nullptr, beside);
      EXPECT_EQ(overlay->merged(conv.weight) != nullptr, !beside);
      for (const PatchReport& report : reports) EXPECT_EQ(report.sidecar_tensors, beside ? 1 : 0);
      const WeightView view(weights, overlay.get());
      for (const at::MemoryFormat format : {at::MemoryFormat::ChannelsLast, at::MemoryFormat::Contiguous}) {
        const at::Tensor y = conv(view, x.contiguous(format));
        const at::Tensor error = (y.to(at::kDouble) - expected).abs().max() / expected.abs().max();
        EXPECT_LE(error.item<double>(), 3e-5) << static_cast<int>(mode) << static_cast<int>(format);
      }
    }
  }

  std::shared_ptr<ComponentLayout> layout = std::make_shared<ComponentLayout>();
  Conv2d conv;
  at::Tensor kernel, bias, x;
  std::vector<PatchReport> reports;
};

TEST_P(ConvLoraTest, OneIsTheConvolutionWithThePatchedKernel) {
  ExpectSum({Lora(4)}, {0.7});
  ExpectSum({Lora(16)}, {-1.5});
}

TEST_P(ConvLoraTest, ACoreIsPartOfWhatComesBeforeUp) { ExpectSum({Tucker(5)}, {0.7}); }

TEST_P(ConvLoraTest, SeveralAreOnePair) { ExpectSum({Lora(4), Tucker(3), Lora(9)}, {0.5, 1, -0.25}); }

TEST_P(ConvLoraTest, AnotherStrengthChangesNothingButTheSmallFactor) {
  const WeightSet weights(layout, {{kernel}, {bias}});
  const Tensors file = Lora(4);
  const auto one = Apply(weights, {file}, {1}, PatchMode::kSidecar),
             half = Apply(weights, {file}, {0.5}, PatchMode::kSidecar);
  EXPECT_TRUE(at::equal(one->sidecar(conv.weight)->down, half->sidecar(conv.weight)->down));
  EXPECT_TRUE(at::equal(one->sidecar(conv.weight)->up * 0.5, half->sidecar(conv.weight)->up));
}

// A network of 8-bit floats has no rounding that could take the patch away.
TEST_P(ConvLoraTest, EightBitFloatsKeepTheirs) {
  const Case& c = GetParam();
  const at::Tensor stored = kernel.to(at::kFloat8_e4m3fn);
  const WeightSet weights(layout, {{.data = stored, .form = StorageForm::kFloat8, .scale = 1}, {bias}});
  const Tensors file = Lora(4);
  const at::Tensor expected =
      at::conv2d(x.to(at::kDouble), stored.to(at::kDouble) + Delta(file) * 0.01, bias.to(at::kDouble),
                 {c.stride, c.stride}, {c.side / 2, c.side / 2});
  const auto overlay = Apply(weights, {file}, {0.01}, PatchMode::kDirect);
  ASSERT_NE(overlay->sidecar(conv.weight), nullptr);
  const at::Tensor y = conv(WeightView(weights, overlay.get()), x.contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_LE(((y.to(at::kDouble) - expected).abs().max() / expected.abs().max()).item<double>(), 3e-5);
}

// Ways that convolutions are taken: one product, Winograd's, windows, and the library's, with and without a
// stride.
INSTANTIATE_TEST_SUITE_P(Shapes, ConvLoraTest,
                         testing::Values(Case{32, 48, 1, 1, 6, 7}, Case{32, 48, 3, 1, 24, 20},
                                         Case{256, 32, 3, 1, 4, 4}, Case{256, 32, 3, 2, 8, 8},
                                         Case{12, 20, 3, 1, 9, 9}, Case{12, 20, 3, 2, 9, 9}),
                         [](const auto& info) {
                           return absl::StrCat(info.param.in, "to", info.param.out, "by", info.param.side,
                                               "step", info.param.stride, "of", info.param.height);
                         });

}  // namespace
}  // namespace latentd
