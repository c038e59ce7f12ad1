// Formulas for convolutions, number by number; those for linear layers are in tests/goldens.
#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "patcher/layers/patch_layer.h"

namespace latentd {
namespace {

constexpr int64_t kOut = 6, kIn = 4, kSide = 3, kRank = 2;
const std::vector<int64_t> kShape = {kOut, kIn, kSide, kSide};

class LayersTest : public testing::Test {
 protected:
  LayersTest() { at::manual_seed(3); }

  // Compares a layer's difference, as a kernel, with a formula for each of its numbers.
  template <class Formula>
  void Check(const LayerMath& math, const at::Tensor& base, Formula formula) {
    PatchLayer layer;
    layer.math = math;
    ASSERT_TRUE(layer.Check().ok()) << layer.Check();
    const Extent extent = layer.extent();
    EXPECT_TRUE(extent.rows == -1 || extent.rows == kOut);
    EXPECT_TRUE(extent.columns == -1 || extent.columns == kIn * kSide * kSide);
    EXPECT_TRUE(extent.inputs == -1 || extent.inputs == kIn);
    const at::Tensor delta = layer.Delta(kShape, base).reshape(kShape);
    for (int64_t o = 0; o < kOut; ++o) {
      for (int64_t i = 0; i < kIn; ++i) {
        for (int64_t y = 0; y < kSide; ++y) {
          for (int64_t x = 0; x < kSide; ++x) {
            ASSERT_NEAR(delta[o][i][y][x].item<float>(), formula(o, i, y, x), 1e-4) << o << i << y << x;
          }
        }
      }
    }
  }

  static float At(const at::Tensor& t, std::initializer_list<int64_t> index) {
    at::Tensor value = t;
    for (int64_t i : index) value = value[i];
    return value.reshape({-1})[0].item<float>();
  }
};

TEST_F(LayersTest, AConvolutionsDownHasItsKernel) {
  const LowRank layer{at::randn({kRank, kIn, kSide, kSide}), at::randn({kOut, kRank, 1, 1}), {}, 0.5};
  Check(layer, {}, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    float sum = 0;
    for (int64_t r = 0; r < kRank; ++r) sum += At(layer.up, {o, r}) * At(layer.down, {r, i, y, x});
    return sum * 0.5F;
  });
}

TEST_F(LayersTest, ATuckerCoreHasTheKernel) {
  const LowRank layer{at::randn({kRank, kIn, 1, 1}), at::randn({kOut, kRank, 1, 1}),
                      at::randn({kRank, kRank, kSide, kSide}), 2};
  Check(layer, {}, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    float sum = 0;
    for (int64_t m = 0; m < kRank; ++m) {
      for (int64_t n = 0; n < kRank; ++n)
        sum += At(layer.up, {o, m}) * At(layer.mid, {m, n, y, x}) * At(layer.down, {n, i});
    }
    return sum * 2;
  });
}

TEST_F(LayersTest, WhatALowRankLayerLeavesOutIsAddedAtItsPlaces) {
  SparseLowRank layer;
  layer.low_rank = {at::randn({kRank, kIn, kSide, kSide}), at::randn({kOut, kRank, 1, 1}), {}, 0.5};
  layer.rows = kOut;
  layer.columns = kIn * kSide * kSide;
  layer.places = at::tensor({0, 5, 5, 35, 0, 13}, at::kShort).reshape({2, 3});
  layer.values = at::tensor({3.0F, -2.0F, 7.0F}).to(at::kHalf);
  Check(layer, {}, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    float sum = 0;
    for (int64_t r = 0; r < kRank; ++r)
      sum += At(layer.low_rank.up, {o, r}) * At(layer.low_rank.down, {r, i, y, x});
    const int64_t column = (i * kSide + y) * kSide + x;
    if (o == 0 && column == 35) sum += 3;
    if (o == 5 && column == 0) sum -= 2;
    if (o == 5 && column == 13) sum += 7;
    return sum * 0.5F;
  });
}

TEST_F(LayersTest, LohaWithCores) {
  const Hadamard layer{at::randn({kRank, kOut}),
                       at::randn({kRank, kOut}),
                       at::randn({kRank, kIn}),
                       at::randn({kRank, kIn}),
                       at::randn({kRank, kRank, kSide, kSide}),
                       at::randn({kRank, kRank, kSide, kSide}),
                       0.5};
  auto factor = [](const at::Tensor& core, const at::Tensor& a, const at::Tensor& b, int64_t o, int64_t i,
                   int64_t y, int64_t x) {
    float sum = 0;
    for (int64_t m = 0; m < kRank; ++m) {
      for (int64_t n = 0; n < kRank; ++n) sum += At(core, {m, n, y, x}) * At(a, {m, o}) * At(b, {n, i});
    }
    return sum;
  };
  Check(layer, {}, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    return 0.5F * factor(layer.t1, layer.w1_a, layer.w1_b, o, i, y, x) *
           factor(layer.t2, layer.w2_a, layer.w2_b, o, i, y, x);
  });
}

TEST_F(LayersTest, LokrFactorsOfAKernel) {
  Kronecker full, product, tucker;
  full.w1 = product.w1 = tucker.w1 = at::randn({3, 2});
  full.w2 = at::randn({2, 2, kSide, kSide});
  product.w2_a = at::randn({2, kRank});
  product.w2_b = at::randn({kRank, 2 * kSide * kSide});
  tucker.w2_a = at::randn({kRank, 2});
  tucker.w2_b = at::randn({kRank, 2});
  tucker.t2 = at::randn({kRank, kRank, kSide, kSide});
  Check(full, {}, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    return At(full.w1, {o / 2, i / 2}) * At(full.w2, {o % 2, i % 2, y, x});
  });
  Check(product, {}, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    float sum = 0;
    for (int64_t r = 0; r < kRank; ++r) {
      sum += At(product.w2_a, {o % 2, r}) * At(product.w2_b, {r, (i % 2) * kSide * kSide + y * kSide + x});
    }
    return At(product.w1, {o / 2, i / 2}) * sum;
  });
  Check(tucker, {}, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    float sum = 0;
    for (int64_t m = 0; m < kRank; ++m) {
      for (int64_t n = 0; n < kRank; ++n) {
        sum += At(tucker.t2, {m, n, y, x}) * At(tucker.w2_a, {m, o % 2}) * At(tucker.w2_b, {n, i % 2});
      }
    }
    return At(tucker.w1, {o / 2, i / 2}) * sum;
  });
}

TEST_F(LayersTest, Ia3ScalesAKernelsInputsOrOutputs) {
  const at::Tensor base = at::randn(kShape);
  const Ia3 inputs{at::randn({1, kIn, 1, 1}), true}, outputs{at::randn({1, kOut, 1, 1}), false};
  Check(inputs, base, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    return At(base, {o, i, y, x}) * At(inputs.vector, {0, i});
  });
  Check(outputs, base, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    return At(base, {o, i, y, x}) * At(outputs.vector, {0, o});
  });
}

TEST_F(LayersTest, GloraMixesAKernelsInputsAtEachPlace) {
  const at::Tensor base = at::randn(kShape);
  const Glora layer{at::randn({kIn, kRank, 1, 1}), at::randn({kRank, kIn, 1, 1}),
                    at::randn({kOut, kRank, 1, 1}), at::randn({kRank, kIn, kSide, kSide}), 1};
  Check(layer, base, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    float sum = 0;
    for (int64_t r = 0; r < kRank; ++r) {
      for (int64_t c = 0; c < kIn; ++c)
        sum += At(base, {o, c, y, x}) * At(layer.a1, {c, r}) * At(layer.a2, {r, i});
      sum += At(layer.b1, {o, r}) * At(layer.b2, {r, i, y, x});
    }
    return sum;
  });
}

// DoRA of a low-rank layer that adds nothing.
LayerMath DoraOfNothing(const at::Tensor& down, const at::Tensor& up, const at::Tensor& magnitude) {
  LayerMath math;
  Dora& layer = math.emplace<Dora>();
  LowRank& inner = layer.inner.emplace<LowRank>();
  inner.down = down;
  inner.up = up;
  layer.magnitude = magnitude;
  return math;
}

TEST_F(LayersTest, DoraNormsOverRowsOrOverInputChannels) {
  const at::Tensor base = at::randn(kShape);
  const at::Tensor down = at::zeros({kRank, kIn, kSide, kSide}), up = at::zeros({kOut, kRank, 1, 1});
  const at::Tensor rows = at::rand({kOut, 1, 1, 1}), columns = at::rand({1, kIn, 1, 1});
  Check(DoraOfNothing(down, up, rows), base, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    const float w = At(base, {o, i, y, x});
    return w * At(rows, {o}) / base[o].norm().item<float>() - w;
  });
  Check(DoraOfNothing(down, up, columns), base, [&](int64_t o, int64_t i, int64_t y, int64_t x) {
    const float w = At(base, {o, i, y, x});
    return w * At(columns, {0, i}) / base.select(1, i).norm().item<float>() - w;
  });
}

TEST_F(LayersTest, AZeroWeightUnderDoraStaysFinite) {
  for (const at::Tensor& magnitude : {at::ones({kOut}), at::ones({1, kIn})}) {
    const LayerMath math = DoraOfNothing(at::zeros({kRank, kIn}), at::zeros({kOut, kRank}), magnitude);
    const at::Tensor delta = std::get<Dora>(math).Delta({kOut, kIn}, at::zeros({kOut, kIn}));
    EXPECT_EQ(delta.abs().max().item<float>(), 0);
  }
}

TEST_F(LayersTest, ARotationKeepsTheLengthOfColumns) {
  const at::Tensor base = at::randn({8, 5});
  const Oft oft{{at::randn({2, 4, 4})}, {}, 0};
  const Boft boft{at::randn({2, 2, 4, 4}), {}, 0};
  for (const at::Tensor& delta : {oft.Delta({8, 5}, base), boft.Delta({8, 5}, base)}) {
    EXPECT_GT(delta.abs().max().item<float>(), 0.1);
    EXPECT_TRUE(at::allclose((base + delta).norm(2, 0), base.norm(2, 0), 1e-4, 1e-4));
  }
}

TEST_F(LayersTest, AFormulaThatNeedsTheWeightSaysSo) {
  PatchLayer layer;
  layer.math.emplace<LowRank>();
  EXPECT_FALSE(layer.depends_on_base());
  layer.math.emplace<Dora>();
  EXPECT_TRUE(layer.depends_on_base());
  layer.math.emplace<Ia3>();
  EXPECT_TRUE(layer.depends_on_base());
  layer.math.emplace<Glora>();
  EXPECT_TRUE(layer.depends_on_base());
  layer.math.emplace<Oft>();
  EXPECT_TRUE(layer.depends_on_base());
  layer.math.emplace<Boft>();
  EXPECT_TRUE(layer.depends_on_base());
}

}  // namespace
}  // namespace latentd
