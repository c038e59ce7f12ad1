#include "server/rpc/cache_service.h"

#include <algorithm>
#include <stop_token>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "google/protobuf/util/time_util.h"
#include "server/rpc/unary.h"

namespace latentd {
namespace {

void CopyUses(const MemoryBudget::Stats& stats, google::protobuf::RepeatedPtrField<v1::MemoryUse>* uses) {
  for (size_t i = 0; i < kMemoryUses; ++i) {
    v1::MemoryUse& out = *uses->Add();
    out.set_name(std::string(MemoryUseName(static_cast<MemoryUse>(i))));
    out.set_in_use_bytes(stats.uses[i].in_use_bytes);
    out.set_reserved_bytes(stats.uses[i].reserved_bytes);
  }
}

google::protobuf::Timestamp ToTimestamp(absl::Time time) {
  return google::protobuf::util::TimeUtil::MillisecondsToTimestamp(absl::ToUnixMillis(time));
}

v1::CacheRecord ToProto(const RecordStats& record, absl::Time now) {
  v1::CacheRecord out;
  out.set_key(record.key.ToString());
  out.set_kind(record.kind);
  for (const std::string& name : record.names) out.add_names(name);
  out.set_bytes(record.bytes);
  out.set_lock_count(static_cast<int>(record.lock_count));
  for (const std::string& holder : record.holders) out.add_holders(holder);
  out.set_stale(record.stale);
  out.set_use(std::string(MemoryUseName(record.use)));
  out.set_load_ms(record.load_seconds * 1000);
  const absl::Duration idle = record.lock_count > 0 ? absl::ZeroDuration() : now - record.last_used;
  *out.mutable_idle() = google::protobuf::util::TimeUtil::MillisecondsToDuration(
      std::max<int64_t>(0, absl::ToInt64Milliseconds(idle)));
  for (const ResidencyStats& there : record.residency) {
    v1::Residency& residency = *out.add_residency();
    residency.set_device(there.device);
    residency.set_bytes(there.bytes);
    residency.set_full_bytes(there.full_bytes);
    residency.set_lock_count(static_cast<int>(there.lock_count));
  }
  return out;
}

v1::RamBudget ToProto(const MemoryBudget::Stats& stats) {
  v1::RamBudget out;
  out.set_cap_bytes(stats.cap_bytes);
  out.set_in_use_bytes(stats.in_use_bytes);
  out.set_reserved_bytes(stats.reserved_bytes);
  out.set_peak_bytes(stats.peak_bytes);
  out.set_waiting(static_cast<int>(stats.waiting));
  out.set_waits(stats.waits);
  out.set_refused(stats.refused);
  CopyUses(stats, out.mutable_uses());
  return out;
}

v1::DeviceStats ToProto(const Device& device, const DeviceStats& stats) {
  v1::DeviceStats out;
  out.set_name(device.name());
  out.set_kind(std::string(DeviceKindName(device.kind())));
  out.set_cap_bytes(stats.budget.cap_bytes);
  out.set_in_use_bytes(stats.budget.in_use_bytes);
  out.set_reserved_bytes(stats.budget.reserved_bytes);
  out.set_peak_bytes(stats.budget.peak_bytes);
  out.set_waiting(static_cast<int>(stats.budget.waiting));
  out.set_waits(stats.budget.waits);
  out.set_refused(stats.budget.refused);
  out.set_foreign_bytes(stats.budget.foreign_bytes);
  CopyUses(stats.budget, out.mutable_uses());
  out.set_allocated_bytes(stats.allocated_bytes);
  out.set_residency_bytes(stats.residency_bytes);
  out.set_copies(stats.copies);
  out.set_copied_bytes(stats.copied_bytes);
  out.set_offloads(stats.offloads);
  out.set_streamed_locks(stats.streamed_locks);
  return out;
}

// A call that its client can cancel, or its deadline.
class LoadCall : public UnaryAnswer {
 public:
  using UnaryAnswer::UnaryAnswer;
  void OnCancel() override { stop_.request_stop(); }
  std::stop_token stop_token() const { return stop_.get_token(); }

 private:
  std::stop_source stop_;
};

}  // namespace

grpc::ServerUnaryReactor* CacheServiceImpl::GetCacheStats(grpc::CallbackServerContext* context,
                                                          const v1::GetCacheStatsRequest*,
                                                          v1::GetCacheStatsResponse* response) {
  return OnWorker(core_, context, response, [=, this]() -> absl::Status {
    const absl::Time now = absl::Now();
    const CacheStats stats = core_->cache->Stats();
    for (const RecordStats& record : stats.records) *response->add_records() = ToProto(record, now);
    *response->mutable_ram_budget() = ToProto(stats.ram);
    for (const auto& device : core_->devices) {
      auto it = stats.devices.find(device->name());
      if (it != stats.devices.end()) *response->add_devices() = ToProto(*device, it->second);
    }
    response->set_record_bytes(stats.record_bytes);
    response->set_leaving_bytes(stats.leaving_bytes);
    response->set_unaccounted_bytes(stats.unaccounted_bytes());
    response->set_hits(stats.hits);
    response->set_misses(stats.misses);
    response->set_load_failures(stats.load_failures);
    response->set_evictions(stats.evicted(EvictReason::kRoom));
    response->set_trimmed(stats.evicted(EvictReason::kTrim));
    response->set_dropped(stats.evicted(EvictReason::kDrop));
    response->set_expired(stats.evicted(EvictReason::kKeepAlive));
    response->set_bytes_loaded(stats.bytes_loaded);
    for (const Eviction& eviction : stats.recent_evictions) {
      v1::Eviction& out = *response->add_recent_evictions();
      out.set_key(eviction.key.ToString());
      for (const std::string& name : eviction.names) out.add_names(name);
      out.set_bytes(eviction.bytes);
      out.set_reason(std::string(EvictReasonName(eviction.reason)));
      *out.mutable_time() = ToTimestamp(eviction.time);
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheServiceImpl::TrimCache(grpc::CallbackServerContext* context,
                                                      const v1::TrimCacheRequest* request,
                                                      v1::TrimCacheResponse* response) {
  return OnWorkerForAdmin(core_, context, response, "TrimCache", [=, this]() -> absl::Status {
    if (request->bytes() < 0) return FieldError("bytes", "must not be negative");
    response->set_freed_bytes(
        core_->cache->Trim(request->has_bytes() ? request->bytes() : MemoryBudget::kUnlimited));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheServiceImpl::DropModel(grpc::CallbackServerContext* context,
                                                      const v1::DropModelRequest* request,
                                                      v1::DropModelResponse* response) {
  return OnWorkerForAdmin(core_, context, response, "DropModel", [=, this]() -> absl::Status {
    // Every generation of the files counts, those too that were replaced or removed since.
    ASSIGN_OR_RETURN(const std::vector<std::string> ids, core_->pins->Ids(request->name()));
    core_->catalog->Forget(request->name());
    for (const std::string& id : ids) {
      const DropResult result = core_->cache->Drop({id, ""});
      response->set_evicted_records(response->evicted_records() + result.evicted_records);
      response->set_evicted_bytes(response->evicted_bytes() + result.evicted_bytes);
      response->set_stale_records(response->stale_records() + result.stale_records);
      response->set_stale_bytes(response->stale_bytes() + result.stale_bytes);
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheServiceImpl::LoadModel(grpc::CallbackServerContext* context,
                                                      const v1::LoadModelRequest* request,
                                                      v1::LoadModelResponse* response) {
  auto* call = new LoadCall(core_, context, response);
  absl::Status status = core_->CheckAccepting();
  if (status.ok()) {
    status = core_->pins->Submit([=, this] {
      call->Send(GuardTensorCode("call", [&]() -> absl::Status {
        ASSIGN_OR_RETURN(
            const PinBoard::Loaded loaded,
            core_->pins->Load(request->name(), {request->components().begin(), request->components().end()},
                              request->device(), request->pin(), call->stop_token()));
        for (const ModelKey& key : loaded.keys) response->add_keys(key.ToString());
        response->set_bytes(loaded.bytes);
        response->set_loaded_records(loaded.loaded_records);
        return absl::OkStatus();
      }));
    });
  }
  if (!status.ok()) call->Send(status);
  return call;
}

grpc::ServerUnaryReactor* CacheServiceImpl::UnloadModel(grpc::CallbackServerContext* context,
                                                        const v1::UnloadModelRequest* request,
                                                        v1::UnloadModelResponse* response) {
  return OnWorkerForAdmin(core_, context, response, "UnloadModel", [=, this]() -> absl::Status {
    ASSIGN_OR_RETURN(const DropResult result, core_->pins->Unload(request->name()));
    response->set_evicted_records(result.evicted_records);
    response->set_evicted_bytes(result.evicted_bytes);
    response->set_busy_records(result.busy_records);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheServiceImpl::SetCap(grpc::CallbackServerContext* context,
                                                   const v1::SetCapRequest* request,
                                                   v1::SetCapResponse* response) {
  return OnWorkerForAdmin(core_, context, response, "SetCap", [=, this]() -> absl::Status {
    MemoryBudget* budget = request->budget() == core_->ram->name() ? core_->ram.get() : nullptr;
    for (const auto& device : core_->devices) {
      if (!device->uses_host_memory() && device->name() == request->budget()) budget = &device->budget();
    }
    if (budget == nullptr) {
      return FieldError("budget", absl::StrCat("there is no '", request->budget(),
                                               "'; it is \"ram\", or a device with memory of its own"));
    }
    if (request->cap_bytes() <= 0) return FieldError("cap_bytes", "must be above 0");
    response->set_old_cap_bytes(budget->stats().cap_bytes);
    budget->set_cap(request->cap_bytes());
    const MemoryBudget::Stats stats = budget->stats();
    response->set_in_use_bytes(stats.in_use_bytes + stats.reserved_bytes);
    return absl::OkStatus();
  });
}

}  // namespace latentd
