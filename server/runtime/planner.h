// What a job would do with memory, worked out on a snapshot: the cache, the budgets and the devices are asked
// and not touched.
#ifndef LATENTD_SERVER_RUNTIME_PLANNER_H_
#define LATENTD_SERVER_RUNTIME_PLANNER_H_

#include "absl/status/statusor.h"
#include "latentd/v1/denoise.pb.h"
#include "server/server_core.h"

namespace latentd {

// Reads headers: not on an RPC thread. Errors: those of a request that could not be begun, see
// DenoiseService.Plan.
absl::StatusOr<v1::PlanResponse> PlanJob(ServerCore& core, const v1::PlanRequest& request);

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_PLANNER_H_
