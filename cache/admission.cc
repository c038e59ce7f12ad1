#include "cache/admission.h"

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

struct Words {
  absl::StatusCode code;
  const char* reason;
  const char* why;
};

Words WordsFor(RefusalCause cause) {
  switch (cause) {
    case RefusalCause::kNever:
      return {absl::StatusCode::kFailedPrecondition, "MODEL_EXCEEDS_BUDGET",
              "it can never fit; raise the cap or use a smaller model"};
    case RefusalCause::kNoRoomNow:
      return {absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED",
              "there is no room now; try again later"};
    case RefusalCause::kNotInTime:
      return {absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED",
              "it was not given back in time; try again later"};
    case RefusalCause::kHopeless:
      return {absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED",
              "what is held for good and by the asker itself leaves no room; use fewer LoRAs, unpin what is "
              "pinned, or raise the cap"};
    case RefusalCause::kDeadlock:
      return {absl::StatusCode::kAborted, "BUDGET_CYCLE",
              "what is in the way is held by work that waits for memory too; try again"};
  }
  return {absl::StatusCode::kInternal, "", ""};
}

}  // namespace

Admission Admit(const BudgetBytes& budget, int64_t idle, int64_t wanted) {
  if (wanted > budget.cap) return Admission::kNever;
  // Nothing is had even where the cap was lowered below what is in use.
  if (wanted == 0) return Admission::kTake;
  const int64_t missing = MissingBytes(budget, wanted);
  if (missing <= 0) return Admission::kTake;
  return missing <= idle ? Admission::kMakeRoom : Admission::kNoRoomNow;
}

bool IsHopeless(int64_t cap, int64_t lasting, int64_t own, int64_t wanted) {
  return wanted > cap - lasting - own;
}

absl::Status Refusal(RefusalCause cause, const Refused& refused, const BudgetBytes& budget) {
  const Words words = WordsFor(cause);
  ErrorDetails details = {{"budget", std::string(refused.budget)},
                          {"what", std::string(refused.what)},
                          {"needed_bytes", absl::StrCat(refused.bytes)},
                          {"held_bytes", absl::StrCat(refused.held)},
                          {"cap_bytes", absl::StrCat(budget.cap)}};
  if (budget.foreign > 0) details["foreign_bytes"] = absl::StrCat(budget.foreign);
  if (cause == RefusalCause::kHopeless || refused.hopeless) details["hopeless"] = "true";
  if (cause == RefusalCause::kDeadlock) details["cycle"] = std::string(refused.cycle);
  return MakeError(
      words.code, words.reason,
      absl::StrCat(refused.what, " needs ", refused.bytes, " bytes of ", refused.budget, "; ", refused.held,
                   " of ", budget.cap, " bytes are held by running work",
                   budget.foreign > 0 ? absl::StrCat(" and ", budget.foreign, " by other processes") : "",
                   ": ", words.why),
      details);
}

std::string PurposeOfRecord(absl::string_view kind, absl::string_view key) {
  return absl::StrCat(kind, " ", key);
}

std::string PurposeOfWork(absl::string_view kind) { return absl::StrCat("working memory of ", kind); }

}  // namespace latentd
