// Which blocks of a resource live on a device, and which are copied there each time that they are used.
#ifndef LATENTD_CACHE_RESIDENCY_PLAN_H_
#define LATENTD_CACHE_RESIDENCY_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "cache/resource.h"

namespace latentd {

struct ResidencyPlan {
  std::vector<bool> resident;  // by block
  int64_t resident_bytes = 0;
  int32_t ring_slots = 0;  // buffers for the other blocks; 0 when there are none
  int64_t slot_bytes = 0;  // of each: the largest block that streams
  int64_t ring_bytes() const { return ring_slots * slot_bytes; }
  int64_t bytes() const { return resident_bytes + ring_bytes(); }
  bool streams() const { return ring_slots > 0; }
};

// The plan that uses the most of `available` bytes: everything resident where that fits; else what stays, a
// ring of at most `ring_slots` (>= 2) blocks, and as many of the others as still fit, spread evenly over the
// order of use so that copies have time between them. When even that is too much, the plan is the smallest
// there is, and bytes() says how much it takes; a resource whose blocks all stay has only one plan.
ResidencyPlan PlanResidency(absl::Span<const ResourceBlock> blocks, int64_t available, int32_t ring_slots);

}  // namespace latentd

#endif  // LATENTD_CACHE_RESIDENCY_PLAN_H_
