// Who gets bytes of a budget at once, and what those are told who do not: the policy of admission, on plain
// values. A MemoryBudget decides by it, and so does a plan of what would happen.
//
// Waits are another matter (wait_analysis.h).
#ifndef LATENTD_CACHE_ADMISSION_H_
#define LATENTD_CACHE_ADMISSION_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace latentd {

// A budget at one moment.
struct BudgetBytes {
  int64_t cap = 0;
  int64_t foreign = 0;   // taken by others than this process
  int64_t in_use = 0;    // records, and what else was promised and is there now
  int64_t reserved = 0;  // promised

  // Below 0 after the cap was lowered.
  int64_t free() const { return cap - foreign - in_use - reserved; }
  // Free, or free when what nobody holds is gone: `idle` bytes.
  int64_t Obtainable(int64_t idle) const { return std::max<int64_t>(0, free() + idle); }
  // What has to go now that the cap was lowered.
  int64_t over() const { return std::max<int64_t>(0, -free()); }
};

enum class Admission {
  kTake,       // there is room
  kMakeRoom,   // there is, when MissingBytes() of what nobody holds have gone
  kNoRoomNow,  // not before somebody lets go of something; nothing goes in vain
  kNever,      // more than the cap
};
// `idle`: bytes that can go, for nobody holds them.
Admission Admit(const BudgetBytes& budget, int64_t idle, int64_t wanted);
// More than is free: what has to go first.
inline int64_t MissingBytes(const BudgetBytes& budget, int64_t wanted) { return wanted - budget.free(); }

// True when no wait could end well: what is lasting, and what the asker itself holds, leave no room.
bool IsHopeless(int64_t cap, int64_t lasting, int64_t own, int64_t wanted);

// Why a request is refused.
enum class RefusalCause {
  kNever,      // FAILED_PRECONDITION MODEL_EXCEEDS_BUDGET
  kNoRoomNow,  // RESOURCE_EXHAUSTED BUDGET_EXHAUSTED, of one who does not wait
  kNotInTime,  // the same, of one who waited
  kHopeless,   // the same, with detail "hopeless"
  kDeadlock,   // ABORTED BUDGET_CYCLE, with detail "cycle"
};
struct Refused {
  absl::string_view budget;
  absl::string_view what;  // that the bytes were wanted for
  int64_t bytes = 0;
  int64_t held = 0;              // promised, or in records that somebody holds
  bool hopeless = false;         // of kNoRoomNow: a wait would be, too
  absl::string_view cycle = {};  // of kDeadlock: who waits for what
};
// The error, with all numbers in its details: needed_bytes, held_bytes, cap_bytes, and foreign_bytes where
// there are any.
absl::Status Refusal(RefusalCause cause, const Refused& refused, const BudgetBytes& budget);

// What bytes are wanted for, in a refusal's words.
std::string PurposeOfRecord(absl::string_view kind, absl::string_view key);
std::string PurposeOfWork(absl::string_view kind);

}  // namespace latentd

#endif  // LATENTD_CACHE_ADMISSION_H_
