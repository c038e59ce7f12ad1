#include "server/cache_service.h"

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "server/unary.h"

namespace latentd {
namespace {

const char* KindName(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::kCpu: return "cpu";
    case DeviceKind::kSim: return "sim";
    case DeviceKind::kCuda: return "cuda";
  }
  return "";
}

}  // namespace

grpc::ServerUnaryReactor* CacheServiceImpl::GetCacheStats(grpc::CallbackServerContext* context,
                                                          const v1::GetCacheStatsRequest*,
                                                          v1::GetCacheStatsResponse* response) {
  return OnWorker(core_, context, [=, this]() -> absl::Status {
    const CacheStats stats = core_->cache->Stats();
    for (const RecordStats& record : stats.records) {
      v1::CacheRecord& out = *response->add_records();
      out.set_key(record.key.ToString());
      out.set_kind(record.kind);
      out.set_bytes(record.bytes);
      out.set_lock_count(static_cast<int>(record.lock_count));
      for (const std::string& holder : record.holders) out.add_holders(holder);
      out.set_stale(record.stale);
      for (const ResidencyStats& there : record.residency) {
        v1::Residency& residency = *out.add_residency();
        residency.set_device(there.device);
        residency.set_bytes(there.bytes);
        residency.set_lock_count(static_cast<int>(there.lock_count));
      }
    }
    v1::RamBudget& ram = *response->mutable_ram_budget();
    ram.set_cap_bytes(stats.ram.cap_bytes);
    ram.set_in_use_bytes(stats.ram.in_use_bytes);
    ram.set_reserved_bytes(stats.ram.reserved_bytes);
    ram.set_peak_bytes(stats.ram.peak_bytes);
    ram.set_waiting(static_cast<int>(stats.ram.waiting));
    ram.set_refused(stats.ram.refused);
    for (const auto& device : core_->devices) {
      auto it = stats.devices.find(device->name());
      if (it == stats.devices.end()) continue;
      v1::DeviceStats& out = *response->add_devices();
      out.set_name(device->name());
      out.set_kind(KindName(device->kind()));
      out.set_cap_bytes(it->second.cap_bytes);
      out.set_in_use_bytes(it->second.in_use_bytes);
      out.set_reserved_bytes(it->second.reserved_bytes);
    }
    response->set_record_bytes(stats.record_bytes);
    response->set_hits(stats.hits);
    response->set_misses(stats.misses);
    response->set_load_failures(stats.load_failures);
    response->set_evictions(stats.evictions);
    response->set_trimmed(stats.trimmed);
    response->set_dropped(stats.dropped);
    response->set_bytes_loaded(stats.bytes_loaded);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheServiceImpl::TrimCache(grpc::CallbackServerContext* context,
                                                      const v1::TrimCacheRequest* request,
                                                      v1::TrimCacheResponse* response) {
  return OnWorker(core_, context, [=, this]() -> absl::Status {
    if (request->bytes() < 0) return FieldError("bytes", "must not be negative");
    response->set_freed_bytes(core_->cache->Trim(request->has_bytes() ? request->bytes() : MemoryBudget::kUnlimited));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheServiceImpl::DropModel(grpc::CallbackServerContext* context,
                                                      const v1::DropModelRequest* request,
                                                      v1::DropModelResponse* response) {
  return OnWorker(core_, context, [=, this]() -> absl::Status {
    const std::string& name = request->name();
    // Every generation of the files counts, those too that were replaced or removed since.
    std::set<std::string> ids;
    for (const RecordStats& record : core_->cache->Stats().records) {
      if (absl::StartsWith(record.key.id, absl::StrCat(name, "@")) ||
          absl::StartsWith(record.key.id, absl::StrCat("lora/", name, "@"))) {
        ids.insert(record.key.id);
      }
    }
    if (ids.empty() && !core_->catalog->Lora(name).ok()) {
      auto model = core_->catalog->Model(name);
      if (absl::IsNotFound(model.status())) return model.status();
    }
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

}  // namespace latentd
