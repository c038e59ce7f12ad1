#include "families/prompt/prompt_schedule.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "families/prompt/prompt.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

PromptSchedule Schedule(absl::string_view prompt, int64_t steps = 10, bool joins = true) {
  auto schedule = ScheduleA1111Prompt(prompt, {steps, steps, 1}, joins, "params.prompt");
  EXPECT_TRUE(schedule.ok()) << prompt << ": " << schedule.status();
  return schedule.ok() ? *std::move(schedule) : UnchangingPrompt("");
}

// The program's table: "3=a; 10=a b", each text with the last step that has it, in the manner of the tables
// in A1111's modules/prompt_parser.py, from which the expected values of the next two tests are. It is looked
// up with steps from 0, so a run of one step more shows all of it.
std::string Table(absl::string_view prompt, int64_t steps = 10) {
  auto schedule = ScheduleA1111Prompt(prompt, {steps, steps + 1, 1}, true, "params.prompt");
  EXPECT_TRUE(schedule.ok()) << prompt << ": " << schedule.status();
  if (!schedule.ok()) return "";
  EXPECT_EQ(static_cast<int64_t>(schedule->steps.size()), steps + 1);
  EXPECT_EQ(schedule->at(0), schedule->at(1)) << prompt;
  std::string table;
  for (size_t i = 1; i < schedule->steps.size(); ++i) {
    const size_t text = schedule->at(i)[0].text;
    if (i + 1 < schedule->steps.size() && schedule->at(i + 1)[0].text == text) continue;
    absl::StrAppend(&table, table.empty() ? "" : "; ", i, "=", schedule->texts[text]);
  }
  return table;
}

TEST(PromptScheduleTest, ATextChangesAtItsStep) {
  EXPECT_EQ(Table("test"), "10=test");
  EXPECT_EQ(Table("a [b:3]"), "3=a ; 10=a b");
  EXPECT_EQ(Table("a [b: 3]"), "3=a ; 10=a b");
  EXPECT_EQ(Table("a [[[b]]:2]"), "2=a ; 10=a [[b]]");
  EXPECT_EQ(Table("[(a:2):3]"), "3=; 10=(a:2)");
  EXPECT_EQ(Table("a [b : c : 1] d"), "1=a b  d; 10=a  c  d");
  EXPECT_EQ(Table("a[b:[c:d:2]:1]e"), "1=abe; 2=ace; 10=ade");
  EXPECT_EQ(Table("a [unbalanced"), "10=a [unbalanced");
  EXPECT_EQ(Table("a [b:.5] c"), "5=a  c; 10=a b c");
  EXPECT_EQ(Table("a [{b|d{:.5] c"), "5=a  c; 10=a {b|d{ c");
  EXPECT_EQ(Table("((a][:b:c [d:3]"), "3=((a][:b:c ; 10=((a][:b:c d");
}

TEST(PromptScheduleTest, AlternativesComeInTurn) {
  EXPECT_EQ(Table("[a|(b:1.1)]", 5), "1=a; 2=(b:1.1); 3=a; 4=(b:1.1); 5=a");
  EXPECT_EQ(Table("[fe|]male", 4), "1=female; 2=male; 3=female; 4=male");
  EXPECT_EQ(Table("[fe|||]male", 6), "1=female; 4=male; 5=female; 6=male");
}

TEST(PromptScheduleTest, WhatIsNoScheduleIsCopied) {
  for (const char* prompt :
       {"", "a [dim] (bright:1.2) [[x]]", "at 16:9", "[a:b]", "[a:b:c]", "[a:b:c:3]", "\\[a:b:3\\]", "[a:b:3",
        "a | b", "(a|b)", "[a|b:3", "<lora:x:0.8>", "a\\", "[:]", "[1e999:1e999]"}) {
    EXPECT_EQ(Table(prompt), absl::StrCat("10=", prompt)) << prompt;
  }
}

TEST(PromptScheduleTest, StepsAreNumbersOrShares) {
  EXPECT_EQ(Table("[a::4]"), "4=a; 10=");
  EXPECT_EQ(Table("[a:b:0.25]", 8), "2=a; 8=b");
  EXPECT_EQ(Table("[a:b:1.0]"), "10=a");
  EXPECT_EQ(Table("[a:b:1]"), "1=a; 10=b");
  EXPECT_EQ(Table("[a:b:0]"), "10=b");
  EXPECT_EQ(Table("[a:b:-3]"), "10=b");
  EXPECT_EQ(Table("[a:b:99]"), "10=a");
  EXPECT_EQ(Table("([a:b:2] c:1.3)"), "2=(a c:1.3); 10=(b c:1.3)");
  EXPECT_EQ(Table("[a\\:b:c:2]"), "2=a\\:b; 10=c");
  EXPECT_EQ(Table("[a:b|c:3]"), "3=a; 10=b|c");
  EXPECT_EQ(Table("[[a|b]:c:2]", 4), "1=a; 2=b; 4=c");
}

// Which text each step of a run has: by hand, after the program's loop, which takes the first row of the
// table whose last step is not before the step, counted from 0.
TEST(PromptScheduleTest, ARunLooksTheTableUpWithStepsFromZero) {
  auto run = [](absl::string_view prompt, const ScheduledSteps& steps) {
    const auto schedule = ScheduleA1111Prompt(prompt, steps, true, "params.prompt").value();
    std::string texts;
    for (const auto& parts : schedule.steps) texts += schedule.texts[parts[0].text];
    return texts;
  };
  EXPECT_EQ(run("[a:b:2]", {6, 6, 1}), "aaabbb");
  EXPECT_EQ(run("[a:b:0.5]", {6, 6, 1}), "aaaabb");
  EXPECT_EQ(run("[a|b]", {6, 6, 1}), "aababa");
  EXPECT_EQ(run("[a:b:0]", {3, 3, 1}), "bbb");
  EXPECT_EQ(run("[a:b:6]", {6, 6, 1}), "aaaaaa");
  // Of six steps an init image leaves three.
  EXPECT_EQ(run("[a:b:0.5]", {6, 3, 1}), "aaa");
  EXPECT_EQ(run("[a:b:1]", {6, 3, 1}), "aab");
  // Twelve evaluations, of which every other one begins a step.
  EXPECT_EQ(run("[a:b:0.5]", {6, 6, 2}), "aaaabb");
  EXPECT_EQ(run("[a:b:6]", {6, 6, 2}), "aaaabb");
}

TEST(PromptScheduleTest, AndJoinsPromptsWithWeights) {
  const PromptSchedule schedule = Schedule("a cat :1.2 AND [dog:cow:4] AND\na penguin : -0.5 ");
  EXPECT_THAT(schedule.texts, ElementsAre("a cat", " dog", " cow", "\na penguin"));
  EXPECT_THAT(schedule.at(4), ElementsAre(PromptSchedule::Part{0, 1.2}, PromptSchedule::Part{1, 1},
                                          PromptSchedule::Part{3, -0.5}));
  EXPECT_THAT(schedule.at(5), ElementsAre(PromptSchedule::Part{0, 1.2}, PromptSchedule::Part{2, 1},
                                          PromptSchedule::Part{3, -0.5}));
  EXPECT_EQ(schedule.at(99), schedule.at(9));
  for (const char* prompt : {"a SAND castle", "ANDROID", "rock and roll", "AND_", "ÉAND x", "a AND水"}) {
    EXPECT_THAT(Schedule(prompt).texts, ElementsAre(prompt));
  }
  EXPECT_THAT(Schedule("a AND b", 3, /*joins=*/false).texts, ElementsAre("a AND b"));
}

void ExpectRefused(const std::string& prompt, const std::string& text) {
  const auto schedule = ScheduleA1111Prompt(prompt, {1000, 1000, 1}, true, "params.prompt");
  ASSERT_FALSE(schedule.ok()) << prompt;
  EXPECT_EQ(ErrorReason(schedule.status()), "INVALID_FIELD");
  EXPECT_EQ(GetErrorDetails(schedule.status())["field"], "params.prompt");
  EXPECT_THAT(std::string(schedule.status().message()), HasSubstr(text)) << prompt;
}

TEST(PromptScheduleTest, ThereAreLimits) {
  std::string alternatives = "[", deep, joined;
  for (size_t i = 0; i <= kMaxScheduledTexts; ++i) absl::StrAppend(&alternatives, i, "|");
  for (int i = 0; i <= kMaxPromptNesting; ++i) deep += i % 2 == 0 ? "[|" : "(";
  for (size_t i = 0; i <= kMaxPromptParts; ++i) joined += " AND x";
  ExpectRefused(alternatives + "]", "64 texts");
  ExpectRefused(deep, "deeper than 64");
  ExpectRefused(joined, "at most 8");
  ExpectRefused("a :101 AND b", "weight of 101");
}

// No text takes long or breaks anything: what is not understood is still there.
TEST(PromptScheduleTest, AnyBytesAreTaken) {
  uint64_t state = 7;
  auto random = [&](size_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<size_t>(state >> 33) % n;
  };
  constexpr absl::string_view kBytes = "[](){}:|\\ ab01.AND\xff";
  for (int i = 0; i < 20000; ++i) {
    std::string prompt;
    for (size_t n = random(40); n > 0; --n) prompt += kBytes[random(kBytes.size())];
    const auto schedule = ScheduleA1111Prompt(prompt, {7, 7, 1}, true, "params.prompt");
    if (!schedule.ok()) continue;
    EXPECT_EQ(schedule->steps.size(), 7u);
    for (const auto& parts : schedule->steps) {
      for (const auto& part : parts) ASSERT_LT(part.text, schedule->texts.size());
    }
  }
  const std::string open(60, '['), bars(1 << 14, '|');
  EXPECT_EQ(Schedule(open + bars).texts.size(), 1u);
}

}  // namespace
}  // namespace latentd
