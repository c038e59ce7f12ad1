// The driver's own count of a device's memory (NVML), which needs no context on the device: to ask through
// CUDA would take some hundred MB of a device that nobody uses.
//
// Thread-safe. The library is part of the driver, so it is loaded when asked for, and may not be there.
#ifndef LATENTD_CACHE_CUDA_NVML_H_
#define LATENTD_CACHE_CUDA_NVML_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace latentd {

class Nvml {
 public:
  struct Memory {
    int64_t total_bytes = 0;
    int64_t used_bytes = 0;  // by all processes together, without what the driver keeps for itself
  };

  // Null where the library is not there or does not start.
  static std::shared_ptr<const Nvml> Open(const std::string& library = "libnvidia-ml.so.1");
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // The device with one of these UUIDs ("GPU-…", "MIG-…") or PCI bus ids ("00000000:65:00.0"), whichever is
  // known first; null when none is. Never by index: CUDA_VISIBLE_DEVICES renumbers for CUDA, not here.
  void* Find(const std::vector<std::string>& uuids, const std::string& pci_bus_id) const;

  // Nothing where the device does not say: some share the host's memory.
  std::optional<Memory> MemoryOf(void* device) const;

  // Processes that have a context on the device, as the driver's namespace numbers them.
  std::optional<std::vector<unsigned>> ProcessesOf(void* device) const;

 private:
  struct Calls;
  explicit Nvml(std::unique_ptr<const Calls> calls);
  const std::unique_ptr<const Calls> calls_;
};

}  // namespace latentd

#endif  // LATENTD_CACHE_CUDA_NVML_H_
