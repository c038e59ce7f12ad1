// What a CacheRecord holds: something immutable with a size, that can be copied to a device.
#ifndef LATENTD_CACHE_RESOURCE_H_
#define LATENTD_CACHE_RESOURCE_H_

#include <cstdint>
#include <memory>
#include <stop_token>
#include <vector>

#include "absl/status/statusor.h"

namespace latentd {

class Device;

// A part of a resource that moves to a device as a whole.
struct ResourceBlock {
  int64_t bytes = 0;  // on a device, padding included
  bool stays = true;  // needed at all times; else it may be copied anew each time that it is used
};

// Immutable after construction, so it is read from any thread without locks.
class Resource {
 public:
  virtual ~Resource() = default;

  // Bytes of host memory, as charged to the RamBudget. Constant for the life of the object.
  virtual int64_t bytes() const = 0;

  // What a copy on a device is made of, in the order of use. Constant.
  virtual std::vector<ResourceBlock> device_blocks() const { return {{bytes(), true}}; }

  // A copy in `device`'s memory of the blocks that `resident` marks; all, when it is empty. REQUIRES: what
  // stays is marked. `have` is an earlier copy on that device, or null: what it has is taken over, not copied
  // again. Checks `stop` between tensors (CANCELLED). Accounting is the caller's.
  virtual absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device& device,
                                                                 const std::vector<bool>& resident,
                                                                 const Resource* have,
                                                                 std::stop_token stop) const = 0;

  // OK while the bytes can be trusted; the errors of MappedFile::Check once the file behind them changed.
  // Looks at the file each time.
  virtual absl::Status Check() const { return absl::OkStatus(); }

  // False when the file that it is of has left its place, so that nobody who comes anew asks for this.
  virtual bool at_its_place() const { return true; }
};

}  // namespace latentd

#endif  // LATENTD_CACHE_RESOURCE_H_
