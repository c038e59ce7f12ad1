// What layers compute in two ways, by a kernel of their own in host memory and out of ATen's operators
// elsewhere, is one formula.
#include "families/nn/layers.h"

#include <cmath>
#include <numbers>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "families/nn/host_conv.h"
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

// The largest difference as a share of |x|: what an activation adds to its input's own rounding.
double ErrorPerInput(const at::Tensor& y, const at::Tensor& expected, const at::Tensor& x) {
  const at::Tensor difference = (y.to(at::kDouble) - expected.to(at::kDouble)).abs();
  return (difference / x.to(at::kDouble).abs().clamp_min(1e-30)).max().item<double>();
}

at::Tensor GeluTanhFormula(const at::Tensor& x) {
  const at::Tensor v = x.to(at::kDouble);
  return v * 0.5 * (1 + at::tanh((v + v.pow(3) * 0.044715) * std::sqrt(2 / std::numbers::pi)));
}

TEST(LayersTest, GeluTanhIsTheFormulaBothWays) {
  const at::Tensor x = at::linspace(-12, 12, 1 << 16, at::kFloat).view({1, 64, 1024});
  const at::Tensor expected = GeluTanhFormula(x);
  // Into a slice of wider rows, as a single block does it.
  const at::Tensor room = at::full({1, 64, 1100}, 7.0f), room_composed = at::full({1, 64, 1100}, 7.0f);
  GeluTanhTo(room.narrow(2, 76, 1024), x);
  GeluTanhComposed(room_composed.narrow(2, 76, 1024), x);
  const at::Tensor own = room.narrow(2, 76, 1024), composed = room_composed.narrow(2, 76, 1024);
  EXPECT_LE(ErrorPerInput(own, expected, x), 1e-6);
  EXPECT_LE(ErrorPerInput(composed, expected, x), 1e-6);
  EXPECT_LE(ErrorPerInput(own, composed, x), 1e-6);
  for (const at::Tensor& r : {room, room_composed}) EXPECT_TRUE(r.narrow(2, 0, 76).eq(7).all().item<bool>());
  // In place, as an MLP does it.
  const at::Tensor in_place = x.clone();
  GeluTanhComposed(in_place, in_place);
  EXPECT_TRUE(at::equal(in_place, composed.contiguous()));
}

TEST(LayersTest, NormAndTurnIsTheFormulaBothWays) {
  at::manual_seed(3);
  constexpr int64_t kText = 5, kTokens = 12, kHeads = 3;
  constexpr double kEps = 1e-6;
  for (const std::vector<int64_t>& axes : {std::vector<int64_t>{16, 56, 56}, {2, 2, 2}}) {
    const int64_t dim = axes[0] + axes[1] + axes[2];
    const at::Tensor positions = at::randint(0, 64, {kTokens, 3}, at::kLong).to(at::kFloat);
    const at::Tensor table = RopeTable(positions, axes);
    const at::Tensor x = at::randn({1, kTokens, kHeads * dim}) * 3, weight = at::randn({dim});

    std::vector<at::Tensor> angles;
    for (size_t axis = 0; axis < axes.size(); ++axis) {
      const at::Tensor j = at::arange(0, axes[axis], 2, at::kDouble);
      angles.push_back(at::outer(positions.select(1, static_cast<int64_t>(axis)).to(at::kDouble),
                                 at::exp(j * (-std::log(10000.0) / static_cast<double>(axes[axis])))));
    }
    const at::Tensor angle = at::cat(angles, 1).unsqueeze(1);
    at::Tensor v = x.to(at::kDouble).view({1, kTokens, kHeads, dim});
    v = v * at::rsqrt(v.pow(2).mean(-1, true) + kEps) * weight.to(at::kDouble);
    const at::Tensor a = v.slice(3, 0, dim, 2), b = v.slice(3, 1, dim, 2);
    const at::Tensor expected =
        at::stack({a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()}, -1).flatten(3);

    // Into part of a longer sequence, as the two sides of a double block do it.
    const at::Tensor room = at::zeros({1, kText + kTokens, kHeads, dim}),
                     room_composed = at::zeros_like(room);
    const at::Tensor own = room.narrow(1, kText, kTokens), composed = room_composed.narrow(1, kText, kTokens);
    NormRopeTo(own, x, weight, kEps, table);
    NormRopeComposed(composed, x, weight, kEps, table);
    EXPECT_LE(RelativeError(own, expected), 1e-6) << dim;
    EXPECT_LE(RelativeError(composed, expected), 1e-6) << dim;
    EXPECT_LE(RelativeError(own, composed), 1e-6) << dim;
    for (const at::Tensor& r : {room, room_composed})
      EXPECT_TRUE(r.narrow(1, 0, kText).eq(0).all().item<bool>());
  }
}

TEST(LayersTest, GroupNormIsTheFormulaBothWays) {
  at::manual_seed(4);
  // The mean of the squares is 29 where the deviation's is 4: what it is wrong by, a rounding (6e-8) for each
  // of the few sums that it is made of, is seven times that in the deviation.
  constexpr double kOurs = 3e-6;
  constexpr double kLibrarys = 3 * kOurs;  // without vectors it adds up one number after the other
  // More places than are summed up at a time, and a mean that is large beside the deviation.
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{2, 64, 31, 33}, {1, 128, 1, 1}, {3, 96, 2, 5}}) {
    const at::Tensor x = (at::randn(shape) * 2 + 5).contiguous(at::MemoryFormat::ChannelsLast);
    const at::Tensor weight = at::randn({shape[1]}), bias = at::randn({shape[1]});
    for (const bool silu : {false, true}) {
      at::Tensor expected =
          at::group_norm(x.to(at::kDouble), 32, weight.to(at::kDouble), bias.to(at::kDouble), 1e-5);
      if (silu) expected = at::silu(expected);
      const at::Tensor own = GroupNormHost(x, weight, bias, 32, 1e-5, silu);
      const at::Tensor composed = GroupNormComposed(x, weight, bias, 32, 1e-5, silu);
      EXPECT_LE(RelativeError(own, expected), kOurs) << shape[1];
      EXPECT_LE(RelativeError(composed, expected), kLibrarys) << shape[1];
      EXPECT_TRUE(own.is_contiguous(at::MemoryFormat::ChannelsLast));
    }
  }
}

TEST(LayersTest, GatedGeluIsTheFormulaBothWays) {
  at::manual_seed(5);
  const at::Tensor b = at::linspace(-12, 12, 7 * 333, at::kFloat).view({1, 7, 333});
  const at::Tensor a = at::randn_like(b), x = at::cat({a, b}, -1);
  const at::Tensor expected = a.to(at::kDouble) * at::gelu(b.to(at::kDouble));
  EXPECT_LE(ErrorPerInput(GatedGelu(x), expected, a * b), 1e-6);
  EXPECT_LE(ErrorPerInput(GatedGeluComposed(x), expected, a * b), 1e-6);
}

// Every way of a convolution against ATen's in double precision.
TEST(LayersTest, ConvolutionsAreTheFormulaAllWays) {
  at::manual_seed(6);
  struct Case {
    int64_t batch, in, out, height, width;
  };
  // Tiles that stick out on either side, several parts of tiles, and several of channels.
  for (const Case& c : {Case{2, 16, 32, 13, 18},
                        {1, 32, 16, 1, 1},
                        {1, 48, 48, 4, 5},
                        {1, 320, 320, 61, 64},
                        {1, 512, 944, 9, 7}}) {
    const at::Tensor x = at::randn({c.batch, c.in, c.height, c.width});
    const at::Tensor weight = at::randn({c.out, c.in, 3, 3}) / std::sqrt(9.0 * static_cast<double>(c.in));
    const at::Tensor bias = at::randn({c.out});
    auto workspace = [&](HostConvWay way, int64_t stride) {
      return at::full({HostConvWorkspace(way, {c.batch, c.in, c.out, c.height, c.width, stride})}, NAN);
    };
    auto expected = [&](int64_t stride) {
      return at::conv2d(x.to(at::kDouble), weight.to(at::kDouble), bias.to(at::kDouble), {stride, stride},
                        {1, 1});
    };
    const at::Tensor winograd = WinogradConv3x3(x, weight, bias, workspace(HostConvWay::kWinograd, 1));
    EXPECT_LE(RelativeError(winograd, expected(1)), 3e-5) << c.in;
    EXPECT_TRUE(winograd.is_contiguous(at::MemoryFormat::ChannelsLast));
    for (const int64_t stride : {1, 2}) {
      const at::Tensor windows =
          WindowsConv3x3(x, weight, bias, stride, workspace(HostConvWay::kWindows, stride));
      EXPECT_LE(RelativeError(windows, expected(stride)), 5e-6) << c.in;
    }
  }
}

TEST(LayersTest, ConvolutionsDoNotDependOnTheNumberOfThreads) {
  at::manual_seed(7);
  const at::Tensor x = at::randn({2, 64, 32, 32}), weight = at::randn({64, 64, 3, 3}), bias = at::randn({64});
  const at::Tensor workspace = at::empty({HostConvWorkspace(HostConvWay::kWinograd, {2, 64, 64, 32, 32})});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor one = WinogradConv3x3(x, weight, bias, workspace);
  const at::Tensor normed = GroupNormHost(one, bias, bias, 32, 1e-5, true);
  at::set_num_threads(2);
  EXPECT_TRUE(at::equal(WinogradConv3x3(x, weight, bias, workspace), one));
  EXPECT_TRUE(at::equal(GroupNormHost(one, bias, bias, 32, 1e-5, true), normed));
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace latentd
