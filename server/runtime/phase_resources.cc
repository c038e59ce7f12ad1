#include "server/runtime/phase_resources.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/working_memory.h"
#include "patcher/overlay.h"
#include "server/server_core.h"
#include "spdlog/spdlog.h"

namespace latentd {
namespace {

// A budget said no, and which one; else memory itself was not there.
bool IsRefusal(const absl::Status& status) { return GetErrorDetails(status).count("budget") != 0; }

int64_t Number(const absl::Status& status, const char* name) {
  const ErrorDetails details = GetErrorDetails(status);
  const auto it = details.find(name);
  int64_t value = 0;
  return it != details.end() && absl::SimpleAtoi(it->second, &value) ? value : 0;
}

// A budget's refusal: another way may need less.
bool IsShort(const absl::Status& status) { return IsOutOfMemory(status) && IsRefusal(status); }

// Of what was asked for without patience. Somebody else may also be at work on what is wanted: no other way
// is needed then, only time.
bool WouldHaveToWait(const absl::Status& status) {
  return IsShort(status) || absl::IsDeadlineExceeded(status);
}

// Rows of it; 0 without any.
int64_t WidestSidecar(const ComponentLayout& layout, const Overlay& overlay) {
  int64_t widest = 0;
  for (size_t i = 0; i < layout.tensors().size(); ++i) {
    const Sidecar* sidecar = overlay.sidecar(Slot{static_cast<int32_t>(i)});
    if (sidecar != nullptr) widest = std::max(widest, sidecar->down.size(0));
  }
  return widest;
}

}  // namespace

bool IsOutOfMemory(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  return reason == "OUT_OF_MEMORY" || reason == "DEVICE_OUT_OF_MEMORY" || reason == "BUDGET_EXHAUSTED" ||
         reason == "BUDGET_CYCLE" || reason == "MODEL_EXCEEDS_BUDGET" || IsPromiseExceeded(status);
}

std::string MeasurementKey(const OpenModel& model, const Component& component, const Run& run, size_t phase,
                           const PhaseOptions& options, const Device& device, ComputeType compute) {
  const ComponentLayout& layout = *component.layout;
  std::string key = absl::StrCat(std::string(model.pipeline->family()), "/", component.name, "/",
                                 layout.parameter_count(), ":", layout.tensors().size(), "/",
                                 StorageTypes(component), "/", run.ShapeKey(phase, component.name));
  if (options.tile != 0) absl::StrAppend(&key, "/tile", options.tile);
  if (compute != ComputeType::kFp32) absl::StrAppend(&key, "/", ComputeTypeName(compute));
  if (options.beside_rank != 0) absl::StrAppend(&key, "/rank", options.beside_rank);
  return absl::StrCat(key, "/", std::string(DeviceKindName(device.kind())));
}

PhaseResources::PhaseResources(Setup setup)
    : setup_(std::move(setup)),
      component_(setup_.model->component(setup_.component)),
      compute_(setup_.core->ComputeOf(*setup_.device, component_)) {
  way_.tile = setup_.tiles.first;
  had_ = way_;
}

// ----------------------------------------------------------------------------------------------------
// measures

void PhaseResources::Announce(v1::JobEvent::Adapted::Measure measure, const absl::Status& reason) {
  v1::JobEvent::Adapted adapted;
  adapted.set_measure(measure);
  adapted.set_component(setup_.component);
  adapted.set_device(setup_.device->name());
  adapted.set_reason(std::string(reason.message()));
  spdlog::info("memory short session={} component={} device={} measure={} reason={}", setup_.owner,
               setup_.component, setup_.device->name(), v1::JobEvent::Adapted::Measure_Name(measure),
               ErrorReason(reason));
  setup_.on_adapted(std::move(adapted));
}

void PhaseResources::AnnounceWay(const Way& way, const absl::Status& reason) {
  if (way.streams && !had_.streams) Announce(v1::JobEvent::Adapted::MEASURE_STREAMED, reason);
  if (way.tile != had_.tile) Announce(v1::JobEvent::Adapted::MEASURE_TILED, reason);
  had_ = way;
}

bool PhaseResources::Next(Way& way, const absl::Status& status) const {
  const Device& device = *setup_.device;
  const ErrorDetails details = GetErrorDetails(status);
  const auto budget = details.find("budget");
  const bool device_is_short = budget == details.end() || budget->second == device.budget().name();
  if (!device_is_short) return false;
  // What leaves no room for the least of weights is not helped by streaming them.
  const bool beyond_the_cap = budget != details.end() &&
                              Number(status, "needed_bytes") > Number(status, "cap_bytes") &&
                              Number(status, "needed_bytes") == working_bytes_;
  if (!way.streams && !beyond_the_cap && !device.uses_host_memory() &&
      setup_.core->config.residency != "full") {
    way.streams = true;
    return true;
  }
  if (!setup_.tiles.may_shrink) return false;
  const int64_t smaller = setup_.run->SmallerTile(way.tile);
  if (smaller == 0) return false;
  way = {.streams = false, .tile = smaller};  // with less to compute on, the weights may fit again
  return true;
}

absl::Status PhaseResources::Adapt(const absl::Status& status) {
  Release();
  Device& device = *setup_.device;
  Measurements& measurements = *setup_.core->measurements;
  if (IsPromiseExceeded(status)) {
    // Acquire finds more, or another way.
    measurements.RecordFailure(measurement_key_, Number(status, "needed_bytes"));
    spdlog::info("more memory than promised session={} component={} device={}: {}", setup_.owner,
                 setup_.component, setup_.device->name(), std::string(status.message()));
    return absl::OkStatus();
  }
  if (IsRefusal(status)) return status;  // Acquire has tried all there is
  // What was promised was there and did not do: perhaps it was measured on a luckier run.
  measurements.Forget(measurement_key_);
  if (!evicted_) {
    evicted_ = true;
    const int64_t freed = device.uses_host_memory()
                              ? setup_.core->cache->Trim(MemoryBudget::kUnlimited)
                              : setup_.core->cache->Offload(device, MemoryBudget::kUnlimited);
    if (freed > 0) {
      Announce(v1::JobEvent::Adapted::MEASURE_EVICTED, status);
      return absl::OkStatus();
    }
  }
  if (!Next(way_, status)) return status;
  AnnounceWay(way_, status);
  return absl::OkStatus();
}

absl::Status PhaseResources::Acquire(std::vector<PatchReport>* reports) {
  // What was given up for somebody's sake is waited for as long as it takes; the job's own time limit stands.
  deadline_ = gave_way_ ? absl::InfiniteFuture() : absl::Now() + setup_.core->config.memory_wait_timeout;
  while (true) {
    const absl::Status status = AcquireOneWay(reports);
    if (status.ok() || !IsOutOfMemory(status)) return status;
    RETURN_IF_ERROR(Adapt(status));
  }
}

absl::Status PhaseResources::AcquireOneWay(std::vector<PatchReport>* reports) {
  ServerCore& core = *setup_.core;
  RETURN_IF_ERROR(LockComponent());
  absl::Status status = Try(way_, Patience::kNone, reports);
  if (!WouldHaveToWait(status)) return status;
  const ErrorDetails details = GetErrorDetails(status);
  const auto budget = details.find("budget");
  const MemoryWants::Want want(&core.wants, budget == details.end() ? "" : budget->second, setup_.priority);
  if (core.LetParkedGiveWay() > 0) {
    status = Try(way_, Patience::kNone, reports);
    if (!WouldHaveToWait(status)) return status;
  }
  Way next = way_;
  if (IsShort(status) && Next(next, status)) {
    const absl::Status other = TryFrom(next, Patience::kNone, reports, status);
    if (!WouldHaveToWait(other)) return other;
  }
  return TryFrom(way_, Patience::kWaits, reports, status);
}

absl::Status PhaseResources::TryFrom(const Way& first, Patience patience, std::vector<PatchReport>* reports,
                                     const absl::Status& reason) {
  Way way = first;
  while (true) {
    const absl::Status status = Try(way, patience, reports);
    if (status.ok()) {
      way_ = way;
      AnnounceWay(way, reason);
      return status;
    }
    if (!IsShort(status) || !Next(way, status)) return status;
  }
}

absl::Status PhaseResources::Try(const Way& way, Patience patience, std::vector<PatchReport>* reports) {
  if (way.tile != options_.tile) account_->ForgetPeak();  // what is measured is another phase's
  options_.tile = way.tile;
  streams_ = way.streams;
  const absl::Status status = TryAcquire(patience, reports);
  if (!status.ok()) ReleaseDevice();
  return status;
}

absl::Status PhaseResources::LockComponent() {
  if (handle_) return absl::OkStatus();
  ServerCore& core = *setup_.core;
  const LockRequest request = setup_.model->ComponentRequest(component_.name);
  auto lock = [&](Patience patience) {
    return core.cache->Lock(request.key, request.loader,
                            {.owner = setup_.owner,
                             .deadline = Until(patience),
                             .stop = setup_.stop,
                             .progress = setup_.on_loading});
  };
  auto handle = lock(Patience::kNone);
  if (WouldHaveToWait(handle.status()) && ErrorReason(handle.status()) != "MODEL_EXCEEDS_BUDGET") {
    const bool short_of_memory = IsOutOfMemory(handle.status());
    const MemoryWants::Want want(&core.wants, short_of_memory ? core.ram->name() : "", setup_.priority);
    core.LetParkedGiveWay();
    handle = lock(Patience::kWaits);
  }
  RETURN_IF_ERROR(handle.status());
  handle_ = std::move(*handle);
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------------------- one
// attempt

absl::StatusOr<std::vector<PatchSpec>> PhaseResources::Specs(Patience patience) {
  std::vector<PatchSpec> specs;
  if (!component_.patch_target) return specs;
  for (const HeldLora& lora : *setup_.loras) {
    PatchSpec spec;
    spec.name = lora.name;
    spec.weight = lora.ActiveAt(progress_) ? lora.weight : 0;
    spec.blocks = lora.blocks;
    spec.match = lora.report.match;
    spec.handle = lora.handle.Share();
    spec.patch = std::static_pointer_cast<const ModelPatch>(spec.handle.resource());
    // Merging is done in host memory; what is computed beside the weights has to be where they are.
    const bool beside =
        Applies(lora) && (setup_.patch_mode != PatchMode::kDirect || !handle_.As<WeightSet>().is_plain());
    if (beside && !setup_.device->uses_host_memory()) {
      ASSIGN_OR_RETURN(spec.residency,
                       setup_.core->cache->LockOnDevice(spec.handle, *setup_.device,
                                                        {.owner = setup_.owner,
                                                         .deadline = deadline_,
                                                         .stop = setup_.stop,
                                                         .may_wait = patience == Patience::kWaits}));
      spec.patch = std::static_pointer_cast<const ModelPatch>(spec.residency.resource());
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

int64_t PhaseResources::KeptBytes() const {
  int64_t bytes = 0;
  for (const Reservation& kept : kept_) bytes += kept.bytes();
  return bytes;
}

absl::StatusOr<DeviceLock> PhaseResources::LockWith(int64_t working_bytes, Patience patience) {
  const Config& config = setup_.core->config;
  return setup_.core->cache->LockOnDevice(
      handle_, *setup_.device,
      {.owner = setup_.owner,
       .working_bytes = std::max<int64_t>(0, working_bytes - KeptBytes()),
       .mode = config.residency == "stream" || streams_ ? ResidencyMode::kStream
               : config.residency == "full"             ? ResidencyMode::kFull
                                                        : ResidencyMode::kAuto,
       .ring_slots = static_cast<int32_t>(config.ring_blocks),
       .deadline = deadline_,
       .stop = setup_.stop,
       .may_wait = patience == Patience::kWaits});
}

int64_t PhaseResources::LeastOfWeights() const {
  if (setup_.device->uses_host_memory()) return 0;  // locked already
  const auto slots = static_cast<int32_t>(setup_.core->config.ring_blocks);
  const std::vector<ResourceBlock> blocks = handle_.resource()->device_blocks();
  const bool whole = setup_.core->config.residency == "full";
  return PlanResidency(blocks, whole ? MemoryBudget::kUnlimited : 0, slots).bytes();
}

absl::Status PhaseResources::TooLittleRoom(const WorkingPromise& promise, int64_t room) const {
  const MemoryBudget& budget = setup_.device->budget();
  const int64_t cap = budget.stats().cap_bytes, needed = promise.at_least;
  const bool never = needed > cap;
  return MakeError(
      never ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kResourceExhausted,
      never ? "MODEL_EXCEEDS_BUDGET" : "BUDGET_EXHAUSTED",
      absl::StrCat("working memory of ", component_.name, " takes more than ", needed, " bytes of ",
                   budget.name(), ", as was measured; ", std::max<int64_t>(0, room), " of ", cap,
                   " bytes can be had for it: ask for less, or raise the cap"),
      {{"budget", budget.name()},
       {"what", absl::StrCat("working memory of ", component_.name)},
       {"needed_bytes", absl::StrCat(needed)},
       {"held_bytes", absl::StrCat(cap - std::max<int64_t>(0, room))},
       {"cap_bytes", absl::StrCat(cap)}});
}

absl::StatusOr<DeviceLock> PhaseResources::LockWorking(Patience patience) {
  MemoryBudget& budget = setup_.device->budget();
  const int64_t estimate = setup_.run->WorkingBytes(setup_.phase, component_.name, options_);
  const WorkingPromise promise = setup_.core->measurements->Promise(measurement_key_, estimate);
  working_bytes_ = promise.bytes;
  auto lock = LockWith(promise.bytes, promise.measured ? patience : Patience::kNone);
  if (promise.measured || !WouldHaveToWait(lock.status())) return lock;
  // A guess is no limit.
  if (patience == Patience::kNone) {
    const int64_t room = budget.ObtainableBytes() + KeptBytes() - LeastOfWeights();
    if (room >= promise.bytes || !promise.IsWorthATry(room, WorkingPromise::kHalf)) return lock;
    return LockWith(room, Patience::kNone);
  }
  // Ever less is waited for, as long as it is refused before its time: then no wait could end well.
  constexpr int64_t kSteps = 32;
  const absl::Status refusal = lock.status();
  int64_t bytes = promise.bytes;
  for (; promise.IsWorthATry(bytes, WorkingPromise::kLeastShare);
       bytes -= std::max<int64_t>(1, promise.bytes / kSteps)) {
    lock = LockWith(bytes, Patience::kWaits);
    if (!IsShort(lock.status()) || absl::Now() >= deadline_) return lock;
  }
  return promise.at_least > 0 ? TooLittleRoom(promise, bytes) : refusal;
}

absl::Status PhaseResources::TryAcquire(Patience patience, std::vector<PatchReport>* reports) {
  ServerCore& core = *setup_.core;
  const ModelKey key = setup_.model->ComponentRequest(component_.name).key;
  // What goes beside the weights first: weights take the room that is left, and can be streamed.
  std::vector<PatchReport> counted = *reports;  // an attempt that fails counts nothing, a repeated one once
  ASSIGN_OR_RETURN(std::vector<PatchSpec> specs, Specs(patience));
  const auto& host = handle_.As<WeightSet>();
  // Merged weights may be larger than those they stand for where these are not plain: no room in a ring.
  const bool beside = setup_.patch_mode != PatchMode::kDirect || !host.is_plain();
  auto apply = [&](std::vector<bool> resident) -> absl::Status {
    if (specs.empty()) return absl::OkStatus();
    ASSIGN_OR_RETURN(overlay_, LayerPatcher::Apply(host, *component_.patch_target, std::move(specs),
                                                   {.mode = setup_.patch_mode,
                                                    .compute = ScalarTypeOf(compute_),
                                                    .device = setup_.device,
                                                    .resident = std::move(resident),
                                                    .cache = core.cache.get(),
                                                    .component = key,
                                                    .model = setup_.model->id,
                                                    .owner = setup_.owner,
                                                    .deadline = Until(patience),
                                                    .stop = setup_.stop},
                                                   &counted));
    return absl::OkStatus();
  };
  if (beside) RETURN_IF_ERROR(apply({}));
  options_.beside_rank = overlay_ == nullptr ? 0 : WidestSidecar(*component_.layout, *overlay_);
  measurement_key_ = MeasurementKey(*setup_.model, component_, *setup_.run, setup_.phase, options_,
                                    *setup_.device, compute_);
  ASSIGN_OR_RETURN(residency_, setup_.works ? LockWorking(patience) : LockWith(0, patience));
  const auto& weights = residency_.As<WeightSet>();
  const ResidencyPlan& plan = residency_.plan();
  if (!beside) RETURN_IF_ERROR(apply(plan.resident));
  for (size_t i = 0; i < counted.size(); ++i) {
    const bool any = counted[i].direct_tensors + counted[i].sidecar_tensors >
                     (*reports)[i].direct_tensors + (*reports)[i].sidecar_tensors;
    if (any && counted_.insert(counted[i].name).second) (*reports)[i] = counted[i];
  }
  if (plan.streams()) {
    auto source = [&host, overlay = overlay_.get()](Slot slot) -> const at::Tensor& {
      const at::Tensor* merged = overlay == nullptr ? nullptr : overlay->merged_on_host(slot);
      return merged == nullptr ? host[slot].data : *merged;
    };
    ASSIGN_OR_RETURN(stream_, WeightStream::Create(host, std::move(source), plan, *setup_.device));
  }
  view_ = std::make_unique<WeightView>(weights, overlay_.get(), ScalarTypeOf(compute_), stream_.get());
  view_->StopWith(setup_.stop);

  const int64_t promised = residency_.working_bytes() + KeptBytes();
  const bool seen = setup_.device->kind() != DeviceKind::kCuda;
  account_->set_limit(seen && promised > 0 ? promised : MemoryAccount::kNoLimit);
  const auto measured = core.measurements->Find(measurement_key_);
  meters_ = !seen && (!measured || measured->working_bytes == 0);

  report_.set_component(component_.name);
  report_.set_device(setup_.device->name());
  report_.set_compute(std::string(ComputeTypeName(compute_)));
  report_.set_gemm(std::string(GemmName(*setup_.device)));
  report_.set_working_bytes(promised);
  report_.set_tiled(options_.tile != 0);
  report_.set_tile(static_cast<int>(options_.tile));
  if (!setup_.device->uses_host_memory()) {
    int64_t full = 0;
    for (const ResourceBlock& block : host.device_blocks()) full += block.bytes;
    report_.set_full_bytes(full);
    report_.set_resident_bytes(plan.resident_bytes);
  }
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------------------- letting
// go

bool PhaseResources::SetProgress(double progress) {
  const double before = std::exchange(progress_, progress);
  const bool changes = std::any_of(setup_.loras->begin(), setup_.loras->end(), [&](const HeldLora& lora) {
    return lora.report.matched.count(component_.name) != 0 &&
           lora.ActiveAt(before) != lora.ActiveAt(progress);
  });
  if (changes) {
    ReleaseDevice();
    account_->ForgetPeak();  // with other patches it is another phase's
  }
  return changes;
}

bool PhaseResources::ShouldGiveWay() const {
  const MemoryWants& wants = setup_.core->wants;
  return (residency_ && wants.Above(setup_.priority, setup_.device->budget().name())) ||
         (handle_ && wants.Above(setup_.priority, setup_.core->ram->name()));
}

void PhaseResources::GiveWay() {
  gave_way_ = true;
  spdlog::debug("gives way session={} component={}", setup_.owner, setup_.component);
  if (setup_.core->wants.Above(setup_.priority, setup_.core->ram->name())) {
    Release();
  } else {
    ReleaseDevice();
  }
}

void PhaseResources::ReleaseDevice() {
  view_ = nullptr;
  stream_ = nullptr;
  overlay_ = nullptr;
  if (!residency_) return;
  // What slices have computed so far stays, and so does its promise.
  const int64_t more = account_->bytes() - KeptBytes();
  if (more > 0) kept_.push_back(residency_.TakeWorking(more));
  residency_.Release();
}

void PhaseResources::Release() {
  ReleaseDevice();
  handle_.Release();
}

Reservation PhaseResources::ReleaseAllBut(int64_t bytes) {
  Reservation result = residency_.TakeWorking(bytes);
  Release();
  kept_.clear();
  return result;
}

}  // namespace latentd
