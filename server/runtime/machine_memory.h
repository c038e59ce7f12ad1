// How much host memory this process may have, and how much of it the cache takes by default.
#ifndef LATENTD_SERVER_RUNTIME_MACHINE_MEMORY_H_
#define LATENTD_SERVER_RUNTIME_MACHINE_MEMORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace latentd {

// The smaller of the machine's RAM (MemTotal of /proc/meminfo) and every memory.max that cgroup v2 sets on
// the way from this process's group to the root. A container's limit so counts as the machine's RAM. `root`
// stands for "/" in tests. Errors: INTERNAL NO_MEMORY_INFO.
absl::StatusOr<int64_t> MachineRamBytes(const std::string& root = "/");

struct RamCap {
  int64_t bytes = 0;
  std::string rule;  // which rule won, for the log
};

// The RAM cap of `ram_cap = "auto"`: half of the RAM less 2 GiB. Not more than what GPUs can hold besides 3
// GiB of work each, since weights pass through RAM on their way there; without a GPU, not more than 32 GiB.
// At least 4 GiB; and at most three quarters of the RAM, so that on a small machine the budget refuses before
// the kernel kills.
RamCap DefaultRamCap(int64_t machine_ram_bytes, const std::vector<int64_t>& gpu_bytes);

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_MACHINE_MEMORY_H_
