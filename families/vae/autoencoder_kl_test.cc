// Slices of the autoencoder. Its numbers are compared in tests/goldens.
#include "families/vae/autoencoder_kl.h"

#include "ATen/ATen.h"
#include "gtest/gtest.h"
#include "patcher/weight_view.h"

namespace latentd {
namespace {

class AutoencoderPass : public testing::TestWithParam<int64_t> {  // by tile
 protected:
  static AutoencoderKlConfig Config() {
    AutoencoderKlConfig config;
    config.channels = {32, 64};
    return config;
  }
  static WeightSet RandomWeights(const std::shared_ptr<const ComponentLayout>& layout) {
    std::vector<Weight> weights;
    for (const TensorDecl& tensor : layout->tensors()) weights.push_back({at::randn(tensor.shape) * 0.2});
    return WeightSet(layout, std::move(weights));
  }

  const c10::InferenceMode inference_;
  const AutoencoderKl vae_{Config()};
  const WeightSet weights_ = RandomWeights(vae_.layout());
  const WeightView view_{weights_, nullptr};
};

TEST_P(AutoencoderPass, MakesTheSameOfAnySlices) {
  const at::Tensor latents = at::randn({1, 4, 20, 12}), picture = at::randn({1, 3, 40, 24});
  const auto run = [&](AutoencoderKl::Pass pass, double flops) {
    int64_t slices = 1;
    for (; !pass.Slice(view_, flops); ++slices) {
    }
    return std::pair(pass.Take(), slices);
  };
  const auto [decoded, once] = run(vae_.BeginDecode(latents, GetParam()), 1e12);
  const auto [again, many] = run(vae_.BeginDecode(latents, GetParam()), 0);
  const auto [third, some] = run(vae_.BeginDecode(latents, GetParam()), 1e8);
  EXPECT_TRUE(at::equal(decoded, again));
  EXPECT_TRUE(at::equal(decoded, third));
  EXPECT_TRUE(at::equal(decoded, vae_.Decode(view_, latents, GetParam())));
  // In, the middle's three, two levels of two, one resampling, out.
  constexpr int64_t kStages = 10;
  EXPECT_EQ(many, kStages * once);
  EXPECT_GE(some, once);
  EXPECT_LT(some, many);

  const auto [moments, encoded_once] = run(vae_.BeginEncode(picture, GetParam()), 1e12);
  const auto [moments_again, encoded_many] = run(vae_.BeginEncode(picture, GetParam()), 0);
  EXPECT_TRUE(at::equal(moments, moments_again));
  EXPECT_GT(encoded_many, encoded_once);
}

INSTANTIATE_TEST_SUITE_P(Tiles, AutoencoderPass, testing::Values(0, 16));

}  // namespace
}  // namespace latentd
