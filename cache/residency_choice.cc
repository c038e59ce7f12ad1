#include "cache/residency_choice.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "cache/base/error.h"
#include "cache/memory_budget.h"

namespace latentd {
namespace {

using For = MoversRoom::For;

// Working memory first: without it nothing can run, and weights can be streamed.
absl::Status PromiseWork(int64_t bytes, MoversRoom& room) {
  if (bytes <= 0 || room.TryPromise(For::kWork, bytes).ok()) return absl::OkStatus();
  // This record's own copy may be in the way; it can come again, whole or in part.
  room.Unpin();
  const absl::Status promised = room.Promise(For::kWork, bytes);
  room.Pin();
  return promised;
}

class Choice {
 public:
  Choice(const ResidencyWish& wish, MoversRoom& room, ResidentPart* there)
      : wish_(wish),
        room_(room),
        there_(*there),
        full_(PlanResidency(wish.blocks, MemoryBudget::kUnlimited, wish.ring_slots)),
        smallest_(PlanResidency(wish.blocks, 0, wish.ring_slots)) {}

  absl::StatusOr<ResidencyPlan> Make() {
    if (!wish_.chosen.empty()) return Chosen();
    const bool all = wish_.mode == ResidencyMode::kFull || !smallest_.streams();
    if (all || wish_.mode == ResidencyMode::kAuto) {
      absl::Status promised = TryPromise(full_);
      if (!promised.ok() && all) promised = Promise(full_);
      if (promised.ok()) return full_;
      if (all) return promised;
    } else {
      // Forced streaming counts from an empty device, so that a test sees what it asked for.
      LetGo();
    }
    if (there_.any) {
      ASSIGN_OR_RETURN(std::optional<ResidencyPlan> kept, BesideWhatIsThere());
      if (kept) return *std::move(kept);
    }
    return FromNothing();
  }

 private:
  absl::Status TryPromise(const ResidencyPlan& plan) {
    return room_.TryPromise(For::kWeights, PromisedBytes(plan, there_));
  }
  absl::Status Promise(const ResidencyPlan& plan) {
    return room_.Promise(For::kWeights, PromisedBytes(plan, there_));
  }
  // False when others use it; true also when nothing is there.
  bool LetGo() {
    if (there_.any && !room_.LetGo()) return false;
    there_ = {};
    return true;
  }

  absl::StatusOr<ResidencyPlan> Chosen() {
    ResidencyPlan plan = full_;
    plan.resident_bytes = 0;
    for (size_t i = 0; i < wish_.blocks.size(); ++i) {
      plan.resident[i] = wish_.blocks[i].stays || wish_.chosen[i] || (there_.any && there_.resident[i]);
      if (plan.resident[i]) plan.resident_bytes += wish_.blocks[i].bytes;
    }
    RETURN_IF_ERROR(Promise(plan));
    return plan;
  }

  // A copy that is there keeps its blocks; the ring serves the rest. Empty when the copy had to go.
  absl::StatusOr<std::optional<ResidencyPlan>> BesideWhatIsThere() {
    ResidencyPlan plan = smallest_;
    plan.resident = there_.resident;
    plan.resident_bytes = there_.bytes;
    int32_t streamed = 0;
    plan.slot_bytes = 0;
    for (size_t i = 0; i < wish_.blocks.size(); ++i) {
      if (plan.resident[i]) continue;
      ++streamed;
      plan.slot_bytes = std::max(plan.slot_bytes, wish_.blocks[i].bytes);
    }
    plan.ring_slots = std::min(plan.ring_slots, streamed);
    if (TryPromise(plan).ok()) return plan;
    // The copy may be what the ring has no room beside.
    if (LetGo()) return std::nullopt;
    RETURN_IF_ERROR(Promise(plan));
    return plan;
  }

  absl::StatusOr<ResidencyPlan> FromNothing() {
    constexpr int kTries = 3;  // somebody else may take what was seen to be there
    for (int tries = 0; tries < kTries && wish_.mode != ResidencyMode::kStream; ++tries) {
      ResidencyPlan plan = PlanResidency(wish_.blocks, room_.ObtainableBytes(), wish_.ring_slots);
      if (TryPromise(plan).ok()) return plan;
    }
    RETURN_IF_ERROR(Promise(smallest_));
    return smallest_;
  }

  const ResidencyWish& wish_;
  MoversRoom& room_;
  ResidentPart& there_;
  const ResidencyPlan full_, smallest_;
};

}  // namespace

absl::StatusOr<ResidencyPlan> ChooseResidency(const ResidencyWish& wish, MoversRoom& room,
                                              ResidentPart* there) {
  RETURN_IF_ERROR(PromiseWork(wish.working_bytes, room));
  *there = room.WhatIsThere();
  return Choice(wish, room, there).Make();
}

}  // namespace latentd
