#include "server/server_core.h"
#include "families/compute_type.h"
#include "patcher/host_gemm.h"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <set>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "cache/base/start_thread.h"
#include "cache/cuda_plugin.h"
#include "cache/memory_account.h"
#include "patcher/model_patch.h"
#include "server/runtime/machine_memory.h"
#include "server/session/session_scope.h"
#include "spdlog/spdlog.h"

namespace latentd {

std::string RandomId() {
  std::random_device device;  // getrandom(2)
  std::string id;
  for (int i = 0; i < 4; ++i) id += absl::StrCat(absl::Hex(static_cast<uint32_t>(device()), absl::kZeroPad8));
  return id;
}

PatchMode DefaultPatchMode(const Config& config) {
  if (config.patch_mode == "direct") return PatchMode::kDirect;
  if (config.patch_mode == "sidecar") return PatchMode::kSidecar;
  return PatchMode::kAuto;
}

namespace {

// Reads an uploaded file as a session would. Where memory for its values is taken by work that is going on,
// names and shapes must do, and the values are looked at by whoever uses it.
absl::Status CheckUpload(ServerCore& core, const std::string& name, const std::string& path,
                         const std::function<bool()>& cancelled) {
  ASSIGN_OR_RETURN(const LockRequest request, (LoraFile{name, "", 0, path}.Request()));
  auto room = core.ram->TryReserve({.bytes = request.loader.estimated_bytes,
                                    .use = MemoryUse::kPatches,
                                    .owner = absl::StrCat("upload ", name),
                                    .what = absl::StrCat("LoRA ", name)});
  if (room.ok()) return request.loader.load(LoadContext(cancelled, [](int64_t, int64_t) {})).status();
  if (ErrorReason(room.status()) != "BUDGET_EXHAUSTED") return room.status();
  ASSIGN_OR_RETURN(const std::shared_ptr<const WeightFiles> files, WeightFiles::Open(path));
  return WithPrefix(ModelPatch::Summarize(*files).status(), absl::StrCat("LoRA ", name, ": "));
}

absl::StatusOr<std::unique_ptr<UploadStore>> OpenUploads(ServerCore* core) {
  UploadStore::Options options{.folder = core->config.upload_dir,
                               .max_bytes = core->config.upload_max_bytes,
                               .total_bytes = core->config.upload_total_bytes,
                               .ttl = core->config.upload_ttl};
  options.check = [core](const std::string& name, const std::string& path,
                         const std::function<bool()>& cancelled) {
    return CheckUpload(*core, name, path, cancelled);
  };
  // A record that nobody holds would keep the removed file's bytes on the disk.
  options.on_gone = [core](const std::string& name) {
    if (core->pins == nullptr) return;  // at start nothing is loaded
    auto ids = core->pins->Ids(name);
    if (!ids.ok()) return;
    for (const std::string& id : *ids) core->cache->Drop({id, ""});
  };
  return UploadStore::Open(std::move(options));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServerCore>> ServerCore::Create(const Config& config) {
  // Its parts make threads in their constructors, which throw where the system gives none.
  try {
    return Make(config);
  } catch (const std::system_error& e) {
    return NoThread("the server", e.code().message());
  }
}

absl::StatusOr<std::unique_ptr<ServerCore>> ServerCore::Make(const Config& config) {
  MemoryAccount::Install();
  auto core = std::make_unique<ServerCore>();
  core->config = config;
  core->instance = RandomId();
  core->start_time = absl::Now();
  core->ram = std::make_unique<RamBudget>(config.ram_cap == 0 ? MemoryBudget::kUnlimited : config.ram_cap);
  core->requests = std::make_unique<RequestMemory>(
      std::max(config.max_request_bytes, config.max_message_bytes), core->ram.get());
  ASSIGN_OR_RETURN(const DeviceChoice choice, ConfiguredDevices(config));
  core->device_choice = choice.reason;
  spdlog::info("devices={}: {}", absl::StrJoin(choice.specs, ","), choice.reason);
  std::vector<Device*> devices;
  for (const std::string& spec : choice.specs) {
    ASSIGN_OR_RETURN(std::unique_ptr<Device> device, MakeDevice(spec, core->ram.get()));
    for (const auto& other : core->devices) {
      if (other->name() == device->name()) {
        return absl::InvalidArgumentError(absl::StrCat("device ", device->name(), " is given twice"));
      }
    }
    devices.push_back(device.get());
    core->devices.push_back(std::move(device));
  }
  if (devices.empty()) return absl::InvalidArgumentError("no device is configured");
  if (config.ram_cap == 0) {
    ASSIGN_OR_RETURN(const int64_t machine, MachineRamBytes());
    std::vector<int64_t> gpus;
    for (Device* device : devices) {
      if (device->kind() == DeviceKind::kCuda) gpus.push_back(device->budget().stats().cap_bytes);
    }
    const RamCap cap = DefaultRamCap(machine, gpus);
    core->ram->set_cap(cap.bytes);
    spdlog::info("ram_cap={} of {}: {}", cap.bytes, machine, cap.rule);
  }
  core->cache = std::make_unique<ModelCache>(core->ram.get(), devices);
  core->mapping_reliever =
      std::make_unique<MappingReliever>([cache = core->cache.get()] { return cache->Trim(1) > 0; });
  core->cache->set_conditioning_cap(config.conditioning_cap);
  std::vector<std::string> lora_roots = config.lora_roots;
  if (!config.upload_dir.empty()) {
    ASSIGN_OR_RETURN(core->uploads, OpenUploads(core.get()));
    // Last, so that it hides nothing of the others.
    lora_roots.push_back(core->uploads->folder());
  }
  core->catalog =
      std::make_unique<Catalog>(config.model_roots, lora_roots, config.embedding_roots, config.follow_links);
  core->measurements = std::make_unique<Measurements>(StateFolder(config));
  core->pins = std::make_unique<PinBoard>(core.get());
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int threads = config.threads_per_device > 0 ? static_cast<int>(config.threads_per_device)
                                                    : std::max(1, cores / static_cast<int>(devices.size()));
  const AgeingPolicy ageing{.level = config.priority_ageing,
                            .max_priority = static_cast<int>(config.max_priority)};
  SetHostGemm(config.cpu_gemm == "mkl"      ? HostGemm::kMkl
              : config.cpu_gemm == "onednn" ? HostGemm::kOneDnn
                                            : BestHostGemm());
  for (Device* device : devices) {
    RETURN_IF_ERROR(CheckComputeSetting(config.compute, *device));
    if (device->kind() == DeviceKind::kCuda) SetTorchForGpus();
    core->executors.push_back(std::make_unique<Executor>(device, threads, ageing));
  }
  const auto loaders = static_cast<int>(config.loader_threads);
  // A session waits for memory in at most one place, so this many can never all be stuck.
  ASSIGN_OR_RETURN(core->workers,
                   WorkerPool::Create(loaders, loaders + static_cast<int>(config.max_sessions) + 16));
  core->upload_watch = std::make_unique<UploadWatch>(core.get());
  core->sessions = std::make_unique<SessionRegistry>(core.get());
  return core;
}

std::string StateFolder(const Config& config) {
  if (config.state_dir != "auto") return config.state_dir;
  auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  // systemd's own comes first; it may name several.
  if (const std::string given = variable("STATE_DIRECTORY"); !given.empty())
    return given.substr(0, given.find(':'));
  if (const std::string xdg = variable("XDG_STATE_HOME"); !xdg.empty()) return absl::StrCat(xdg, "/latentd");
  if (const std::string home = variable("HOME"); !home.empty())
    return absl::StrCat(home, "/.local/state/latentd");
  return "";
}

ServerCore::~ServerCore() {
  if (upload_watch != nullptr) upload_watch->Drain();
  if (sessions != nullptr) sessions->Drain(absl::InfinitePast());
}

namespace {

// Names of the devices that have a copy of a record.
std::set<std::string> DevicesWith(const ModelCache& cache, const ModelKey& key) {
  std::set<std::string> names;
  const auto record = cache.Find(key);
  if (!record) return names;
  for (const ResidencyStats& there : record->residency) names.insert(there.device);
  return names;
}

}  // namespace

Executor& ServerCore::PlaceEncoder(const OpenModel& model, const std::string& component, Executor& home) {
  if (executors.size() == 1 || home.load() == 0) return home;
  const std::set<std::string> holds = DevicesWith(*cache, model.part(component).key);
  Executor* idle = nullptr;
  for (const auto& executor : executors) {
    if (!executor->idle() || !executor->device().Check().ok()) continue;
    // Another kind of device gives other last bits, and which one is idle is no part of a request.
    if ((executor->device().kind() == DeviceKind::kCuda) != (home.device().kind() == DeviceKind::kCuda))
      continue;
    if (executor->device().uses_host_memory() || holds.count(executor->device().name()) != 0)
      return *executor;
    if (idle == nullptr) idle = executor.get();
  }
  return idle == nullptr ? home : *idle;
}

Executor& ServerCore::WouldPlace(const OpenModel& model) const {
  if (executors.size() == 1) return *executors[0];
  const std::set<std::string> holds =
      DevicesWith(*cache, model.part(model.pipeline->denoiser_component()).key);
  constexpr int kLost = 1 << 20;
  auto cost = [&](const std::unique_ptr<Executor>& e) {
    const int copy = e->device().uses_host_memory() || holds.count(e->device().name()) != 0 ? 0 : 1;
    // A copy that has to be made weighs as much as a job that is in the way.
    return std::make_pair(e->jobs() + copy + (e->device().Check().ok() ? 0 : kLost), copy);
  };
  return **std::min_element(executors.begin(), executors.end(),
                            [&](const auto& a, const auto& b) { return cost(a) < cost(b); });
}

Executor& ServerCore::Place(const OpenModel& model) {
  MutexLock lock(&placing);
  Executor& executor = WouldPlace(model);
  executor.AddJob();
  return executor;
}

void ServerCore::DropChanged(const OpenModel& model) {
  bool changed = false;
  for (const Component& component : model.pipeline->components()) {
    if (component.files->Check().ok()) continue;
    changed = true;
    cache->Drop({model.part(component.name).key.id, ""});
  }
  if (changed) {
    spdlog::warn("model {}: its files were changed while they were in use; what was made of {} is dropped",
                 model.name, model.id);
    cache->Drop({model.id, ""});
  }
  LookAtFiles();
}

void ServerCore::LookAtFiles() {
  for (const std::string& id : catalog->TakeUnused()) cache->Drop({id, ""});
  cache->DropUnfit();
}

void ServerCore::LookAtFilesOnWorker() {
  if (looking_at_files.exchange(true)) return;
  workers->Submit([this] {
    LookAtFiles();
    looking_at_files = false;
  });
}

int ServerCore::LetParkedGiveWay() {
  int count = 0;
  for (const auto& executor : executors) count += executor->LetGiveWay();
  return count;
}

absl::Status ServerCore::CheckAccepting() const {
  if (!draining) return absl::OkStatus();
  return MakeError(absl::StatusCode::kUnavailable, "SERVER_DRAINING",
                   "the server is going down and takes nothing new; try again later", {{"retry_ms", "5000"}});
}

}  // namespace latentd
