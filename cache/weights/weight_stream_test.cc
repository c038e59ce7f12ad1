#include "cache/weights/weight_stream.h"

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

constexpr int kBlocks = 6;

// Blocks of two matrices and a vector, of different sizes, between a block that stays before and one behind.
class WeightStreamTest : public testing::Test {
 protected:
  WeightStreamTest() : sim_({.memory_bytes = 1 << 20}) {
    auto layout = std::make_shared<ComponentLayout>();
    layout->BeginBlock("first", ComponentLayout::Residency::kStays);
    Add(*layout, {8, 4});
    for (int i = 0; i < kBlocks; ++i) {
      layout->BeginBlock(absl::StrCat("blocks.", i));
      blocks_.push_back({Add(*layout, {3 + i, 5}), Add(*layout, {7, 9})});
      vectors_.push_back(Add(*layout, {5}));
    }
    layout->BeginBlock("last", ComponentLayout::Residency::kStays);
    Add(*layout, {4, 4});
    set_ = std::make_shared<const WeightSet>(layout, weights_);
  }
  Slot Add(ComponentLayout& layout, std::vector<int64_t> shape) {
    weights_.push_back({at::randn(shape)});
    return layout.Add(absl::StrCat("t", weights_.size()), shape);
  }
  std::unique_ptr<WeightStream> Stream(int ring = 2) {
    plan_ = PlanResidency(set_->device_blocks(), 0, ring);
    part_ = std::static_pointer_cast<const WeightSet>(*set_->CopyTo(sim_, plan_.resident, nullptr, {}));
    return *WeightStream::Create(
        *set_, [this](Slot s) -> const at::Tensor& { return (*set_)[s].data; }, plan_, sim_);
  }
  void ExpectBlock(WeightStream& stream, int block) {
    for (Slot slot : blocks_[static_cast<size_t>(block)]) {
      const at::Tensor& got = stream.Get(slot);
      EXPECT_TRUE(at::equal(got, (*set_)[slot].data)) << block;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(got.const_data_ptr()) % kDeviceAlignment, 0u);
      EXPECT_NE(got.const_data_ptr(), (*set_)[slot].data.const_data_ptr());
    }
  }

  SimDevice sim_;
  std::vector<Weight> weights_;
  std::vector<std::vector<Slot>> blocks_;
  std::vector<Slot> vectors_;
  std::shared_ptr<const WeightSet> set_, part_;
  ResidencyPlan plan_;
};

TEST_F(WeightStreamTest, OnlyWhatStaysIsResident) {
  auto stream = Stream();
  for (const auto& block : blocks_) {
    for (Slot slot : block) EXPECT_FALSE(part_->has(slot));
  }
  for (Slot slot : vectors_) EXPECT_TRUE(part_->has(slot));
  EXPECT_TRUE(part_->has(Slot{0}));
  EXPECT_EQ(sim_.allocated_bytes(), plan_.bytes());
  EXPECT_EQ(plan_.ring_slots, 2);
  stream = nullptr;
  part_ = nullptr;
  EXPECT_EQ(sim_.allocated_bytes(), 0);
}

TEST_F(WeightStreamTest, BlocksComeInOrderRoundAfterRound) {
  for (int ring : {2, 3, kBlocks}) {
    auto stream = Stream(ring);
    for (int round = 0; round < 4; ++round) {
      for (int block = 0; block < kBlocks; ++block) ExpectBlock(*stream, block);
    }
  }
}

TEST_F(WeightStreamTest, AnyOtherOrderGivesTheSameBytes) {
  auto stream = Stream();
  for (int block : {3, 3, 0, 5, 4, 4, 1, 0, 2, 5, 0, 1, 2, 3, 4, 5, 5, 2}) ExpectBlock(*stream, block);
}

TEST_F(WeightStreamTest, AMergedWeightComesInPlaceOfTheBases) {
  const at::Tensor merged = (*set_)[blocks_[2][0]].data + 1;
  plan_ = PlanResidency(set_->device_blocks(), 0, 2);
  auto stream = *WeightStream::Create(
      *set_,
      [&](Slot s) -> const at::Tensor& { return s.index == blocks_[2][0].index ? merged : (*set_)[s].data; },
      plan_, sim_);
  for (int round = 0; round < 2; ++round) {
    ExpectBlock(*stream, 1);
    EXPECT_TRUE(at::equal(stream->Get(blocks_[2][0]), merged));
    EXPECT_TRUE(at::equal(stream->Get(blocks_[2][1]), (*set_)[blocks_[2][1]].data));
  }
}

TEST_F(WeightStreamTest, AWeightThatIsKeptTooLongIsAnErrorNotAWrongPicture) {
  auto stream = Stream();
  const at::Tensor kept = stream->Get(blocks_[0][0]);
  EXPECT_THROW(stream->Get(blocks_[1][0]), StatusError);
}

TEST_F(WeightStreamTest, AFailedCopyIsThrownWithItsStatus) {
  auto stream = Stream();
  ExpectBlock(*stream, 0);
  sim_.FailCopy(1);
  try {
    for (int round = 0; round < 2; ++round) {
      for (int block = 0; block < kBlocks; ++block) stream->Get(blocks_[static_cast<size_t>(block)][0]);
    }
    FAIL() << "nothing was thrown";
  } catch (const StatusError& e) {
    EXPECT_EQ(ErrorReason(e.status()), "COPY_FAILED");
  }
}

TEST_F(WeightStreamTest, ARingThatCannotBeAllocatedIsAnErrorAndLeavesNothing) {
  plan_ = PlanResidency(set_->device_blocks(), 0, 2);
  {
    sim_.FailAllocation(1);
    auto stream = WeightStream::Create(
        *set_, [this](Slot s) -> const at::Tensor& { return (*set_)[s].data; }, plan_, sim_);
    EXPECT_EQ(ErrorReason(stream.status()), "DEVICE_OUT_OF_MEMORY");
    EXPECT_EQ(sim_.allocated_bytes(), 0);
  }
  sim_.Lose();
  auto stream = WeightStream::Create(
      *set_, [this](Slot s) -> const at::Tensor& { return (*set_)[s].data; }, plan_, sim_);
  EXPECT_EQ(ErrorReason(stream.status()), "DEVICE_LOST");
}

TEST_F(WeightStreamTest, GrowingAPartCopiesOnlyWhatIsMissing) {
  Stream();
  const int64_t before = sim_.allocated_bytes();
  std::vector<bool> more = plan_.resident;
  const auto block = static_cast<size_t>(set_->device_block(blocks_[1][0]));
  more[block] = true;
  auto grown = std::static_pointer_cast<const WeightSet>(*set_->CopyTo(sim_, more, part_.get(), {}));
  EXPECT_EQ(sim_.allocated_bytes() - before, set_->device_blocks()[block].bytes);
  EXPECT_EQ((*grown)[Slot{0}].data.const_data_ptr(), (*part_)[Slot{0}].data.const_data_ptr());
  EXPECT_TRUE(at::equal((*grown)[blocks_[1][0]].data, (*set_)[blocks_[1][0]].data));
  EXPECT_FALSE(part_->has(blocks_[1][0])) << "who has the old copy is not disturbed";
}

TEST(WeightSetBlocks, TiedTensorsOfTwoBlocksStay) {
  auto layout = std::make_shared<ComponentLayout>();
  layout->BeginBlock("a");
  layout->Add("a.weight", {4, 4});
  layout->Add("a.own", {4, 4});
  layout->BeginBlock("b");
  layout->Add("b.weight", {4, 4});
  layout->Add("b.own", {4, 4});
  const at::Tensor tied = at::randn({4, 4});
  const WeightSet set(layout, {{tied}, {at::randn({4, 4})}, {tied}, {at::randn({4, 4})}});
  EXPECT_EQ(set.bytes(), 3 * 64);
  const auto blocks = set.device_blocks();
  ASSERT_EQ(blocks.size(), 3u);
  EXPECT_EQ(blocks[0].bytes, 64);
  EXPECT_FALSE(blocks[0].stays);
  EXPECT_EQ(blocks[2].bytes, 64) << "the tied one, once";
  EXPECT_TRUE(blocks[2].stays);
  SimDevice sim({.memory_bytes = 1 << 20});
  auto copy = std::static_pointer_cast<const WeightSet>(*set.CopyTo(sim, {false, false, true}, nullptr, {}));
  EXPECT_EQ((*copy)[Slot{0}].data.const_data_ptr(), (*copy)[Slot{2}].data.const_data_ptr());
  EXPECT_FALSE(copy->has(Slot{1}));
  EXPECT_EQ(sim.allocated_bytes(), 64);

  // Merged weights move with the blocks of those they stand for.
  std::vector<Weight> merged(4);
  merged[0] = {tied + 1};
  const WeightSet instead(set, merged);
  EXPECT_EQ(instead.device_block(Slot{0}), set.device_block(Slot{0}));
  EXPECT_EQ(instead.bytes(), 64);
}

}  // namespace
}  // namespace latentd
