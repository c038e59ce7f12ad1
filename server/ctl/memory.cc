#include "server/ctl/memory.h"

#include <algorithm>
#include <map>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "server/ctl/text.h"
#include "server/rpc/grpc_errors.h"

namespace latentd::ctl {
namespace {

// The fields that RamBudget and DeviceStats share.
template <typename Budget>
std::string BudgetText(const Budget& budget) {
  return absl::StrCat(HumanBytes(budget.in_use_bytes()), " in use, ", HumanBytes(budget.reserved_bytes()),
                      " reserved, of ", HumanBytes(budget.cap_bytes()), ", peak ",
                      HumanBytes(budget.peak_bytes()), ", ", budget.waiting(), " waiting, ", budget.refused(),
                      " refused");
}

// One row for each use that there is, one column for each budget.
std::string UsesText(const v1::GetCacheStatsResponse& stats) {
  Rows rows = {{"USE", "RAM"}};
  const auto add = [&](const google::protobuf::RepeatedPtrField<v1::MemoryUse>& uses) {
    for (const v1::MemoryUse& use : uses) {
      if (use.in_use_bytes() == 0 && use.reserved_bytes() == 0) continue;
      const std::string name = Printable(use.name());
      auto row = std::find_if(rows.begin() + 1, rows.end(), [&](const auto& r) { return r[0] == name; });
      if (row == rows.end()) row = rows.insert(rows.end(), {name});
      row->resize(rows[0].size());
      row->back() = HumanBytes(use.in_use_bytes());
      if (use.reserved_bytes() != 0) {
        absl::StrAppend(&row->back(), " + ", HumanBytes(use.reserved_bytes()), " reserved");
      }
    }
  };
  add(stats.ram_budget().uses());
  for (const v1::DeviceStats& device : stats.devices()) {
    rows[0].push_back(Printable(device.name()));
    add(device.uses());
  }
  return rows.size() > 1 ? "\n" + TableText(rows) : "";
}

std::string SumText(int64_t count, int64_t bytes) {
  return absl::StrCat(count, count == 1 ? " record, " : " records, ", HumanBytes(bytes));
}

// A holder often has several locks: one for the session, one for each job that uses the record.
std::string HoldersText(const v1::CacheRecord& record) {
  std::vector<std::string> parts;
  std::map<std::string, int> counts;
  for (const std::string& holder : record.holders()) ++counts[holder];
  for (const auto& [holder, count] : counts) {
    parts.push_back(count > 1 ? absl::StrCat(ShortKey(holder), " ×", count) : ShortKey(holder));
  }
  return absl::StrJoin(parts, ", ");
}

// Weights on a device: how many, what share that is, and what is streamed.
template <typename Phase>
std::vector<std::string> ResidencyCells(const Phase& phase) {
  if (phase.full_bytes() == 0) return {"", "", ""};
  const int64_t streamed = phase.full_bytes() - phase.resident_bytes();
  return {HumanBytes(phase.resident_bytes()), Percent(phase.resident_bytes(), phase.full_bytes()),
          streamed > 0 ? HumanBytes(streamed) : ""};
}

}  // namespace

double MsSince(const google::protobuf::Timestamp& time, absl::Time now) {
  const absl::Time then = absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
  return std::max(0.0, absl::ToDoubleMilliseconds(now - then));
}

std::string ResidencyText(const v1::Residency& residency) {
  if (residency.bytes() >= residency.full_bytes()) return Printable(residency.device());
  return absl::StrCat(Printable(residency.device()), " ", Percent(residency.bytes(), residency.full_bytes()));
}

std::string ShortRecordKey(const std::string& key, const std::string& kind) {
  absl::string_view text = key;
  const size_t at = text.find(absl::StrCat(":", kind));
  if (kind.empty() || at == absl::string_view::npos) return ShortKey(key);
  absl::string_view rest = text.substr(at + 1 + kind.size());
  if (rest.empty()) return ShortKey(text.substr(0, at));
  if (!absl::ConsumePrefix(&rest, "/")) return ShortKey(key);
  return ShortKey(absl::StrCat(text.substr(0, at), ":", rest));
}

std::string NamedKey(const std::string& key, const google::protobuf::RepeatedPtrField<std::string>& names) {
  const size_t colon = key.find(':');
  if (names.empty() || colon == std::string::npos) return key;
  const std::string others = names.size() == 1 ? "" : absl::StrCat(" +", names.size() - 1);
  return absl::StrCat(names[0], others, key.substr(colon));
}

std::string CacheText(const v1::GetCacheStatsResponse& stats, absl::Time now) {
  Rows rows = {{"RAM", BudgetText(stats.ram_budget())}};
  for (const v1::DeviceStats& device : stats.devices()) {
    const std::string name = Printable(device.name());
    rows.push_back({name, BudgetText(device)});
    rows.push_back(
        {"", absl::StrCat(HumanBytes(device.residency_bytes()), " of records' copies, ",
                          HumanBytes(device.allocated_bytes()), " allocated",
                          device.foreign_bytes() > 0 ? absl::StrCat(", ", HumanBytes(device.foreign_bytes()),
                                                                    " taken by other processes")
                                                     : "")});
    rows.push_back(
        {"", absl::StrCat("ever ", device.copies(), " copies of ", HumanBytes(device.copied_bytes()), ", ",
                          device.offloads(), " offloaded, ", device.streamed_locks(), " streamed in part")});
  }
  rows.push_back({"records", absl::StrCat(stats.records_size(), ", ", HumanBytes(stats.record_bytes()))});
  if (stats.leaving_bytes() != 0) {
    rows.back()[1] += absl::StrCat(", and ", HumanBytes(stats.leaving_bytes()), " that are being freed");
  }
  rows.push_back({"ever", absl::StrCat(stats.hits(), " hits, ", stats.misses(), " loads of ",
                                       HumanBytes(stats.bytes_loaded()), ", ", stats.load_failures(),
                                       " of them failed")});
  rows.push_back(
      {"evicted", absl::StrCat(stats.evictions(), " for room, ", stats.expired(), " unused for long, ",
                               stats.trimmed(), " trimmed, ", stats.dropped(), " dropped")});
  if (stats.unaccounted_bytes() != 0) {
    rows.push_back({"ATTENTION", absl::StrCat(HumanBytes(stats.unaccounted_bytes()),
                                              " of RAM belong to no record: a bug of the server")});
  }
  std::string out = PairsText(rows) + UsesText(stats);
  if (stats.records_size() > 0) {
    Rows table = {{"RECORD", "KIND", "USE", "SIZE", "LOCKS", "IDLE", "LOAD", "HOLDERS", "ON DEVICES"}};
    for (const v1::CacheRecord& record : stats.records()) {
      std::vector<std::string> residency;
      for (const v1::Residency& on : record.residency()) residency.push_back(ResidencyText(on));
      table.push_back({ShortRecordKey(NamedKey(record.key(), record.names()), record.kind()),
                       absl::StrCat(Printable(record.kind()), record.stale() ? " (stale)" : ""),
                       Printable(record.use()), HumanBytes(record.bytes()), absl::StrCat(record.lock_count()),
                       record.lock_count() > 0 ? "" : HumanMs(ToMs(record.idle())), HumanMs(record.load_ms()),
                       HoldersText(record), absl::StrJoin(residency, ", ")});
    }
    absl::StrAppend(&out, "\n", TableText(table));
  }
  if (stats.recent_evictions_size() > 0) {
    Rows table = {{"EVICTED", "SIZE", "REASON", "AGO"}};
    for (auto it = stats.recent_evictions().rbegin(); it != stats.recent_evictions().rend(); ++it) {
      table.push_back({ShortKey(NamedKey(it->key(), it->names())), HumanBytes(it->bytes()),
                       Printable(it->reason()), HumanMs(MsSince(it->time(), now))});
    }
    absl::StrAppend(&out, "\n", TableText(table));
  }
  return out;
}

std::string PlanText(const v1::PlanResponse& plan) {
  std::string out;
  if (plan.fits()) {
    out = absl::StrCat("fits, on ", Printable(plan.device()), "\n");
    absl::StrAppend(&out,
                    plan.seconds() > 0 ? absl::StrCat("takes about ", HumanMs(1e3 * plan.seconds()))
                                       : "takes a time that is not known yet: no such job has run here",
                    "\n");
  } else {
    const absl::Status reason = FromRpcStatus(plan.reason());
    out = absl::StrCat("does not fit, on ", Printable(plan.device()), "\n", ErrorReason(reason), ": ",
                       Printable(reason.message()), "\n");
    for (const auto& [key, value] : GetErrorDetails(reason)) {
      int64_t bytes = 0;
      const bool is_size = absl::EndsWith(key, "_bytes") && absl::SimpleAtoi(value, &bytes);
      absl::StrAppend(&out, "  ", Printable(key), ": ", is_size ? HumanBytes(bytes) : Printable(value), "\n");
    }
  }
  absl::StrAppend(&out, "holds at most ", HumanBytes(plan.peak_ram_bytes()), " of RAM\n");

  if (plan.phases_size() > 0) {
    Rows rows = {{"PHASE", "DEVICE", "WORKING", "", "RESIDENT", "SHARE", "STREAMED", "TIME"}};
    for (const v1::PlanResponse::Phase& phase : plan.phases()) {
      if (phase.cached()) {
        rows.push_back({Printable(phase.component()), "", "", "", "", "", "", "cached"});
        continue;
      }
      const std::vector<std::string> weights = ResidencyCells(phase);
      rows.push_back({Printable(phase.component()), Printable(phase.device()),
                      HumanBytes(phase.working_bytes()), phase.working_measured() ? "measured" : "estimated",
                      weights[0], weights[1], weights[2],
                      phase.seconds() > 0 ? HumanMs(1e3 * phase.seconds()) : ""});
    }
    absl::StrAppend(&out, "\n", TableText(rows));
  }
  if (plan.loads_size() > 0) {
    Rows rows = {{"LOADS", "KIND", "SIZE"}};
    int64_t bytes = 0;
    for (const v1::PlanResponse::Load& load : plan.loads()) {
      bytes += load.bytes();
      rows.push_back({ShortRecordKey(NamedKey(load.key(), load.names()), load.kind()), Printable(load.kind()),
                      HumanBytes(load.bytes())});
    }
    absl::StrAppend(&out, "\n", TableText(rows), SumText(plan.loads_size(), bytes), "\n");
  }
  if (plan.evictions_size() > 0) {
    Rows rows = {{"EVICTS", "KIND", "SIZE", "FROM"}};
    int64_t bytes = 0;
    for (const v1::PlanResponse::Eviction& eviction : plan.evictions()) {
      bytes += eviction.bytes();
      rows.push_back({ShortRecordKey(NamedKey(eviction.key(), eviction.names()), eviction.kind()),
                      Printable(eviction.kind()), HumanBytes(eviction.bytes()),
                      eviction.device().empty() ? "RAM" : Printable(eviction.device())});
    }
    absl::StrAppend(&out, "\n", TableText(rows), SumText(plan.evictions_size(), bytes), "\n");
  }
  return out;
}

std::string AdaptedText(const v1::JobEvent::Adapted& adapted) {
  using Adapted = v1::JobEvent::Adapted;
  std::string what;
  switch (adapted.measure()) {
    case Adapted::MEASURE_EVICTED:
      what = "took out what nobody uses";
      break;
    case Adapted::MEASURE_STREAMED:
      what = "streams its weights";
      break;
    case Adapted::MEASURE_TILED:
      what = "works in tiles";
      break;
    default:
      what = EnumText(Adapted::Measure_Name(adapted.measure()), "MEASURE_");
      break;
  }
  return absl::StrCat("memory is short for ", Printable(adapted.component()), " on ",
                      Printable(adapted.device()), ": ", what, " (", Printable(adapted.reason()), ")");
}

namespace {

// What is unusual about a phase.
std::string NotesOf(const v1::PhaseReport& phase) {
  std::vector<std::string> notes;
  if (phase.tiled()) notes.push_back("in tiles");
  if (!phase.compute().empty() && phase.compute() != "fp32")
    notes.push_back("in " + Printable(phase.compute()));
  return absl::StrJoin(notes, ", ");
}

}  // namespace

std::string PhasesText(const v1::JobEvent::Done& done) {
  if (done.phases_size() == 0) return "";
  Rows rows = {{"PHASE", "DEVICE", "WORKING", "PEAK", "RESIDENT", "SHARE", "STREAMED", ""}};
  for (const v1::PhaseReport& phase : done.phases()) {
    if (phase.cached()) {
      rows.push_back({Printable(phase.component()), "", "", "", "", "", "", "cached"});
      continue;
    }
    const std::vector<std::string> weights = ResidencyCells(phase);
    rows.push_back({Printable(phase.component()), Printable(phase.device()),
                    HumanBytes(phase.working_bytes()),
                    phase.working_peak_bytes() > 0 ? HumanBytes(phase.working_peak_bytes()) : "", weights[0],
                    weights[1], weights[2], NotesOf(phase)});
  }
  return TableText(rows);
}

}  // namespace latentd::ctl
