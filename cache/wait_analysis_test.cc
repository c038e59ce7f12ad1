// Numbers by hand: a cap of 100, and what is left of it.
#include "cache/wait_analysis.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Verdict = WaitAnalysis::Verdict;

// A budget of 100 of which the owners hold promises; the rest is free.
BudgetView Promised(std::map<std::string, int64_t> promised) {
  BudgetView view{.cap = 100, .at_once = 100, .promised = std::move(promised), .turn = 1};
  for (const auto& [owner, bytes] : view.promised) view.at_once -= bytes;
  return view;
}
void Hold(BudgetView& view, HeldGroup group) {
  view.at_once -= group.bytes;
  view.held.push_back(std::move(group));
}
WaitView For(uint64_t id, const std::string& owner, int64_t bytes, int budget = 0) {
  return {.id = id, .owner = owner, .budget = budget, .bytes = bytes};
}
WaitView ForWork(uint64_t id, const std::string& owner, const std::string& worker) {
  return {.id = id, .owner = owner, .worker = worker};
}

TEST(WaitAnalysis, WhatIsThereIsTakenByTheFirst) {
  const WaitAnalysis analysis({Promised({{"a", 40}})}, {For(1, "b", 60), For(2, "c", 60)});
  EXPECT_EQ(analysis.Of(1), Verdict::kTake);
  EXPECT_EQ(analysis.Of(2), Verdict::kWait);
  EXPECT_EQ(analysis.Of(3), Verdict::kWait);  // unknown
}

// The first waits for 85 and will find 100 less what it has itself, 10: 5 are left beside it.
TEST(WaitAnalysis, WhatFitsBesideTheFirstGoesAheadOfIt) {
  for (const auto& [bytes, verdict] : {std::pair(5, Verdict::kTake), std::pair(6, Verdict::kWait)}) {
    const WaitAnalysis analysis({Promised({{"first", 10}, {"other", 20}})},
                                {For(1, "first", 85), For(2, "small", bytes)});
    EXPECT_EQ(analysis.Of(1), Verdict::kWait);
    EXPECT_EQ(analysis.Of(2), verdict) << bytes;
    const WaitAnalysis before({Promised({{"first", 10}, {"other", 20}})}, {For(1, "first", 85)});
    EXPECT_EQ(before.MayGoAhead(0, "small", bytes), verdict == Verdict::kTake) << bytes;
  }
}

TEST(WaitAnalysis, WhatWentAheadAndIsStillHadLeavesLessForTheNext) {
  for (const auto& [bytes, verdict] : {std::pair(2, Verdict::kTake), std::pair(3, Verdict::kWait)}) {
    BudgetView view = Promised({{"first", 10}, {"other", 20}});
    Hold(view, {.owners = {"earlier"}, .bytes = 3, .turn = 1});
    const WaitAnalysis analysis({view}, {For(1, "first", 85), For(2, "small", bytes)});
    EXPECT_EQ(analysis.Of(2), verdict) << bytes;
  }
  BudgetView view = Promised({{"first", 10}, {"other", 20}});
  view.turn_promised = 4;
  EXPECT_EQ(WaitAnalysis({view}, {For(1, "first", 85), For(2, "small", 2)}).Of(2), Verdict::kWait);
}

// `other` has 20 of what the first needs: it has to come to its end, and with 10 more it does.
TEST(WaitAnalysis, WhoeverTheFirstWaitsForGoesAheadOfIt) {
  const WaitAnalysis analysis({Promised({{"first", 10}, {"other", 20}})},
                              {For(1, "first", 85), For(2, "other", 10)});
  EXPECT_EQ(analysis.Of(2), Verdict::kTake);
  // One whose end the first does not need has to wait.
  const WaitAnalysis third({Promised({{"first", 10}, {"other", 20}, {"third", 1}})},
                           {For(1, "first", 78), For(2, "third", 22)});
  EXPECT_EQ(third.Of(2), Verdict::kWait);
}

TEST(WaitAnalysis, HopelessIsWhatTheCapLessWhatLastsAndTheAskersOwnDoesNotHold) {
  BudgetView view = Promised({{"me", 10}});
  Hold(view, {.owners = {"pin"}, .bytes = 30, .lasting = true});
  EXPECT_TRUE(WaitAnalysis({view}, {}).IsHopeless(0, "me", 61));
  EXPECT_FALSE(WaitAnalysis({view}, {}).IsHopeless(0, "me", 60));
  EXPECT_FALSE(WaitAnalysis({view}, {}).IsHopeless(0, "another", 70));  // "me" lets go
  EXPECT_EQ(WaitAnalysis({view}, {For(1, "me", 61)}).Of(1), Verdict::kHopeless);
  // Records that the asker shares with others are its own, too.
  Hold(view, {.owners = {"me", "other"}, .bytes = 5});
  EXPECT_TRUE(WaitAnalysis({view}, {}).IsHopeless(0, "me", 56));
}

TEST(WaitAnalysis, AHopelessFirstKeepsNobodyWaiting) {
  BudgetView view = Promised({});
  Hold(view, {.owners = {"pin"}, .bytes = 30, .lasting = true});
  const WaitAnalysis analysis({view}, {For(1, "large", 85), For(2, "small", 70)});
  EXPECT_EQ(analysis.Of(1), Verdict::kHopeless);
  EXPECT_EQ(analysis.Of(2), Verdict::kTake);
}

TEST(WaitAnalysis, OfTwoWhoWaitForEachOtherTheNewerIsRefused) {
  const WaitAnalysis analysis({Promised({{"a", 40}, {"b", 50}})}, {For(1, "a", 20), For(2, "b", 20)});
  EXPECT_EQ(analysis.Of(1), Verdict::kWait);
  EXPECT_EQ(analysis.Of(2), Verdict::kDeadlock);
  EXPECT_THAT(analysis.deadlock(), ElementsAre(1u, 2u));
}

// The refusal of `c`, which has nothing, would help nobody.
TEST(WaitAnalysis, WhoIsInNobodysWayIsNotRefusedForOthers) {
  const WaitAnalysis analysis({Promised({{"a", 40}, {"b", 50}})},
                              {For(1, "a", 20), For(2, "b", 20), For(3, "c", 20)});
  EXPECT_EQ(analysis.Of(2), Verdict::kDeadlock);
  EXPECT_EQ(analysis.Of(3), Verdict::kWait);
}

TEST(WaitAnalysis, WhereOneGoesOnNobodyIsRefused) {
  const WaitAnalysis analysis({Promised({{"a", 40}, {"b", 40}, {"runs", 10}})},
                              {For(1, "a", 20), For(2, "b", 20)});
  EXPECT_THAT(analysis.deadlock(), IsEmpty());  // 10 + 10 for a, then 40 + for b
  EXPECT_EQ(analysis.Of(1), Verdict::kWait);
  EXPECT_EQ(analysis.Of(2), Verdict::kWait);
}

TEST(WaitAnalysis, ASharedRecordGoesWithTheLastOfItsHolders) {
  BudgetView view = Promised({});
  Hold(view, {.owners = {"a", "runs"}, .bytes = 60});
  // "runs" lets go of it and "a" does not, for it waits.
  const WaitAnalysis stuck({view}, {For(1, "b", 50), For(2, "a", 40)});
  EXPECT_EQ(stuck.Of(2), Verdict::kTake);  // whoever is in the way of the first goes ahead
  const WaitAnalysis dead({view}, {For(1, "b", 50), ForWork(2, "a", "b")});
  EXPECT_THAT(dead.deadlock(), ElementsAre(1u, 2u));
  EXPECT_EQ(dead.Of(1), Verdict::kDeadlock);
}

// Whoever waits for somebody's work cannot be refused by a budget; the one who does that work can.
TEST(WaitAnalysis, WaitsForWorkArePartOfACircle) {
  const WaitAnalysis analysis({Promised({{"loader", 10}, {"joined", 60}})},
                              {For(1, "loader", 40), ForWork(2, "joined", "loader")});
  EXPECT_THAT(analysis.deadlock(), ElementsAre(1u, 2u));
  EXPECT_EQ(analysis.Of(1), Verdict::kDeadlock);
  EXPECT_EQ(analysis.Of(2), Verdict::kWait);
}

TEST(WaitAnalysis, ACircleGoesThroughSeveralBudgets) {
  const std::vector<BudgetView> budgets = {Promised({{"a", 90}}), Promised({{"b", 90}})};
  const WaitAnalysis analysis(budgets, {For(1, "b", 20, 0), For(2, "a", 20, 1)});
  EXPECT_EQ(analysis.Of(2), Verdict::kDeadlock);
  EXPECT_EQ(analysis.HeldBytes(0), 0);
  EXPECT_THAT(WaitAnalysis(budgets, {For(1, "b", 20, 0)}).deadlock(), IsEmpty());
}

}  // namespace
}  // namespace latentd
