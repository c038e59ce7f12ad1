#include "patcher/weight_view.h"

#include "ATen/ATen.h"
#include "gtest/gtest.h"

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

}  // namespace
}  // namespace latentd
