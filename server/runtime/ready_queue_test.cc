// The order in which tasks take turns, by a clock that the test moves.
#include "server/runtime/ready_queue.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;

class Named : public SlicedTask {
 public:
  Named(std::string name, int priority) : name_(std::move(name)), priority_(priority) {}
  bool RunSlice() override { return true; }
  int priority() const override { return priority_; }
  const std::string& name() const { return name_; }

 private:
  const std::string name_;
  const int priority_;
};

class ReadyQueueTest : public testing::Test {
 protected:
  void Push(const std::string& name, int priority) {
    queue_.Push(std::make_shared<Named>(name, priority), now_);
  }
  // Runs slices of `length`: who is next runs, and is ready again after it.
  std::vector<std::string> Run(int slices, absl::Duration length) {
    std::vector<std::string> names;
    for (int i = 0; i < slices; ++i) {
      auto task = queue_.Pop(now_);
      names.push_back(static_cast<Named&>(*task).name());
      now_ += length;
      queue_.Push(std::move(task), now_);
    }
    return names;
  }

  absl::Time now_ = absl::FromUnixSeconds(1000);
  ReadyQueue queue_{{.level = absl::Seconds(10), .max_priority = 100}};
};

TEST_F(ReadyQueueTest, EqualOnesTakeTurns) {
  Push("a", 0);
  Push("b", 0);
  Push("c", 0);
  EXPECT_THAT(Run(5, absl::Seconds(1)), ElementsAre("a", "b", "c", "a", "b"));
}

TEST_F(ReadyQueueTest, TheHigherOneGoesFirstAndTheLowerOneRisesByWaiting) {
  Push("low", 0);
  Push("high", 2);
  // Level 1 after 10 s, level 2 after 20 s; there it was ready before the other.
  EXPECT_THAT(Run(5, absl::Seconds(5)), ElementsAre("high", "high", "high", "high", "low"));
  // It had its turn, and begins anew.
  EXPECT_THAT(Run(6, absl::Seconds(5)), ElementsAre("high", "high", "high", "high", "low", "high"));
}

TEST_F(ReadyQueueTest, NobodyRisesAboveTheHighestPriority) {
  Push("old", -100);
  now_ += absl::Hours(10);
  Push("urgent", 100);
  EXPECT_THAT(Run(3, absl::Seconds(1)), ElementsAre("old", "urgent", "urgent"))
      << "equal now, and there for longer";
}

TEST_F(ReadyQueueTest, WithoutAgeingTheLowerOneWaits) {
  queue_ = ReadyQueue();
  Push("low", 0);
  Push("high", 1);
  now_ += absl::Hours(1000);
  EXPECT_THAT(Run(3, absl::Hours(1)), ElementsAre("high", "high", "high"));
}

TEST_F(ReadyQueueTest, AClockThatGoesBackDoesNoHarm) {
  Push("low", 0);
  now_ -= absl::Hours(1);
  Push("high", 1);
  EXPECT_THAT(Run(1, absl::Seconds(1)), ElementsAre("high"));
}

TEST_F(ReadyQueueTest, WhatIsTakenOutAndGivenBackKeepsItsPlace) {
  Push("a", 0);
  Push("b", 0);
  Push("c", 0);
  auto taken =
      queue_.Take([](const SlicedTask& task) { return static_cast<const Named&>(task).name() != "b"; });
  EXPECT_EQ(taken.size(), 2u);
  EXPECT_EQ(queue_.size(), 1u);
  queue_.GiveBack(std::move(taken));
  EXPECT_THAT(Run(4, absl::Seconds(1)), ElementsAre("a", "b", "c", "a"));
}

}  // namespace
}  // namespace latentd
