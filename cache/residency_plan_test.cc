#include "cache/residency_plan.h"

#include <algorithm>
#include <limits>
#include <random>

#include "cache/cache_test_util.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

int64_t ResidentBytes(const std::vector<ResourceBlock>& blocks, const ResidencyPlan& plan) {
  int64_t sum = 0;
  for (size_t i = 0; i < blocks.size(); ++i) sum += plan.resident[i] ? blocks[i].bytes : 0;
  return sum;
}

TEST(ResidencyPlan, EverythingIsResidentWhereItFits) {
  const auto blocks = Blocks(10, {20, 20, 20, 20});
  const ResidencyPlan plan = PlanResidency(blocks, 90, 2);
  EXPECT_EQ(plan.resident, std::vector<bool>(5, true));
  EXPECT_EQ(plan.bytes(), 90);
  EXPECT_FALSE(plan.streams());
  EXPECT_EQ(plan.ring_bytes(), 0);
}

TEST(ResidencyPlan, WhatStaysStaysAndARingServesTheRest) {
  const auto blocks = Blocks(10, {20, 20, 20, 20});
  const ResidencyPlan plan = PlanResidency(blocks, 89, 2);
  EXPECT_TRUE(plan.resident[0]);
  EXPECT_EQ(plan.ring_slots, 2);
  EXPECT_EQ(plan.slot_bytes, 20);
  EXPECT_EQ(plan.resident_bytes, 10 + 20);  // 89 - 10 - 2 * 20 leaves room for one
  EXPECT_TRUE(plan.streams());
}

TEST(ResidencyPlan, ResidentBlocksAreSpreadOverTheOrderOfUse) {
  const auto blocks = Blocks(0, std::vector<int64_t>(12, 10));
  const ResidencyPlan plan = PlanResidency(blocks, 20 + 60, 2);
  EXPECT_EQ(plan.resident_bytes, 60);
  for (size_t i = 0; i + 1 < 12; ++i) EXPECT_NE(plan.resident[i], plan.resident[i + 1]) << i;
}

TEST(ResidencyPlan, TheSmallestPlanIsWhatStaysAndTwoBuffers) {
  const auto blocks = Blocks(10, {20, 30, 20, 20});
  for (int64_t available :
       {int64_t{0}, int64_t{-100}, std::numeric_limits<int64_t>::min() / 2, int64_t{50}}) {
    const ResidencyPlan plan = PlanResidency(blocks, available, 4);
    EXPECT_EQ(plan.bytes(), 10 + 2 * 30);
    EXPECT_EQ(plan.resident, (std::vector<bool>{true, false, false, false, false}));
  }
}

TEST(ResidencyPlan, TheRingHasAsManyBuffersAsAskedForWhereTheyFit) {
  const auto blocks = Blocks(0, std::vector<int64_t>(10, 10));
  EXPECT_EQ(PlanResidency(blocks, 60, 4).ring_slots, 4);
  EXPECT_EQ(PlanResidency(blocks, 35, 4).ring_slots, 3);
  EXPECT_EQ(PlanResidency(blocks, 60, 0).ring_slots, 2);
}

TEST(ResidencyPlan, ABufferIsAsLargeAsTheLargestBlockThatStreams) {
  const auto blocks = Blocks(0, {10, 10, 10, 40, 10, 10, 10, 10, 10, 10});
  const ResidencyPlan plan = PlanResidency(blocks, 125, 2);
  int64_t largest = 0;
  for (size_t i = 0; i < blocks.size(); ++i)
    largest = std::max(largest, plan.resident[i] ? 0 : blocks[i].bytes);
  EXPECT_EQ(plan.slot_bytes, largest);
}

TEST(ResidencyPlan, AResourceWithNothingToStreamHasOnePlan) {
  for (const auto& blocks : {Blocks(100, {}), Blocks(10, {90}), Blocks(20, {40, 40}), Blocks(0, {90, 5, 5}),
                             std::vector<ResourceBlock>{{100, true}, {0, false}, {0, false}}}) {
    for (int64_t available : {0, 50, 100}) {
      const ResidencyPlan plan = PlanResidency(blocks, available, 2);
      EXPECT_EQ(plan.bytes(), 100);
      EXPECT_FALSE(plan.streams());
    }
  }
  EXPECT_EQ(PlanResidency({}, 0, 2).bytes(), 0);
}

TEST(ResidencyPlan, RandomPlansKeepWhatTheyPromise) {
  std::mt19937 random(1);
  int streamed = 0;
  for (int round = 0; round < 100'000; ++round) {
    std::vector<ResourceBlock> blocks(random() % 20);
    int64_t full = 0;
    for (ResourceBlock& block : blocks) {
      block.bytes = random() % 8 == 0 ? 0 : 1 + random() % (random() % 4 == 0 ? 1000 : 50);
      block.stays = random() % 4 == 0;
      full += block.bytes;
    }
    const int64_t available = static_cast<int64_t>(random() % static_cast<uint32_t>(full + 10));
    const int32_t slots = static_cast<int32_t>(random() % 6);
    const ResidencyPlan plan = PlanResidency(blocks, available, slots);
    const ResidencyPlan smallest = PlanResidency(blocks, 0, slots);
    ASSERT_EQ(plan.resident.size(), blocks.size());
    ASSERT_EQ(plan.resident_bytes, ResidentBytes(blocks, plan));
    ASSERT_LE(plan.bytes(), full);
    ASSERT_LE(smallest.bytes(), plan.bytes());
    ASSERT_TRUE(plan.bytes() <= available || plan.bytes() == smallest.bytes());
    ASSERT_TRUE(full > available || !plan.streams());
    int32_t streaming = 0;
    int64_t largest = 0;
    for (const ResourceBlock& block : blocks) largest = std::max(largest, block.stays ? 0 : block.bytes);
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (plan.resident[i]) continue;
      ++streaming;
      ASSERT_FALSE(blocks[i].stays);
      ASSERT_LE(blocks[i].bytes, plan.slot_bytes);
    }
    ASSERT_EQ(plan.streams(), streaming > 0);
    if (plan.streams()) {
      ++streamed;
      ASSERT_GE(plan.ring_slots, 2);
      ASSERT_LE(plan.ring_slots, std::max(slots, 2));
      ASSERT_LT(plan.ring_slots, streaming);
      // Nothing was left out that fits beside a ring for any of the blocks.
      for (size_t i = 0; i < blocks.size(); ++i) {
        ASSERT_TRUE(plan.resident[i] ||
                    plan.resident_bytes + blocks[i].bytes + plan.ring_slots * largest > available);
      }
    }
  }
  EXPECT_GT(streamed, 10'000);
}

}  // namespace
}  // namespace latentd
