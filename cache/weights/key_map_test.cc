#include "cache/weights/key_map.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::UnorderedElementsAre;

class KeyMapTest : public testing::Test {
 protected:
  KeyMapTest() {
    for (const char* block : {"blocks.0", "blocks.1"}) {
      layout.BeginBlock(block);
      layout.Add(std::string(block) + ".q.weight", {4, 8});
      layout.Add(std::string(block) + ".k.weight", {2, 8});
      layout.Add(std::string(block) + ".mlp.0.weight", {6, 8});
    }
    layout.Add("norm.weight", {10, 8});
  }
  ComponentLayout layout;
  KeyMap map{{{"b.{}.qk", {"blocks.{}.q", "blocks.{}.k"}},
              {"b.{}.mlp.0", {"blocks.{}.mlp.0"}},
              {"final.1", {"norm"}, KeyTransform::kSwapHalves}}};
};

TEST_F(KeyMapTest, AFusedModuleIsItsPartsByRows) {
  auto parts = map.Resolve("b.1.qk", layout);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].canonical, "blocks.1.q");
  EXPECT_EQ(parts[0].row_begin, 0);
  EXPECT_EQ(parts[1].canonical, "blocks.1.k");
  EXPECT_EQ(parts[1].row_begin, 4);
  EXPECT_EQ(parts[1].rows, 2);
}

TEST_F(KeyMapTest, OnlyTheFirstNumberIsTheBlocks) {
  ASSERT_EQ(map.Resolve("b.0.mlp.0", layout).size(), 1u);
  EXPECT_TRUE(map.Resolve("b.0.mlp.1", layout).empty());
}

TEST_F(KeyMapTest, ARuleWithoutABlockMatchesItself) {
  auto parts = map.Resolve("final.1", layout);
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].transform, KeyTransform::kSwapHalves);
  EXPECT_TRUE(map.Resolve("final.2", layout).empty());
}

TEST_F(KeyMapTest, BlocksThatTheLayoutLacksAreNotThere) {
  EXPECT_TRUE(map.Resolve("b.7.qk", layout).empty());
}

TEST_F(KeyMapTest, AllNativeModulesOfALayoutAreListed) {
  EXPECT_THAT(map.NativeModules(layout),
              UnorderedElementsAre("b.0.qk", "b.1.qk", "b.0.mlp.0", "b.1.mlp.0", "final.1"));
}

}  // namespace
}  // namespace latentd
