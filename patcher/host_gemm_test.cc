// Both libraries, against ATen in fp64.
#include "patcher/host_gemm.h"

#include "ATen/ATen.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

class HostGemmTest : public testing::TestWithParam<HostGemm> {
 protected:
  HostGemmTest() { SetHostGemm(GetParam()); }
  ~HostGemmTest() override { SetHostGemm(BestHostGemm()); }

  static void ExpectNear(const at::Tensor& a, const at::Tensor& b) {
    ASSERT_EQ(a.sizes(), b.sizes());
    EXPECT_EQ(a.scalar_type(), at::kFloat);
    if (a.numel() > 0) {
      EXPECT_LT((a.to(at::kDouble) - b).abs().max().item<double>(), 1e-4);
    }
  }

  const c10::InferenceMode inference_;
};

TEST_P(HostGemmTest, ProductsAreThoseOfFp64) {
  at::manual_seed(1);
  for (const int64_t rows : {0, 1, 3, 77, 256}) {
    for (const auto& [in, out] : {std::pair<int64_t, int64_t>{1, 1}, {7, 3}, {64, 48}, {320, 130}}) {
      const at::Tensor x = at::randn({2, rows, in}), w = at::randn({out, in}) / 8, b = at::randn({out});
      const at::Tensor exact = at::linear(x.to(at::kDouble), w.to(at::kDouble));
      ExpectNear(HostLinear(x, w), exact);
      ExpectNear(HostLinear(x, w, b), exact + b);
      // Rows of a larger map, as attention's are.
      const at::Tensor wide = at::randn({2, rows, 3 * in}), part = wide.narrow(2, in, in);
      ExpectNear(HostLinear(part, w, b),
                 at::linear(part.to(at::kDouble), w.to(at::kDouble), b.to(at::kDouble)));

      at::Tensor sum = at::randn({rows, out});
      const at::Tensor before = sum.clone();
      HostAddProduct(sum, x[0], w);
      ExpectNear(sum, before + exact[0]);

      at::Tensor many = at::empty({2, rows, out});
      const at::Tensor weights = at::stack({w, w * 2});
      HostProducts(many, x, weights);
      ExpectNear(many, at::bmm(x.to(at::kDouble), weights.to(at::kDouble).transpose(1, 2)));
    }
  }
}

TEST_P(HostGemmTest, OtherTypesAreAten) {
  const at::Tensor x = at::randn({5, 16}).to(at::kBFloat16), w = at::randn({4, 16}).to(at::kBFloat16);
  EXPECT_TRUE(at::equal(HostLinear(x, w), at::linear(x, w)));
  const at::Tensor meta = at::empty({5, 16}, at::TensorOptions(at::kFloat).device(at::kMeta));
  EXPECT_TRUE(HostLinear(meta, at::empty({4, 16}, meta.options())).is_meta());
}

TEST(HostGemm, IsSaidByName) {
  EXPECT_EQ(HostGemmName(HostGemm::kMkl), "mkl");
  EXPECT_EQ(HostGemmName(HostGemm::kOneDnn), "onednn");
}

INSTANTIATE_TEST_SUITE_P(Both, HostGemmTest, testing::Values(HostGemm::kMkl, HostGemm::kOneDnn),
                         [](const auto& info) { return std::string(HostGemmName(info.param)); });

}  // namespace
}  // namespace latentd
