// How much host memory this process may have, and how much of it the cache takes by default.
#ifndef LATENTD_SERVER_MACHINE_MEMORY_H_
#define LATENTD_SERVER_MACHINE_MEMORY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace latentd {

// The smaller of the machine's RAM (MemTotal of /proc/meminfo) and every memory.max that cgroup v2 sets on
// the way from this process's group to the root. A container's limit so counts as the machine's RAM. `root`
// stands for "/" in tests. Errors: INTERNAL NO_MEMORY_INFO.
absl::StatusOr<int64_t> MachineRamBytes(const std::string& root = "/");

// The RAM cap of `ram_cap = "auto"`: half of the RAM less 2 GiB, at least 4 GiB, at most three quarters of
// the RAM, so that on a small machine the budget refuses before the kernel kills.
int64_t DefaultRamCap(int64_t machine_ram_bytes);

}  // namespace latentd

#endif  // LATENTD_SERVER_MACHINE_MEMORY_H_
