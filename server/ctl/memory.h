// latentctl: what the server says of its memory, for people.
#ifndef LATENTD_SERVER_CTL_MEMORY_H_
#define LATENTD_SERVER_CTL_MEMORY_H_

#include <string>

#include "absl/time/time.h"
#include "latentd/v1/cache.pb.h"
#include "latentd/v1/denoise.pb.h"

namespace latentd::ctl {

// Budgets, what they are used for, records, and what went last.
std::string CacheText(const v1::GetCacheStatsResponse& stats, absl::Time now);

// Whether a job fits, what it would do with memory, and how long that would take.
std::string PlanText(const v1::PlanResponse& plan);

// One line.
std::string AdaptedText(const v1::JobEvent::Adapted& adapted);

// A table of a job's phases; empty when there are none.
std::string PhasesText(const v1::JobEvent::Done& done);

// "sim:0", or "sim:0 45%" where the rest is streamed.
std::string ResidencyText(const v1::Residency& residency);

// "lora/night@7b3a90" and "transformer" → both in one, the latter not twice.
std::string ShortRecordKey(const std::string& key, const std::string& kind);

// The key of a record that says which model it is of, and how many others: "night@7b3a90 +2:vae" in place of
// "weights/5c1d02:vae". Of a record without names its key.
std::string NamedKey(const std::string& key, const google::protobuf::RepeatedPtrField<std::string>& names);

// How long ago, never negative: the clocks of two machines differ.
double MsSince(const google::protobuf::Timestamp& time, absl::Time now);

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_MEMORY_H_
