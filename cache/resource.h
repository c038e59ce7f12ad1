// What a CacheRecord holds: something immutable with a size, that can be copied to a device.
#ifndef LATENTD_CACHE_RESOURCE_H_
#define LATENTD_CACHE_RESOURCE_H_

#include <cstdint>
#include <memory>
#include <stop_token>

#include "absl/status/statusor.h"

namespace latentd {

class Device;

// Immutable after construction, so it is read from any thread without locks.
class Resource {
 public:
  virtual ~Resource() = default;

  // Bytes of host memory, as charged to the RamBudget. Constant for the life of the object.
  virtual int64_t bytes() const = 0;

  // Bytes that a full copy on a device takes. Constant.
  virtual int64_t device_bytes() const { return bytes(); }

  // A full copy in `device`'s memory. Checks `stop` between tensors (CANCELLED).
  virtual absl::StatusOr<std::shared_ptr<const Resource>> CopyTo(Device& device,
                                                                 std::stop_token stop) const = 0;

  // OK while the bytes can be trusted; DATA_LOSS once a mapped file turned out to be cut short.
  virtual absl::Status Check() const { return absl::OkStatus(); }
};

}  // namespace latentd

#endif  // LATENTD_CACHE_RESOURCE_H_
