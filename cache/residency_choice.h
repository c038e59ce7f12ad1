// What a lock on a device gets of a record's blocks, and what it asks of the device's memory for that, in
// which order: the policy of residency. ModelCache moves by it, and so does a plan of what would happen.
#ifndef LATENTD_CACHE_RESIDENCY_CHOICE_H_
#define LATENTD_CACHE_RESIDENCY_CHOICE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/residency_plan.h"
#include "cache/resource.h"

namespace latentd {

enum class ResidencyMode {
  kAuto,    // all of it where there is room beside the working memory, else a part, and the rest is streamed
  kFull,    // all of it, or an error
  kStream,  // only what has to stay
};

struct ResidencyWish {
  std::vector<ResourceBlock> blocks;  // what a whole copy is made of
  int64_t working_bytes = 0;          // activations of the work that the lock is for
  ResidencyMode mode = ResidencyMode::kAuto;
  int32_t ring_slots = 2;
  std::vector<bool> chosen = {};  // when not empty: these (and what stays) instead of `mode`, and no ring
};

// A copy that is on a device already.
struct ResidentPart {
  bool any = false;
  int64_t bytes = 0;
  std::vector<bool> resident = {};  // by block
};

// A device's memory, as one who moves a record there deals with it. What is there of the record is held by
// the mover, so that it does not go, unless he lets it go. He keeps what he is promised.
class MoversRoom {
 public:
  enum class For { kWork, kWeights };

  virtual ~MoversRoom() = default;

  // Promises bytes at once, making room. Errors: those of MemoryBudget::TryReserve.
  virtual absl::Status TryPromise(For purpose, int64_t bytes) = 0;
  // The same for as long as the mover may wait.
  virtual absl::Status Promise(For purpose, int64_t bytes) = 0;
  virtual int64_t ObtainableBytes() = 0;

  virtual ResidentPart WhatIsThere() = 0;
  // From now on what is there may go to make room; and not any more.
  virtual void Unpin() = 0;
  virtual void Pin() = 0;
  // Gives what is there up. False when others use it.
  virtual bool LetGo() = 0;
};

// Promises all that the wish takes: working memory; then, for kWeights, what is to be resident and is not
// there yet, and the ring. When this is OK, `there` is what of the record is kept, and the last promise for
// kWeights is of so many bytes: PromisedBytes(plan, there). Errors: those of the room.
absl::StatusOr<ResidencyPlan> ChooseResidency(const ResidencyWish& wish, MoversRoom& room,
                                              ResidentPart* there);

inline int64_t PromisedBytes(const ResidencyPlan& plan, const ResidentPart& there) {
  return plan.bytes() - there.bytes;
}

}  // namespace latentd

#endif  // LATENTD_CACHE_RESIDENCY_CHOICE_H_
