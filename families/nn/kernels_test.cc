#include "families/nn/kernels.h"

#include <cmath>
#include <numbers>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

double Gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}

TEST(KernelsTest, GeluIsWithinTwoUlpsOfTheFormula) {
  std::vector<float> x;
  for (double v = -40; v <= 40; v += 0.0007) x.push_back(static_cast<float>(v));
  std::vector<float> y(x.size());
  GeluTanhKernel(x.data(), y.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(y[i], Gelu(x[i]), 2e-7 * std::fabs(x[i])) << x[i];
}

TEST(KernelsTest, GeluTakesEveryLengthAndWorksInPlace) {
  for (int64_t n = 0; n < 70; ++n) {
    std::vector<float> x(static_cast<size_t>(n) + 1, 1.5f);
    x.back() = 7;  // must stay
    GeluTanhKernel(x.data(), x.data(), n);
    for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(x[static_cast<size_t>(i)], Gelu(1.5), 3e-7);
    EXPECT_EQ(x.back(), 7);
  }
}

TEST(KernelsTest, GeluPassesOnWhatIsNotFinite) {
  std::vector<float> x = {NAN, INFINITY, 1e30f, -1e30f, 0};
  GeluTanhKernel(x.data(), x.data(), 5);
  EXPECT_TRUE(std::isnan(x[0]));
  EXPECT_EQ(x[1], INFINITY);
  EXPECT_EQ(x[2], 1e30f);
  EXPECT_NEAR(x[3], 0, 1e-6);
  EXPECT_EQ(x[4], 0);
}

TEST(KernelsTest, NormRopeIsTheFormulaForEveryHeadSize) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int64_t dim : {2, 4, 6, 14, 16, 32, 62, 64, 128}) {
    const int64_t tokens = 3, heads = 2, n = tokens * heads * dim;
    const double eps = 1e-6;
    std::vector<float> x(static_cast<size_t>(n)), weight(static_cast<size_t>(dim)),
        rope(static_cast<size_t>(tokens * dim)), y(x.size());
    for (auto* v : {&x, &weight, &rope}) {
      for (float& f : *v) f = normal(random);
    }
    NormRopeKernel(x.data(), weight.data(), rope.data(), y.data(), tokens, heads, dim,
                   static_cast<float>(eps));
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const float* v = &x[static_cast<size_t>((t * heads + h) * dim)];
        const float* result = &y[static_cast<size_t>((t * heads + h) * dim)];
        const float* turn = &rope[static_cast<size_t>(t * dim)];
        double sum = 0;
        for (int64_t i = 0; i < dim; ++i) sum += static_cast<double>(v[i]) * v[i];
        const double scale = 1 / std::sqrt(sum / static_cast<double>(dim) + eps);
        for (int64_t i = 0; i < dim; i += 2) {
          const double a = v[i] * scale * weight[static_cast<size_t>(i)];
          const double b = v[i + 1] * scale * weight[static_cast<size_t>(i + 1)];
          EXPECT_NEAR(result[i], a * turn[i] - b * turn[i + 1], 1e-5) << dim;
          EXPECT_NEAR(result[i + 1], a * turn[i + 1] + b * turn[i], 1e-5) << dim;
        }
      }
    }
    NormRopeKernel(x.data(), weight.data(), rope.data(), x.data(), tokens, heads, dim,
                   static_cast<float>(eps));
    EXPECT_EQ(x, y) << "in place, " << dim;
  }
}

}  // namespace
}  // namespace latentd
