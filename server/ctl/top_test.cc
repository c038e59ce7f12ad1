#include "server/ctl/top.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/ctl/test_stats.h"
#include "server/ctl/text.h"

namespace latentd::ctl {
namespace {

using ::testing::HasSubstr;

v1::JobInfo& AddJob(v1::SessionInfo& session, const std::string& name, v1::JobInfo::Phase phase) {
  v1::JobInfo& job = *session.add_jobs();
  job.set_job_id(name);
  job.set_phase(phase);
  job.mutable_age()->set_seconds(5);
  return job;
}

TopState State() {
  TopSnapshot now;
  now.time = kNow;
  now.info.set_version("9.9");
  now.info.set_instance("i");
  now.info.mutable_start_time()->set_seconds(absl::ToUnixSeconds(kNow) - 75);
  now.info.mutable_limits()->set_max_sessions(64);
  now.info.mutable_limits()->set_max_queued_jobs(256);
  now.cache = Stats();
  v1::SessionInfo& idle = *now.sessions.add_sessions();
  idle.set_session("fedcba9876543210fedcba9876543210");
  idle.set_peer("unix:");
  idle.set_model("shapes");
  idle.set_state(v1::SessionInfo::STATE_IDLE);
  idle.mutable_age()->set_seconds(60);
  v1::SessionInfo& busy = *now.sessions.add_sessions();
  busy.set_session("0123456789abcdef0123456789abcdef");
  busy.set_peer("ipv4:127.0.0.1:50000");
  busy.set_model("shapes");
  busy.set_state(v1::SessionInfo::STATE_BUSY);
  busy.set_priority(3);
  busy.add_loras()->set_name("night");
  busy.mutable_loras(0)->set_weight(0.5);
  v1::JobInfo& job = AddJob(busy, "job-1", v1::JobInfo::PHASE_DENOISING);
  job.set_step(3);
  job.set_steps(12);
  job.set_device("sim:0");
  AddJob(busy, "job-2", v1::JobInfo::PHASE_QUEUED);
  return {.now = now, .before = std::nullopt, .error = absl::OkStatus()};
}

// The same server a while before, with less done.
TopSnapshot Before(const TopSnapshot& now) {
  TopSnapshot before = now;
  before.time = now.time - absl::Seconds(2);
  before.cache.set_hits(now.cache.hits() - 5);
  before.cache.set_misses(now.cache.misses() - 1);
  before.cache.set_expired(0);
  before.cache.set_bytes_loaded(now.cache.bytes_loaded() - 8 * kMiB);
  return before;
}

std::string Text(const std::vector<StyledLine>& lines) {
  std::string out;
  for (const StyledLine& line : lines) absl::StrAppend(&out, line.text, "\n");
  return out;
}

TEST(CtlTop, ATerminalIsFilledAndNotMore) {
  TopState state = State();
  state.before = Before(*state.now);
  EXPECT_EQ(Text(DrawTop(state, {80, 24}, kNow)),
            R"(latentd 9.9  up 1m15s  ram 50%  2/64 sessions  1 running  1/256 queued
BUDGET                  IN USE  RESERVED     CAP    PEAK  FOREIGN  WAIT  REFUSED
ram     ███▓░░░░   50%  40.0Mi    10.0Mi   100Mi  60.0Mi              1        2
sim:0   ██▓▓░░░x   50%  16.0Mi    16.0Mi  64.0Mi  48.0Mi   8.00Mi     0        0
loads 0.5/s (4)  evictions 0.5/s (2)  hits 2.5/s (20)  read 4.00Mi/s (45.0Mi)
BY USE  WEIGHTS  WORKING
ram      40.0Mi   10.0Mi
sim:0    16.0Mi   16.0Mi
SESSION  JOB    MODEL   LORAS      STATE       STEP  DEVICE     AGE
012345   job-1  shapes  night:0.5  denoising   3/12  sim:0     5.0s
         job-2                     queued                      5.0s
fedcba          shapes             idle                       1m00s
RECORD (lowest goes 1st)  KIND           SIZE  LOCKS    IDLE    LOAD  ON
lora/night@524770         lora         3.00Mi  1 pin            1.5s
shapes@9e1a8f             transformer  32.0Mi  2                1.5s  sim:0 50%
shapes@9e1a8f             vae          5.00Mi  0         12s    1.5s
EVICTED (last on top)         SIZE  REASON         AGO
b                           5.00Mi  room          3.0s
old@9e1a8f:vae              5.00Mi  keep_alive   1m15s
)");
}

TEST(CtlTop, AWideTerminalShowsMoreOfEverything) {
  TopState state = State();
  state.before = Before(*state.now);
  EXPECT_EQ(Text(DrawTop(state, {140, 50}, kNow)),
            R"(latentd 9.9  up 1m15s  ram 50%  2/64 sessions  1 running  1/256 queued
BUDGET                                                  IN USE  RESERVED     CAP    PEAK  FOREIGN  WAIT  REFUSED
ram     ████████████████▓▓▓▓░░░░░░░░░░░░░░░░░░░░   50%  40.0Mi    10.0Mi   100Mi  60.0Mi              1        2
sim:0   ██████████▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░░░░░░xxxxx   50%  16.0Mi    16.0Mi  64.0Mi  48.0Mi   8.00Mi     0        0
loads 0.5/s (4)  evictions 0.5/s (2)  hits 2.5/s (20)  read 4.00Mi/s (45.0Mi)
BY USE        WEIGHTS        WORKING
ram            40.0Mi       0+10.0Mi
sim:0          16.0Mi       0+16.0Mi
SESSION  JOB    MODEL   LORAS      STATE       STEP  DEVICE     AGE  PRIORITY  PEER
012345   job-1  shapes  night:0.5  denoising   3/12  sim:0     5.0s         3  ipv4:127.0.0.1:50000
         job-2                     queued                      5.0s
fedcba          shapes             idle                       1m00s         0  unix:
RECORD (lowest goes 1st)  KIND           SIZE  LOCKS    IDLE    LOAD  ON
lora/night@524770         lora         3.00Mi  1 pin            1.5s
shapes@9e1a8f             transformer  32.0Mi  2                1.5s  sim:0 50%
shapes@9e1a8f             vae          5.00Mi  0         12s    1.5s
EVICTED (last on top)         SIZE  REASON         AGO
b                           5.00Mi  room          3.0s
old@9e1a8f:vae              5.00Mi  keep_alive   1m15s
)");
}

TEST(CtlTop, AllOfItIsPrintedWhereThereIsNoTerminal) {
  EXPECT_EQ(Text(DrawTop(State(), {0, 0}, kNow)),
            R"(latentd 9.9  up 1m15s  ram 50%  2/64 sessions  1 running  1/256 queued

BUDGET                              IN USE  RESERVED     CAP    PEAK  FOREIGN  WAIT  REFUSED
ram     ████████▓▓░░░░░░░░░░   50%  40.0Mi    10.0Mi   100Mi  60.0Mi              1        2
sim:0   █████▓▓▓▓▓░░░░░░░░xx   50%  16.0Mi    16.0Mi  64.0Mi  48.0Mi   8.00Mi     0        0
loads -/s (4)  evictions -/s (2)  hits -/s (20)  read -/s (45.0Mi)

BY USE        WEIGHTS        WORKING
ram            40.0Mi       0+10.0Mi
sim:0          16.0Mi       0+16.0Mi

SESSION  JOB    MODEL   LORAS      STATE       STEP  DEVICE     AGE  PRIORITY  PEER
012345   job-1  shapes  night:0.5  denoising   3/12  sim:0     5.0s         3  ipv4:127.0.0.1:50000
         job-2                     queued                      5.0s
fedcba          shapes             idle                       1m00s         0  unix:

RECORD (lowest goes 1st)  KIND           SIZE  LOCKS    IDLE    LOAD  ON
lora/night@524770         lora         3.00Mi  1 pin            1.5s
shapes@9e1a8f             transformer  32.0Mi  2                1.5s  sim:0 50%
shapes@9e1a8f             vae          5.00Mi  0         12s    1.5s

EVICTED (last on top)         SIZE  REASON         AGO
b                           5.00Mi  room          3.0s
old@9e1a8f:vae              5.00Mi  keep_alive   1m15s
)");
}

TEST(CtlTop, WhatHasNoRoomIsLeftOutAndCounted) {
  TopState state = State();
  for (int i = 0; i < 30; ++i) AddRecord(state.now->cache, absl::StrCat("other-", i, ":vae"), "vae", kMiB);
  for (int i = 0; i < 10; ++i)
    AddJob(*state.now->sessions.mutable_sessions(1), "queued", v1::JobInfo::PHASE_QUEUED);
  EXPECT_EQ(Text(DrawTop(state, {80, 20}, kNow)),
            R"(latentd 9.9  up 1m15s  ram 50%  2/64 sessions  1 running  11/256 queued
BUDGET                  IN USE  RESERVED     CAP    PEAK  FOREIGN  WAIT  REFUSED
ram     ███▓░░░░   50%  40.0Mi    10.0Mi   100Mi  60.0Mi              1        2
sim:0   ██▓▓░░░x   50%  16.0Mi    16.0Mi  64.0Mi  48.0Mi   8.00Mi     0        0
loads -/s (4)  evictions -/s (2)  hits -/s (20)  read -/s (45.0Mi)
SESSION  JOB     MODEL   LORAS      STATE       STEP  DEVICE     AGE
012345   job-1   shapes  night:0.5  denoising   3/12  sim:0     5.0s
         job-2                      queued                      5.0s
         queued                     queued                      5.0s
         queued                     queued                      5.0s
         queued                     queued                      5.0s
         queued                     queued                      5.0s
… 7 lines left out
RECORD (lowest goes 1st)  KIND           SIZE  LOCKS    IDLE    LOAD  ON
lora/night@524770         lora         3.00Mi  1 pin            1.5s
shapes@9e1a8f             transformer  32.0Mi  2                1.5s  sim:0 50%
… 29 lines left out
other-0                   vae          1.00Mi  0         12s    1.5s
shapes@9e1a8f             vae          5.00Mi  0         12s    1.5s
… 6 lines left out
)");
  EXPECT_EQ(Text(DrawTop(state, {60, 10}, kNow)),
            R"(latentd 9.9  up 1m15s  ram 50%  2/64 sessions  1 running  1…
BUDGET                IN USE  RESERVED     CAP    PEAK  FOR…
ram     ██▓░░░   50%  40.0Mi    10.0Mi   100Mi  60.0Mi     …
sim:0   █▓▓░░░   50%  16.0Mi    16.0Mi  64.0Mi  48.0Mi   8.…
loads -/s (4)  evictions -/s (2)  hits -/s (20)  read -/s (…
SESSION  JOB    MODEL   LORAS   STATE       STEP  DEVICE   …
012345   job-1  shapes  night…  denoising   3/12  sim:0    …
         job-2                  queued                     …
… 11 lines left out
… 40 lines left out
)");
}

TEST(CtlTop, NoSizeIsTooSmall) {
  TopState state = State();
  state.error = absl::UnavailableError("gone");
  state.now->cache.set_unaccounted_bytes(1);
  for (int rows = 1; rows < 60; ++rows) {
    for (int columns : {1, 10, 40, 80, 119, 120, 200}) {
      const auto lines = DrawTop(state, {columns, rows}, kNow);
      EXPECT_LE(lines.size(), static_cast<size_t>(rows));
      for (const StyledLine& line : lines) EXPECT_LE(DisplayColumns(line.text), columns) << line.text;
    }
  }
}

TEST(CtlTop, AServerThatGoesAwayLeavesWhatWasKnown) {
  TopState state = State();
  state.error = MakeError(absl::StatusCode::kUnavailable, "NO_SERVER", "no daemon answers");
  auto lines = DrawTop(state, {80, 24}, kNow + absl::Seconds(7));
  EXPECT_EQ(lines[1].text, "no answer, trying again, this is 7.0s old: NO_SERVER: no daemon answers");
  EXPECT_EQ(lines[1].style, StyledLine::Style::kAlarm);
  EXPECT_THAT(lines[3].text, HasSubstr("ram "));
  state.now = std::nullopt;
  state.error = absl::UnavailableError("gone");
  EXPECT_EQ(Text(DrawTop(state, {80, 24}, kNow)), "no answer, trying again: UNAVAILABLE: gone\n");
}

TEST(CtlTop, WhatIsWrongIsLoud) {
  TopState state = State();
  state.now->info.set_draining(true);
  state.now->cache.set_unaccounted_bytes(4096);
  state.now->cache.set_leaving_bytes(kMiB);
  state.now->cache.set_load_failures(2);
  const auto lines = DrawTop(state, {0, 0}, kNow);
  EXPECT_EQ(lines[0].text,
            "latentd 9.9  DRAINING  up 1m15s  ram 50%  2/64 sessions  1 running  1/256 queued");
  EXPECT_EQ(lines[0].style, StyledLine::Style::kAlarm);
  EXPECT_EQ(lines[1].text, "ATTENTION: 4.00Ki of ram belong to no record: a bug of the server");
  EXPECT_EQ(lines[1].style, StyledLine::Style::kAlarm);
  EXPECT_THAT(Text(lines), HasSubstr("  failed (2)  freeing 1.00Mi\n"));
}

TEST(CtlTop, ASessionThatClosesSaysSoThoughItHasAJob) {
  TopState state = State();
  state.now->sessions.mutable_sessions(1)->set_state(v1::SessionInfo::STATE_CLOSING);
  EXPECT_THAT(Text(DrawTop(state, {80, 24}, kNow)), HasSubstr("night:0.5  closing     3/12  sim:0 "));
}

TEST(CtlTop, RatesNeedTwoLooks) {
  TopState state = State();
  EXPECT_FALSE(Rates(state).has_value());
  state.before = Before(*state.now);
  const auto rates = Rates(state);
  ASSERT_TRUE(rates.has_value());
  EXPECT_EQ(rates->loads, 0.5);
  EXPECT_EQ(rates->evictions, 0.5);
  EXPECT_EQ(rates->hits, 2.5);
  EXPECT_EQ(rates->bytes_loaded, 4 * kMiB);
  state.before->time = state.now->time;
  EXPECT_FALSE(Rates(state).has_value());
}

TEST(CtlTop, JsonHasEverything) {
  TopState state = State();
  auto json = nlohmann::json::parse(TopJson(state));
  EXPECT_EQ(json["info"]["version"], "9.9");
  EXPECT_EQ(json["cache"]["records"].size(), 3u);
  EXPECT_EQ(json["sessions"][1]["jobs"][0]["device"], "sim:0");
  EXPECT_TRUE(json["rates"].is_null());
  state.before = Before(*state.now);
  json = nlohmann::json::parse(TopJson(state));
  EXPECT_EQ(json["rates"]["hits"], 2.5);
}

}  // namespace
}  // namespace latentd::ctl
