#include "server/phase_resources.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "server/server_core.h"
#include "spdlog/spdlog.h"

namespace latentd {

bool IsOutOfMemory(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  return reason == "OUT_OF_MEMORY" || reason == "DEVICE_OUT_OF_MEMORY" || reason == "BUDGET_EXHAUSTED" ||
         reason == "MODEL_EXCEEDS_BUDGET";
}

std::string MeasurementKey(const OpenModel& model, const Component& component, const GenerateParams& params,
                           const PhaseOptions& options, const Device& device) {
  // The estimate stands for the shapes: it is what the family makes of all that matters.
  return absl::StrCat(std::string(model.pipeline->family()), "/", component.name, "/",
                      component.layout->parameter_count(), "/",
                      model.pipeline->WorkingBytes(component.name, params, options), "/", params.seeds.size(),
                      "/", std::string(DeviceKindName(device.kind())));
}

PhaseResources::PhaseResources(Setup setup)
    : setup_(std::move(setup)), component_(setup_.model->component(setup_.component)) {
  if (setup_.must_tile) options_.tile = setup_.model->pipeline->SmallerTile(*setup_.params, 0);
}

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

absl::Status PhaseResources::Adapt(const absl::Status& status) {
  Release();
  Device& device = *setup_.device;
  const ErrorDetails details = GetErrorDetails(status);
  const auto budget = details.find("budget");
  const bool promise_refused = budget != details.end();
  // What was promised was there and did not do: perhaps it was measured on a luckier run.
  if (!promise_refused) setup_.core->measurements->Forget(measurement_key_);
  // A budget has evicted all it could before it refused; memory itself may be missing all the same.
  if (!evicted_ && !promise_refused) {
    evicted_ = true;
    const int64_t freed = device.uses_host_memory()
                              ? setup_.core->cache->Trim(MemoryBudget::kUnlimited)
                              : setup_.core->cache->Offload(device, MemoryBudget::kUnlimited);
    if (freed > 0) {
      Announce(v1::JobEvent::Adapted::MEASURE_EVICTED, status);
      return absl::OkStatus();
    }
  }
  const bool device_is_short = !promise_refused || budget->second == device.budget().name();
  // What leaves no room for the least of weights is not helped by streaming them.
  const auto number = [&](const char* name) {
    const auto it = details.find(name);
    int64_t value = 0;
    return it != details.end() && absl::SimpleAtoi(it->second, &value) ? value : 0;
  };
  const bool beyond_the_cap = promise_refused && number("needed_bytes") > number("cap_bytes") &&
                              number("needed_bytes") == working_bytes_;
  if (!streams_ && !beyond_the_cap && !device.uses_host_memory() && device_is_short &&
      setup_.core->config.residency != "full") {
    streams_ = true;
    Announce(v1::JobEvent::Adapted::MEASURE_STREAMED, status);
    return absl::OkStatus();
  }
  if (setup_.may_tile && device_is_short) {
    const int64_t smaller = setup_.model->pipeline->SmallerTile(*setup_.params, options_.tile);
    if (smaller > 0) {
      options_.tile = smaller;
      streams_ = false;  // with less to compute on, the weights may fit again
      Announce(v1::JobEvent::Adapted::MEASURE_TILED, status);
      return absl::OkStatus();
    }
  }
  return status;
}

absl::Status PhaseResources::Acquire(std::vector<PatchReport>* reports) {
  while (true) {
    const absl::Status status = TryAcquire(reports);
    if (status.ok() || !IsOutOfMemory(status)) return status;
    RETURN_IF_ERROR(Adapt(status));
  }
}

absl::StatusOr<std::vector<PatchSpec>> PhaseResources::Specs() {
  std::vector<PatchSpec> specs;
  if (!component_.patch_target) return specs;
  for (const HeldLora& lora : *setup_.loras) {
    PatchSpec spec;
    spec.name = lora.name;
    spec.weight = lora.ActiveAt(progress_) ? lora.weight : 0;
    spec.blocks = lora.blocks;
    spec.handle = lora.handle.Share();
    spec.patch = std::static_pointer_cast<const ModelPatch>(spec.handle.resource());
    // Merging is done in host memory; what is computed beside the weights has to be where they are.
    const bool beside =
        Applies(lora) && (setup_.patch_mode != PatchMode::kDirect || !handle_.As<WeightSet>().is_plain());
    if (beside && !setup_.device->uses_host_memory()) {
      ASSIGN_OR_RETURN(spec.residency,
                       setup_.core->cache->LockOnDevice(spec.handle, *setup_.device,
                                                        {.owner = setup_.owner, .stop = setup_.stop}));
      spec.patch = std::static_pointer_cast<const ModelPatch>(spec.residency.resource());
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

absl::Status PhaseResources::TryAcquire(std::vector<PatchReport>* reports) {
  ServerCore& core = *setup_.core;
  const Pipeline& pipeline = *setup_.model->pipeline;
  const absl::Time deadline = absl::Now() + core.config.memory_wait_timeout;
  const int64_t estimate = pipeline.WorkingBytes(component_.name, *setup_.params, options_);
  measurement_key_ = MeasurementKey(*setup_.model, component_, *setup_.params, options_, *setup_.device);
  const auto measured = core.measurements->Find(measurement_key_);
  measures_ = !measured || measured->working_bytes == 0;

  const LockRequest request = setup_.model->ComponentRequest(component_.name);
  ASSIGN_OR_RETURN(
      handle_,
      core.cache->Lock(
          request.key, request.loader,
          {.owner = setup_.owner, .deadline = deadline, .stop = setup_.stop, .progress = setup_.on_loading}));
  // What goes beside the weights first: weights take the room that is left, and can be streamed.
  std::vector<PatchReport> counted = *reports;  // an attempt that fails counts nothing, a repeated one once
  ASSIGN_OR_RETURN(std::vector<PatchSpec> specs, Specs());
  const auto& host = handle_.As<WeightSet>();
  // Merged weights may be larger than those they stand for where these are not plain: no room in a ring.
  const bool beside = setup_.patch_mode != PatchMode::kDirect || !host.is_plain();
  auto apply = [&](std::vector<bool> resident) -> absl::Status {
    if (specs.empty()) return absl::OkStatus();
    ASSIGN_OR_RETURN(overlay_, LayerPatcher::Apply(host, *component_.patch_target, std::move(specs),
                                                   {.mode = setup_.patch_mode,
                                                    .device = setup_.device,
                                                    .resident = std::move(resident),
                                                    .cache = core.cache.get(),
                                                    .component = request.key,
                                                    .model = setup_.model->id,
                                                    .owner = setup_.owner,
                                                    .deadline = deadline,
                                                    .stop = setup_.stop},
                                                   &counted));
    return absl::OkStatus();
  };
  if (beside) RETURN_IF_ERROR(apply({}));
  working_bytes_ = core.measurements->WorkingBytes(measurement_key_, estimate);
  const bool forced = core.config.residency == "stream" || streams_;
  ASSIGN_OR_RETURN(residency_,
                   core.cache->LockOnDevice(handle_, *setup_.device,
                                            {.owner = setup_.owner,
                                             .working_bytes = working_bytes_,
                                             .mode = forced ? ResidencyMode::kStream
                                                     : core.config.residency == "full" ? ResidencyMode::kFull
                                                                                       : ResidencyMode::kAuto,
                                             .ring_slots = static_cast<int32_t>(core.config.ring_blocks),
                                             .deadline = deadline,
                                             .stop = setup_.stop}));
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
  view_ = std::make_unique<WeightView>(weights, overlay_.get(), at::kFloat, stream_.get());
  view_->StopWith(setup_.stop);

  report_.set_component(component_.name);
  report_.set_device(setup_.device->name());
  report_.set_working_bytes(residency_.working_bytes());
  report_.set_tiled(options_.tile != 0);
  if (!setup_.device->uses_host_memory()) {
    int64_t full = 0;
    for (const ResourceBlock& block : host.device_blocks()) full += block.bytes;
    report_.set_full_bytes(full);
    report_.set_resident_bytes(plan.resident_bytes);
  }
  return absl::OkStatus();
}

bool PhaseResources::SetProgress(double progress) {
  const double before = std::exchange(progress_, progress);
  const bool changes = std::any_of(setup_.loras->begin(), setup_.loras->end(), [&](const HeldLora& lora) {
    return lora.report.matched.count(component_.name) != 0 &&
           lora.ActiveAt(before) != lora.ActiveAt(progress);
  });
  if (changes) ReleaseDevice();
  return changes;
}

void PhaseResources::ReleaseDevice() {
  view_ = nullptr;
  stream_ = nullptr;
  overlay_ = nullptr;
  residency_.Release();
}

void PhaseResources::Release() {
  ReleaseDevice();
  handle_.Release();
}

}  // namespace latentd
