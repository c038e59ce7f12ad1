#include "cache/residency_plan.h"

#include <algorithm>

namespace latentd {

ResidencyPlan PlanResidency(absl::Span<const ResourceBlock> blocks, int64_t available, int32_t ring_slots) {
  ResidencyPlan plan;
  int64_t staying = 0, movable = 0, largest = 0;
  for (const ResourceBlock& block : blocks) {
    if (block.stays || block.bytes == 0) {
      staying += block.bytes;
      continue;
    }
    movable += block.bytes;
    largest = std::max(largest, block.bytes);
  }
  plan.resident.assign(blocks.size(), true);
  plan.resident_bytes = staying + movable;
  // A ring that is no smaller than what streams through it is of no use.
  if (plan.resident_bytes <= available || 2 * largest >= movable) return plan;

  plan.slot_bytes = largest;
  plan.ring_slots = std::max(ring_slots, 2);
  while (plan.ring_slots > 2 && (plan.ring_bytes() >= movable || staying + plan.ring_bytes() > available)) {
    --plan.ring_slots;
  }
  plan.resident_bytes = staying;
  int64_t left = std::max<int64_t>(0, available - staying - plan.ring_bytes());

  // Bresenham's way of spreading: each block adds the share that can stay, and stays when a whole one is due.
  const double share = static_cast<double>(left) / static_cast<double>(movable);
  double due = 0;
  auto keep = [&](size_t i) {
    plan.resident[i] = true;
    plan.resident_bytes += blocks[i].bytes;
    left -= blocks[i].bytes;
  };
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].stays || blocks[i].bytes == 0) continue;
    plan.resident[i] = false;
    due += share * static_cast<double>(blocks[i].bytes);
    if (due < static_cast<double>(blocks[i].bytes) || blocks[i].bytes > left) continue;
    due -= static_cast<double>(blocks[i].bytes);
    keep(i);
  }
  // What rounding left over.
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!plan.resident[i] && blocks[i].bytes <= left) keep(i);
  }
  plan.slot_bytes = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!plan.resident[i]) plan.slot_bytes = std::max(plan.slot_bytes, blocks[i].bytes);
  }
  return plan;
}

}  // namespace latentd
