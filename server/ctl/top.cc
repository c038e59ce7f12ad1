#include "server/ctl/top.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "server/ctl/memory.h"
#include "server/ctl/text.h"

namespace latentd::ctl {
namespace {

using Style = StyledLine::Style;

constexpr int kMinBar = 6;
constexpr int kMaxBar = 40;
// From here on there is room for what is reserved beside what is in use, and for peers.
constexpr int kWide = 120;

// A table under its heading. Where not all of it fits, either its end is left out, or its middle.
struct Section {
  std::vector<std::string> lines;
  bool keep_ends = false;
  int share = 1;  // of the rows, against the other sections
  int rows = 0;   // that it gets
};

int64_t Evicted(const v1::GetCacheStatsResponse& stats) {
  return stats.evictions() + stats.expired() + stats.trimmed() + stats.dropped();
}

bool IsWide(int columns) { return columns == 0 || columns >= kWide; }

StyledLine Header(const TopSnapshot& now) {
  const v1::GetServerInfoResponse& info = now.info;
  int running = 0, queued = 0;
  for (const v1::SessionInfo& session : now.sessions.sessions()) {
    for (const v1::JobInfo& job : session.jobs()) {
      ++(job.phase() == v1::JobInfo::PHASE_QUEUED ? queued : running);
    }
  }
  const v1::RamBudget& ram = now.cache.ram_budget();
  std::vector<std::string> parts = {
      absl::StrCat("latentd ", Printable(info.version())),
      absl::StrCat("up ", ShortMs(MsSince(info.start_time(), now.time))),
      absl::StrCat("ram ", Percent(ram.in_use_bytes() + ram.reserved_bytes(), ram.cap_bytes())),
      absl::StrCat(now.sessions.sessions_size(), "/", info.limits().max_sessions(), " sessions"),
      absl::StrCat(running, " running"),
      absl::StrCat(queued, "/", info.limits().max_queued_jobs(), " queued")};
  if (info.draining()) parts.insert(parts.begin() + 1, "DRAINING");
  return {absl::StrJoin(parts, "  "), info.draining() ? Style::kAlarm : Style::kPlain};
}

// In use, reserved, free, taken by others.
std::string Bar(int width, int64_t in_use, int64_t reserved, int64_t foreign, int64_t cap) {
  const auto cells = [&](int64_t bytes) {
    if (cap <= 0) return 0;
    return static_cast<int>(std::clamp(static_cast<double>(bytes) / static_cast<double>(cap), 0.0, 1.0) *
                            width);
  };
  const int used = cells(in_use), promised = cells(in_use + reserved), others = width - cells(foreign);
  std::string out;
  for (int i = 0; i < width; ++i) out += i < used ? "█" : i < promised ? "▓" : i < others ? "░" : "x";
  return out;
}

// Of a RamBudget or DeviceStats; the bar comes later, when the width of the rest is known.
template <typename Budget>
std::vector<std::string> BudgetCells(const std::string& name, const Budget& budget, int64_t foreign) {
  return {name,
          "",
          Percent(budget.in_use_bytes() + budget.reserved_bytes(), budget.cap_bytes()),
          ShortBytes(budget.in_use_bytes()),
          ShortBytes(budget.reserved_bytes()),
          ShortBytes(budget.cap_bytes()),
          ShortBytes(budget.peak_bytes()),
          foreign > 0 ? ShortBytes(foreign) : "",
          absl::StrCat(budget.waiting()),
          absl::StrCat(budget.refused())};
}

Section Budgets(const v1::GetCacheStatsResponse& stats, int width) {
  std::vector<Column> columns = {
      {"BUDGET", false, 6}, {"", false},       {"", true, 4},     {"IN USE", true, 6}, {"RESERVED", true, 6},
      {"CAP", true, 6},     {"PEAK", true, 6}, {"FOREIGN", true}, {"WAIT", true},      {"REFUSED", true}};
  Rows rows = {BudgetCells("ram", stats.ram_budget(), 0)};
  for (const v1::DeviceStats& device : stats.devices()) {
    rows.push_back(BudgetCells(Printable(device.name()), device, device.foreign_bytes()));
  }
  const int rest = DisplayColumns(FitTable(columns, rows, 0)[0]);
  const int bar = std::clamp(width == 0 ? kMaxBar / 2 : width - rest, kMinBar, kMaxBar);
  const auto bar_of = [&](const auto& budget, int64_t foreign) {
    return Bar(bar, budget.in_use_bytes(), budget.reserved_bytes(), foreign, budget.cap_bytes());
  };
  rows[0][1] = bar_of(stats.ram_budget(), 0);
  for (int i = 0; i < stats.devices_size(); ++i) {
    rows[i + 1][1] = bar_of(stats.devices(i), stats.devices(i).foreign_bytes());
  }
  return {.lines = FitTable(columns, rows, width)};
}

// One row for each budget, one column for each use.
Section Uses(const v1::GetCacheStatsResponse& stats, int width) {
  const bool wide = IsWide(width);
  std::vector<Column> columns = {{"BY USE", false, 6}};
  for (const v1::MemoryUse& use : stats.ram_budget().uses()) {
    columns.push_back({absl::AsciiStrToUpper(Printable(use.name())), true, wide ? 13 : 6});
  }
  Rows rows;
  const auto add = [&](const std::string& name,
                       const google::protobuf::RepeatedPtrField<v1::MemoryUse>& uses) {
    rows.push_back({name});
    for (const v1::MemoryUse& use : uses) {
      const bool apart = wide && use.reserved_bytes() > 0;
      rows.back().push_back(
          apart ? absl::StrCat(ShortBytes(use.in_use_bytes()), "+", ShortBytes(use.reserved_bytes()))
                : ShortBytes(use.in_use_bytes() + use.reserved_bytes()));
    }
  };
  add("ram", stats.ram_budget().uses());
  for (const v1::DeviceStats& device : stats.devices()) add(Printable(device.name()), device.uses());
  return {.lines = FitTable(columns, rows, width)};
}

std::string RatesText(const TopState& state) {
  const v1::GetCacheStatsResponse& stats = state.now->cache;
  const std::optional<TopRates> rates = Rates(state);
  const auto number = [&](double TopRates::*rate) {
    return rates ? absl::StrFormat("%.1f/s", *rates.*rate) : "-/s";
  };
  std::string out = absl::StrCat("loads ", number(&TopRates::loads), " (", stats.misses(), ")  evictions ",
                                 number(&TopRates::evictions), " (", Evicted(stats), ")  hits ",
                                 number(&TopRates::hits), " (", stats.hits(), ")  read ",
                                 rates ? ShortBytes(std::llround(rates->bytes_loaded)) : "-", "/s (",
                                 ShortBytes(stats.bytes_loaded()), ")");
  if (stats.load_failures() > 0) absl::StrAppend(&out, "  failed (", stats.load_failures(), ")");
  if (stats.leaving_bytes() > 0) absl::StrAppend(&out, "  freeing ", ShortBytes(stats.leaving_bytes()));
  return out;
}

Section Sessions(const v1::ListSessionsResponse& response, int width) {
  std::vector<Column> columns = {{"SESSION", false, 7},  {"JOB", false, 0, 5}, {"MODEL", false, 0, 8},
                                 {"LORAS", false, 0, 6}, {"STATE", false, 9},  {"STEP", true, 5},
                                 {"DEVICE", false, 6},   {"AGE", true, 6}};
  const bool wide = IsWide(width);
  if (wide) columns.insert(columns.end(), {{"PRIORITY", true}, {"PEER", false, 0, 8}});
  // Where rows are left out, those that do nothing are.
  std::vector<const v1::SessionInfo*> sessions;
  for (const v1::SessionInfo& session : response.sessions()) sessions.push_back(&session);
  std::stable_partition(sessions.begin(), sessions.end(), [](const auto* s) { return s->jobs_size() > 0; });
  Rows rows;
  for (const v1::SessionInfo* session : sessions) {
    std::vector<std::string> loras;
    for (const v1::LoraRef& lora : session->loras()) loras.push_back(LoraText(lora));
    const std::string state = EnumText(v1::SessionInfo::State_Name(session->state()), "STATE_");
    const std::vector<std::string> first = {ShortKey(session->session()), Printable(session->model()),
                                            absl::StrJoin(loras, ", ")};
    const auto add = [&](const std::vector<std::string>& about, const std::string& job,
                         const std::string& phase, const std::string& step, const std::string& device,
                         const google::protobuf::Duration& age) {
      rows.push_back({about[0], job, about[1], about[2], phase, step, device, ShortMs(ToMs(age))});
      if (wide && !about[0].empty()) {
        rows.back().push_back(absl::StrCat(session->priority()));
        rows.back().push_back(Printable(session->peer()));
      }
    };
    if (session->jobs_size() == 0) add(first, "", state, "", "", session->age());
    for (int i = 0; i < session->jobs_size(); ++i) {
      const v1::JobInfo& job = session->jobs(i);
      const std::string phase = EnumText(v1::JobInfo::Phase_Name(job.phase()), "PHASE_");
      add(i == 0 ? first : std::vector<std::string>(3), Printable(job.job_id()),
          session->state() == v1::SessionInfo::STATE_BUSY ? phase : state,
          job.steps() > 0 ? absl::StrCat(job.step(), "/", job.steps()) : "", Printable(job.device()),
          job.age());
    }
  }
  return {.lines = FitTable(columns, rows, width), .share = 2};
}

std::string LocksText(const v1::CacheRecord& record) {
  std::vector<std::string> parts = {absl::StrCat(record.lock_count())};
  const auto& holders = record.holders();
  if (std::find(holders.begin(), holders.end(), "pin") != holders.end()) parts.push_back("pin");
  if (record.stale()) parts.push_back("stale");
  return absl::StrJoin(parts, " ");
}

// What is held on top, what would go first at the bottom.
Section Records(const v1::GetCacheStatsResponse& stats, int width) {
  const std::vector<Column> columns = {{"RECORD (lowest goes 1st)", false, 24, 16, true},
                                       {"KIND", false, 11, 8},
                                       {"SIZE", true, 6},
                                       {"LOCKS", false},
                                       {"IDLE", true, 6},
                                       {"LOAD", true, 6},
                                       {"ON", false, 0, 5}};
  std::vector<const v1::CacheRecord*> records;
  for (const v1::CacheRecord& record : stats.records()) records.push_back(&record);
  std::reverse(records.begin(), records.end());
  std::stable_partition(records.begin(), records.end(), [](const auto* r) { return r->lock_count() > 0; });
  Rows rows;
  for (const v1::CacheRecord* record : records) {
    std::vector<std::string> residency;
    for (const v1::Residency& on : record->residency()) residency.push_back(ResidencyText(on));
    rows.push_back({ShortRecordKey(NamedKey(record->key(), record->names()), record->kind()),
                    Printable(record->kind()), ShortBytes(record->bytes()), LocksText(*record),
                    record->lock_count() > 0 ? "" : ShortMs(ToMs(record->idle())), ShortMs(record->load_ms()),
                    absl::StrJoin(residency, ", ")});
  }
  return {.lines = FitTable(columns, rows, width), .keep_ends = true, .share = 2};
}

Section Evictions(const v1::GetCacheStatsResponse& stats, absl::Time now, int width) {
  const std::vector<Column> columns = {{"EVICTED (last on top)", false, 26, 16, true},
                                       {"SIZE", true, 6},
                                       {"REASON", false, 10},
                                       {"AGO", true, 6}};
  Rows rows;
  for (auto it = stats.recent_evictions().rbegin(); it != stats.recent_evictions().rend(); ++it) {
    rows.push_back({ShortKey(NamedKey(it->key(), it->names())), ShortBytes(it->bytes()),
                    Printable(it->reason()), ShortMs(MsSince(it->time(), now))});
  }
  return {.lines = FitTable(columns, rows, width)};
}

StyledLine LeftOut(int lines) {
  return {absl::StrCat("… ", lines, lines == 1 ? " line" : " lines", " left out")};
}

void Append(const Section& section, std::vector<StyledLine>& out) {
  const int all = static_cast<int>(section.lines.size());
  // The heading, what comes before the gap, the line that tells of it, and what comes after.
  const int left_out = section.rows >= all ? 0 : all - section.rows + 1;
  const int after = left_out > 0 && section.keep_ends ? (section.rows - 2) / 2 : 0;
  const int before = all - left_out - after;
  for (int i = 0; i < before; ++i) {
    out.push_back({section.lines[i], i == 0 ? Style::kHeading : Style::kPlain});
  }
  if (left_out > 0) out.push_back(LeftOut(left_out));
  for (int i = all - after; i < all; ++i) out.push_back({section.lines[i]});
}

// Gives the first `n` sections `rows` between them. False when one of them is left with less than a heading,
// a line, and one that tells of the others.
bool Share(std::vector<Section>& sections, size_t n, int rows) {
  for (Section& section : sections) section.rows = 0;
  for (bool more = true; more;) {
    more = false;
    for (size_t s = 0; s < n; ++s) {
      Section& section = sections[s];
      const int wanted = static_cast<int>(section.lines.size()) - section.rows;
      const int given = std::min({section.share, wanted, rows});
      section.rows += given;
      rows -= given;
      more |= given > 0;
    }
  }
  return std::all_of(sections.begin(), sections.begin() + static_cast<int>(n), [](const Section& section) {
    return section.rows >= std::min(3, static_cast<int>(section.lines.size()));
  });
}

}  // namespace

std::optional<TopRates> Rates(const TopState& state) {
  if (!state.now || !state.before) return std::nullopt;
  const double seconds = absl::ToDoubleSeconds(state.now->time - state.before->time);
  if (seconds <= 0) return std::nullopt;
  const v1::GetCacheStatsResponse& now = state.now->cache;
  const v1::GetCacheStatsResponse& before = state.before->cache;
  const auto rate = [&](int64_t more) { return static_cast<double>(more) / seconds; };
  return TopRates{.loads = rate(now.misses() - before.misses()),
                  .evictions = rate(Evicted(now) - Evicted(before)),
                  .hits = rate(now.hits() - before.hits()),
                  .bytes_loaded = rate(now.bytes_loaded() - before.bytes_loaded())};
}

std::vector<StyledLine> DrawTop(const TopState& state, TerminalSize size, absl::Time now) {
  const int width = size.columns;
  std::vector<StyledLine> out;
  if (state.now) out.push_back(Header(*state.now));
  if (!state.error.ok()) {
    const std::string age =
        state.now
            ? absl::StrCat(", this is ", ShortMs(absl::ToDoubleMilliseconds(now - state.now->time)), " old")
            : "";
    const std::string reason = ErrorReason(state.error);
    out.push_back({absl::StrCat("no answer, trying again", age, ": ",
                                reason.empty() ? absl::StatusCodeToString(state.error.code()) : reason, ": ",
                                Printable(state.error.message())),
                   Style::kAlarm});
  }
  if (state.now) {
    const v1::GetCacheStatsResponse& cache = state.now->cache;
    if (cache.unaccounted_bytes() != 0) {
      out.push_back({absl::StrCat("ATTENTION: ", ShortBytes(cache.unaccounted_bytes()),
                                  " of ram belong to no record: a bug of the server"),
                     Style::kAlarm});
    }
    Section budgets = Budgets(cache, width);
    budgets.rows = static_cast<int>(budgets.lines.size());
    // In the order of their weight: where there is too little room, the last ones are left out.
    std::vector<Section> sections = {Sessions(state.now->sessions, width), Records(cache, width),
                                     Uses(cache, width), Evictions(cache, state.now->time, width)};
    const bool all = size.rows == 0;
    size_t shown = sections.size();
    if (all) {
      for (Section& section : sections) section.rows = static_cast<int>(section.lines.size());
    } else {
      int rows = size.rows - static_cast<int>(out.size()) - budgets.rows - 1;
      if (!Share(sections, shown, rows)) {
        --rows;  // for the line that tells of it
        do --shown;
        while (!Share(sections, shown, std::max(0, rows)));
      }
    }
    if (all) out.push_back({});
    Append(budgets, out);
    out.push_back({RatesText(state)});
    int left_out = 0;
    for (size_t i : {2, 0, 1, 3}) {
      if (i >= shown) {
        left_out += static_cast<int>(sections[i].lines.size());
        continue;
      }
      if (all) out.push_back({});
      Append(sections[i], out);
    }
    if (left_out > 0) out.push_back(LeftOut(left_out));
  }
  if (size.rows > 0 && static_cast<int>(out.size()) > size.rows) {
    const int left_out = static_cast<int>(out.size()) - size.rows + 1;
    out.resize(size.rows - 1);
    out.push_back(LeftOut(left_out));
  }
  if (width > 0) {
    for (StyledLine& line : out) line.text = FitText(line.text, width);
  }
  return out;
}

std::string TopJson(const TopState& state) {
  using Json = nlohmann::ordered_json;
  Json out = {{"info", nullptr}, {"cache", nullptr}, {"sessions", nullptr}, {"rates", nullptr}};
  if (state.now) {
    out["info"] = Json::parse(MessageJson(state.now->info, false));
    out["cache"] = Json::parse(MessageJson(state.now->cache, false));
    out["sessions"] = Json::parse(MessageJson(state.now->sessions, false))["sessions"];
  }
  if (const std::optional<TopRates> rates = Rates(state)) {
    out["rates"] = {{"loads", rates->loads},
                    {"evictions", rates->evictions},
                    {"hits", rates->hits},
                    {"bytesLoaded", rates->bytes_loaded}};
  }
  return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace latentd::ctl
