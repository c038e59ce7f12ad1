#include "cache/cuda/nvml.h"

#include <dlfcn.h>

#include <type_traits>
#include <utility>

namespace latentd {
namespace {

// From NVML's documentation; its header is part of no package that the build needs. All functions return 0
// for success.
constexpr int kInsufficientSize = 7;

struct MemoryV1 {
  unsigned long long total, free, used;
};

struct MemoryV2 {
  unsigned int version;
  unsigned long long total, reserved, free, used;
};
constexpr unsigned int kMemoryV2 = sizeof(MemoryV2) | (2u << 24);

struct ProcessInfo {
  unsigned int pid;
  unsigned long long used_memory;
  unsigned int gpu_instance, compute_instance;
};

}  // namespace

struct Nvml::Calls {
  int (*init)() = nullptr;
  int (*by_uuid)(const char*, void**) = nullptr;
  int (*by_pci_bus_id)(const char*, void**) = nullptr;
  int (*memory_v1)(void*, MemoryV1*) = nullptr;
  int (*memory_v2)(void*, MemoryV2*) = nullptr;
  int (*processes)(void*, unsigned int*, ProcessInfo*) = nullptr;
  int (*shutdown)() = nullptr;
};

Nvml::Nvml(std::unique_ptr<const Calls> calls) : calls_(std::move(calls)) {}

Nvml::~Nvml() {
  if (calls_->shutdown != nullptr) calls_->shutdown();
}

std::shared_ptr<const Nvml> Nvml::Open(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  auto calls = std::make_unique<Calls>();
  const auto find = [&](auto& call, const char* name) {
    call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(handle, name));
  };
  find(calls->init, "nvmlInit_v2");
  find(calls->by_uuid, "nvmlDeviceGetHandleByUUID");
  find(calls->by_pci_bus_id, "nvmlDeviceGetHandleByPciBusId_v2");
  find(calls->memory_v1, "nvmlDeviceGetMemoryInfo");
  find(calls->memory_v2, "nvmlDeviceGetMemoryInfo_v2");
  find(calls->processes, "nvmlDeviceGetComputeRunningProcesses_v3");
  find(calls->shutdown, "nvmlShutdown");
  if (calls->init == nullptr || calls->init() != 0) return nullptr;
  return std::shared_ptr<const Nvml>(new Nvml(std::move(calls)));
}

void* Nvml::Find(const std::vector<std::string>& uuids, const std::string& pci_bus_id) const {
  void* device = nullptr;
  for (const std::string& uuid : uuids) {
    if (calls_->by_uuid != nullptr && calls_->by_uuid(uuid.c_str(), &device) == 0) return device;
  }
  if (calls_->by_pci_bus_id != nullptr && calls_->by_pci_bus_id(pci_bus_id.c_str(), &device) == 0)
    return device;
  return nullptr;
}

std::optional<Nvml::Memory> Nvml::MemoryOf(void* device) const {
  MemoryV2 v2 = {.version = kMemoryV2, .total = 0, .reserved = 0, .free = 0, .used = 0};
  if (calls_->memory_v2 != nullptr && calls_->memory_v2(device, &v2) == 0) {
    return Memory{static_cast<int64_t>(v2.total), static_cast<int64_t>(v2.used)};
  }
  // Older drivers count what they keep for themselves as used: there is more room than this says.
  MemoryV1 v1 = {};
  if (calls_->memory_v1 != nullptr && calls_->memory_v1(device, &v1) == 0) {
    return Memory{static_cast<int64_t>(v1.total), static_cast<int64_t>(v1.used)};
  }
  return std::nullopt;
}

std::optional<std::vector<unsigned>> Nvml::ProcessesOf(void* device) const {
  if (calls_->processes == nullptr) return std::nullopt;
  std::vector<ProcessInfo> infos(64);
  auto count = static_cast<unsigned int>(infos.size());
  int result = calls_->processes(device, &count, infos.data());
  if (result == kInsufficientSize) {
    infos.resize(count);
    result = calls_->processes(device, &count, infos.data());
  }
  if (result != 0) return std::nullopt;
  std::vector<unsigned> pids;
  for (unsigned int i = 0; i < count; ++i) pids.push_back(infos[i].pid);
  return pids;
}

}  // namespace latentd
