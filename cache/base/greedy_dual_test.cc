#include "cache/base/greedy_dual.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace latentd {
namespace {

struct Item {
  std::string name;
  double cost = 0;
  GreedyDual::Worth worth;
};

// Evicts the item of the least worth; returns its name.
std::string EvictOne(GreedyDual& order, std::vector<Item>& items) {
  auto least = std::min_element(items.begin(), items.end(),
                                [](const Item& a, const Item& b) { return a.worth < b.worth; });
  order.Evict(least->worth);
  std::string name = least->name;
  items.erase(least);
  return name;
}

TEST(GreedyDual, WithEqualCostsTheLeastRecentlyUsedGoesFirst) {
  GreedyDual order;
  std::vector<Item> items = {{"a", 1, {}}, {"b", 1, {}}, {"c", 1, {}}};
  for (Item& item : items) order.Use(item.worth, item.cost);
  order.Use(items[0].worth, 1);
  EXPECT_EQ(EvictOne(order, items), "b");
  EXPECT_EQ(EvictOne(order, items), "c");
  EXPECT_EQ(EvictOne(order, items), "a");
}

TEST(GreedyDual, WhatIsDearToReloadOutlivesWhatIsCheap) {
  GreedyDual order;
  std::vector<Item> items = {{"dear", 5, {}}, {"cheap", 1, {}}};
  for (Item& item : items) order.Use(item.worth, item.cost);  // the cheap one is the younger
  EXPECT_EQ(EvictOne(order, items), "cheap");
}

TEST(GreedyDual, WhatIsDearAndNotUsedGoesInTheEnd) {
  GreedyDual order;
  std::vector<Item> items = {{"dear", 5, {}}};
  order.Use(items[0].worth, 5);
  std::string gone;
  int cheap_ones = 0;
  while (gone != "dear") {
    ASSERT_LT(cheap_ones, 10);
    items.push_back({"cheap", 1, {}});
    order.Use(items.back().worth, 1);
    ++cheap_ones;
    gone = EvictOne(order, items);
  }
  EXPECT_EQ(cheap_ones, 5);  // its worth of 5, sunk by 1 for each
}

TEST(GreedyDual, TheFloorNeverFalls) {
  GreedyDual order;
  order.Evict({.value = 3, .last_used = 1});
  order.Evict({.value = 1, .last_used = 2});
  GreedyDual::Worth worth;
  order.Use(worth, 1);
  EXPECT_EQ(worth.value, 4);
}

TEST(GreedyDual, CostIsSecondsPerByteAndNeverLessThanADisks) {
  EXPECT_DOUBLE_EQ(GreedyDual::Cost(2, 1000), 2e-3);
  EXPECT_DOUBLE_EQ(GreedyDual::Cost(0, 1 << 30), 1 / 2e9);
  EXPECT_DOUBLE_EQ(GreedyDual::Cost(3, 0), 3);
}

}  // namespace
}  // namespace latentd
