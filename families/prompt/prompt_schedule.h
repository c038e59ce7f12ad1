// Prompts that change from step to step, and several at a time, in the syntax of A1111:
//
//   [from:to:10]  [from:to:0.5]   `from` up to step 10, or half of the steps, then `to`
//   [to:10]  [from::10]           nothing before, nothing after
//   [a|b|c]                       a, b, c, a, … step by step
//   a :1.2 AND b :-0.5            each is predicted by itself; their differences from the unwanted prompt are
//                                 summed with these weights
//
// All of it nests, but for AND. `when` is at most the number of steps; a number with a point is a share of
// them. What does not parse so stays as it is: brackets are weights (prompt.h), "4:3" is text.
//
// Steps are counted as the program counts them, which is not quite as it documents them. A table by steps
// from 1 is made of the prompt, and looked up with steps from 0, so every change comes one step later than is
// written. With a solver that evaluates the network twice a step, both are evaluations: [a:b:10] changes at
// the fifth step. An init image takes no steps off the table: what is run begins at its beginning. One thing
// is not as there: both evaluations of a step have one prompt.
//
// Pure; any thread.
#ifndef LATENTD_FAMILIES_PROMPT_PROMPT_SCHEDULE_H_
#define LATENTD_FAMILIES_PROMPT_PROMPT_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

// Texts that one prompt may come to, over all steps and parts.
inline constexpr size_t kMaxScheduledTexts = 64;
// Parts that are joined by AND.
inline constexpr size_t kMaxPromptParts = 8;

struct PromptSchedule {
  // A text at a step.
  struct Part {
    size_t text = 0;  // index of `texts`
    double weight = 1;

    friend bool operator==(const Part&, const Part&) = default;
  };
  // Without repetition, in order of their first use; each is what ParsePrompt reads.
  std::vector<std::string> texts;
  // By step; each has as many parts as the prompt. What comes behind the last one is as the last one.
  std::vector<std::vector<Part>> steps;

  const std::vector<Part>& at(size_t step) const {
    return steps[step < steps.size() ? step : steps.size() - 1];
  }
};

// One text for all steps.
PromptSchedule UnchangingPrompt(absl::string_view text);

struct ScheduledSteps {
  int64_t asked = 1;        // the request's; at least 1
  int64_t run = 1;          // of these, without what an init image or a cut leaves out; at least 1
  int64_t evaluations = 1;  // of the network in a step
};

// Where `joins` is false, AND is a word like any other. Errors: INVALID_ARGUMENT INVALID_FIELD
// on `field`, for more than kMaxScheduledTexts texts or kMaxPromptParts parts, brackets deeper than
// kMaxPromptNesting, and weights of parts beyond ±kMaxPromptWeight.
absl::StatusOr<PromptSchedule> ScheduleA1111Prompt(absl::string_view prompt, const ScheduledSteps& steps,
                                                   bool joins, absl::string_view field);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_PROMPT_PROMPT_SCHEDULE_H_
