// What layers compute in two ways, by a kernel of their own in host memory and out of ATen's operators
// elsewhere, is one formula.
#include "families/nn/layers.h"

#include <cmath>
#include <numbers>

#include "ATen/ATen.h"
#include "families/nn/rope.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

// max |a − b| / max |b|.
double RelativeError(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  const at::Tensor difference = (a.to(at::kDouble) - b.to(at::kDouble)).abs().max();
  return difference.item<double>() / b.to(at::kDouble).abs().max().item<double>();
}

at::Tensor GeluTanhFormula(const at::Tensor& x) {
  const at::Tensor v = x.to(at::kDouble);
  return v * 0.5 * (1 + at::tanh((v + v.pow(3) * 0.044715) * std::sqrt(2 / std::numbers::pi)));
}

}  // namespace
}  // namespace latentd
