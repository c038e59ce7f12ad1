// What a server says of its memory, for the tests of what latentctl shows of it.
#ifndef LATENTD_SERVER_CTL_TEST_STATS_H_
#define LATENTD_SERVER_CTL_TEST_STATS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "latentd/v1/cache.pb.h"

namespace latentd::ctl {

inline v1::MemoryUse Use(const std::string& name, int64_t in_use, int64_t reserved) {
  v1::MemoryUse use;
  use.set_name(name);
  use.set_in_use_bytes(in_use);
  use.set_reserved_bytes(reserved);
  return use;
}

inline constexpr int64_t kMiB = 1 << 20;
inline const absl::Time kNow = absl::FromUnixSeconds(1'000'000);

inline v1::CacheRecord& AddRecord(v1::GetCacheStatsResponse& stats, const std::string& key,
                                  const std::string& kind, int64_t bytes) {
  v1::CacheRecord& record = *stats.add_records();
  record.set_key(key);
  record.set_kind(kind);
  record.set_bytes(bytes);
  record.set_use("weights");
  record.set_load_ms(1500);
  record.mutable_idle()->set_seconds(12);
  return record;
}

// A host with one device: a transformer in use, half of it streamed, a LoRA that is pinned, and a VAE that
// would go first.
inline v1::GetCacheStatsResponse Stats() {
  v1::GetCacheStatsResponse stats;
  v1::RamBudget& ram = *stats.mutable_ram_budget();
  ram.set_cap_bytes(100 * kMiB);
  ram.set_in_use_bytes(40 * kMiB);
  ram.set_reserved_bytes(10 * kMiB);
  ram.set_peak_bytes(60 * kMiB);
  ram.set_waiting(1);
  ram.set_refused(2);
  *ram.add_uses() = Use("weights", 40 * kMiB, 0);
  *ram.add_uses() = Use("working", 0, 10 * kMiB);
  v1::DeviceStats& device = *stats.add_devices();
  device.set_name("sim:0");
  device.set_cap_bytes(64 * kMiB);
  device.set_in_use_bytes(16 * kMiB);
  device.set_reserved_bytes(16 * kMiB);
  device.set_peak_bytes(48 * kMiB);
  device.set_foreign_bytes(8 * kMiB);
  device.set_residency_bytes(16 * kMiB);
  device.set_allocated_bytes(16 * kMiB);
  device.set_copies(3);
  device.set_copied_bytes(48 * kMiB);
  device.set_streamed_locks(1);
  *device.add_uses() = Use("weights", 16 * kMiB, 0);
  *device.add_uses() = Use("working", 0, 16 * kMiB);

  AddRecord(stats, "shapes@9e1a8f0544496637:vae", "vae", 5 * kMiB);
  v1::CacheRecord& transformer =
      AddRecord(stats, "shapes@9e1a8f0544496637:transformer", "transformer", 32 * kMiB);
  transformer.set_lock_count(2);
  transformer.add_holders("0123456789abcdef0123456789abcdef");
  transformer.add_holders("0123456789abcdef0123456789abcdef");
  v1::Residency& there = *transformer.add_residency();
  there.set_device("sim:0");
  there.set_bytes(16 * kMiB);
  there.set_full_bytes(32 * kMiB);
  v1::CacheRecord& lora = AddRecord(stats, "lora/night@5247706bab4692c8", "lora", 3 * kMiB);
  lora.set_use("patches");
  lora.set_lock_count(1);
  lora.add_holders("pin");
  stats.set_record_bytes(40 * kMiB);
  stats.set_hits(20);
  stats.set_misses(4);
  stats.set_evictions(1);
  stats.set_expired(1);
  stats.set_bytes_loaded(45 * kMiB);
  for (const auto& [key, ago] : {std::pair("old@9e1a8f0544496637:vae", 75), std::pair("b", 3)}) {
    v1::Eviction& eviction = *stats.add_recent_evictions();
    eviction.set_key(key);
    eviction.set_bytes(5 * kMiB);
    eviction.set_reason(ago > 60 ? "keep_alive" : "room");
    eviction.mutable_time()->set_seconds(absl::ToUnixSeconds(kNow) - ago);
  }
  return stats;
}

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_TEST_STATS_H_
