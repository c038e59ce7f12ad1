// The parts of latentctl that need no server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "latentd/v1/cache.pb.h"
#include "server/ctl_images.h"
#include "server/ctl_job.h"
#include "server/ctl_memory.h"
#include "server/ctl_session.h"
#include "server/ctl_text.h"
#include "server/ctl_top.h"
#include "server/grpc_errors.h"
#include "server/sha256.h"

namespace latentd::ctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

TEST(CtlText, SizesAreShort) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1536), "1.50 KiB");
  EXPECT_EQ(HumanBytes(int64_t{23} << 30), "23.0 GiB");
}

TEST(CtlText, TimesAreShort) {
  EXPECT_EQ(HumanMs(1.26), "1.3 ms");
  EXPECT_EQ(HumanMs(12.3), "12 ms");
  EXPECT_EQ(HumanMs(1234), "1.23 s");
  EXPECT_EQ(HumanMs(75400), "1 min 15 s");
  EXPECT_EQ(HumanMs(2 * 3600e3 + 60e3), "2 h 1 min");
  EXPECT_EQ(HumanMs(600e3), "10 min");
}

TEST(CtlText, ATableAlignsItsColumns) {
  EXPECT_EQ(TableText({{"NAME", "SIZE"}, {"shapes-flux", "4.50 MiB"}, {"é", "12 B"}}),
            "NAME         SIZE\n"
            "shapes-flux  4.50 MiB\n"
            "é                12 B\n");
}

TEST(CtlText, ShortSizesHaveAtMostSixColumns) {
  EXPECT_EQ(ShortBytes(0), "0");
  EXPECT_EQ(ShortBytes(1000), "1000");
  EXPECT_EQ(ShortBytes(1536), "1.50Ki");
  EXPECT_EQ(ShortBytes(999 << 10), "999Ki");
  EXPECT_EQ(ShortBytes((1000 << 10) - 1), "0.98Mi");
  EXPECT_EQ(ShortBytes(int64_t{23} << 30), "23.0Gi");
  EXPECT_EQ(ShortBytes(-2048), "-2.00Ki");
}

TEST(CtlText, ShortTimesHaveAtMostSixColumns) {
  EXPECT_EQ(ShortMs(0.2), "0ms");
  EXPECT_EQ(ShortMs(850), "850ms");
  EXPECT_EQ(ShortMs(9999), "9.9s");
  EXPECT_EQ(ShortMs(59'999), "59s");
  EXPECT_EQ(ShortMs(75'400), "1m15s");
  EXPECT_EQ(ShortMs(3600e3), "1h00m");
  EXPECT_EQ(ShortMs(50 * 3600e3), "2d02h");
}

TEST(CtlText, OnlyTheWholeIsAHundredPercent) {
  EXPECT_EQ(Percent(0, 10), "0%");
  EXPECT_EQ(Percent(1, 1000), "<1%");
  EXPECT_EQ(Percent(999, 1000), "99%");
  EXPECT_EQ(Percent(1000, 1000), "100%");
  EXPECT_EQ(Percent(3, 2), "150%");
  EXPECT_EQ(Percent(0, 0), "0%");
  EXPECT_EQ(Percent(1, 0), "");
}

TEST(CtlText, KeysLoseMostOfTheirHashes) {
  EXPECT_EQ(ShortKey("shapes@9e1a8f0544496637:transformer"), "shapes@9e1a8f:transformer");
  EXPECT_EQ(ShortKey("m@9e1a8f0544496637:conditioning/text_encoder/104745b72c10e55f4097a82efc30eb28"),
            "m@9e1a8f:conditioning/text_encoder/104745");
  EXPECT_EQ(ShortKey("decade-facade/deadbeefdeadbeefs"), "decade-facade/deadbeefdeadbeefs");
  EXPECT_EQ(ShortKey("pin"), "pin");
}

TEST(CtlText, WhatIsTooLongIsCutAtItsEndOrInItsMiddle) {
  EXPECT_EQ(FitText("abcdef", 6), "abcdef");
  EXPECT_EQ(FitText("abcdef", 4), "abc…");
  EXPECT_EQ(FitText("äöüß", 3), "äö…");
  EXPECT_EQ(FitText("abcdef", 4, true), "ab…f");
  EXPECT_EQ(FitText("abcdef", 5, true), "ab…ef");
  EXPECT_EQ(FitText("abcdef", 1), "…");
  EXPECT_EQ(FitText("abcdef", 0), "");
}

TEST(CtlText, ATableIsMadeToFit) {
  const std::vector<Column> columns = {{"NAME", false, 0, 4}, {"SIZE", true, 5}, {"NOTE", false, 0, 4}};
  const Rows rows = {{"a long name", "12", "some note"}, {"b"}};
  EXPECT_THAT(FitTable(columns, rows, 0),
              ElementsAre("NAME          SIZE  NOTE", "a long name     12  some note", "b"));
  EXPECT_THAT(FitTable(columns, rows, 24),
              ElementsAre("NAME      SIZE  NOTE", "a long…     12  some no…", "b"));
  EXPECT_THAT(FitTable(columns, rows, 10), ElementsAre("NAME   SI…", "a l…     …", "b"));
}

TEST(CtlText, ALoraIsANameAndMaybeAWeight) {
  EXPECT_EQ(ParseLora("night")->name(), "night");
  EXPECT_FALSE(ParseLora("night")->has_weight());
  EXPECT_EQ(ParseLora("night:0.5")->weight(), 0.5);
  EXPECT_EQ(ParseLora("night:-1")->weight(), -1);
  EXPECT_EQ(ParseLora("a:b")->name(), "a:b");
  EXPECT_EQ(ParseLora("a:b:0")->name(), "a:b");
  EXPECT_EQ(ErrorReason(ParseLora(":1").status()), "USAGE");
}

TEST(CtlText, ALoraMayHaveStepsAndBlocks) {
  const auto lora = ParseLora("a/night:0.5@0.25-1,transformer.proj_out=0,text_encoder=-2");
  ASSERT_TRUE(lora.ok()) << lora.status();
  EXPECT_EQ(lora->name(), "a/night");
  EXPECT_EQ(lora->weight(), 0.5);
  EXPECT_EQ(lora->start(), 0.25);
  EXPECT_EQ(lora->end(), 1);
  EXPECT_EQ(lora->block_weights().at("transformer.proj_out"), 0);
  EXPECT_EQ(lora->block_weights().at("text_encoder"), -2);
  EXPECT_EQ(LoraText(*lora), "a/night:0.5@0.25-1,text_encoder=-2,transformer.proj_out=0");
  for (const char* bad : {"a@1", "a@x-1", "a,b", "a,=1", "a,b=x", "@0-1"}) {
    EXPECT_EQ(ErrorReason(ParseLora(bad).status()), "USAGE") << bad;
  }
}

TEST(CtlText, OutputNamesDifferForSeveralPictures) {
  EXPECT_EQ(ExpandOutput("a.png", {.index = 0, .count = 1}), "a.png");
  EXPECT_EQ(ExpandOutput("a.png", {.index = 1, .count = 2}), "a-1.png");
  EXPECT_EQ(ExpandOutput("dir.d/a", {.index = 1, .count = 2}), "dir.d/a-1");
  EXPECT_EQ(ExpandOutput("{job}-{seed}-{index}.jpg", {.job = "j", .index = 1, .seed = 42, .count = 2}),
            "j-42-1.jpg");
}

TEST(CtlText, JsonLeavesBinaryDataOutUnlessAskedFor) {
  v1::GenerateResponse response;
  auto* chunk = response.mutable_event()->mutable_image_chunk();
  chunk->set_index(3);
  chunk->set_data("abc");
  EXPECT_EQ(nlohmann::json::parse(MessageJson(response, false))["event"]["imageChunk"]["data"], "");
  EXPECT_EQ(nlohmann::json::parse(MessageJson(response, true))["event"]["imageChunk"]["data"], "YWJj");
  EXPECT_EQ(response.event().image_chunk().data(), "abc");
}

TEST(CtlText, JsonShowsFieldsThatAreZero) {
  v1::CacheRecord record;
  record.set_key("k");
  const auto json = nlohmann::json::parse(MessageJson(record, false));
  EXPECT_EQ(json["lockCount"], 0);
  EXPECT_TRUE(json["holders"].empty());
}

TEST(CtlText, AnErrorShowsReasonAndDetails) {
  const auto error =
      MakeError(absl::StatusCode::kNotFound, "MODEL_NOT_FOUND", "no model", {{"model", "m\x1b"}});
  EXPECT_EQ(ErrorText(error, false), "latentctl: NOT_FOUND MODEL_NOT_FOUND: no model\n  model: m?\n");
  const auto json = nlohmann::json::parse(ErrorText(error, true));
  EXPECT_EQ(json["reason"], "MODEL_NOT_FOUND");
  EXPECT_EQ(json["details"]["model"], "m\x1b");
}

TEST(CtlText, ExitCodesTellWhoIsToBlame) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCodeOf(MakeError(absl::StatusCode::kUnavailable, "SERVER_DRAINING", "")), kExitFailed);
  EXPECT_EQ(ExitCodeOf(absl::UnavailableError("connection refused")), kExitUnreachable);
  EXPECT_EQ(ExitCodeOf(MakeError(absl::StatusCode::kDataLoss, "DAMAGED_DATA", "")), kExitLocal);
}

v1::MemoryUse Use(const std::string& name, int64_t in_use, int64_t reserved) {
  v1::MemoryUse use;
  use.set_name(name);
  use.set_in_use_bytes(in_use);
  use.set_reserved_bytes(reserved);
  return use;
}

constexpr int64_t kMiB = 1 << 20;
const absl::Time kNow = absl::FromUnixSeconds(1'000'000);

v1::CacheRecord& AddRecord(v1::GetCacheStatsResponse& stats, const std::string& key, const std::string& kind,
                           int64_t bytes) {
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
v1::GetCacheStatsResponse Stats() {
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

TEST(CtlMemory, TheCacheShowsBudgetsUsesRecordsAndEvictions) {
  v1::GetCacheStatsResponse stats = Stats();
  stats.mutable_records(0)->set_stale(true);
  stats.set_leaving_bytes(kMiB);
  EXPECT_EQ(CacheText(stats, kNow),
            R"(RAM      40.0 MiB in use, 10.0 MiB reserved, of 100.0 MiB, peak 60.0 MiB, 1 waiting, 2 refused
sim:0    16.0 MiB in use, 16.0 MiB reserved, of 64.0 MiB, peak 48.0 MiB, 0 waiting, 0 refused
         16.0 MiB of records' copies, 16.0 MiB allocated, 8.00 MiB taken by other processes
         ever 3 copies of 48.0 MiB, 0 offloaded, 1 streamed in part
records  3, 40.0 MiB, and 1.00 MiB that are being freed
ever     20 hits, 4 loads of 45.0 MiB, 0 of them failed
evicted  1 for room, 1 unused for long, 0 trimmed, 0 dropped

USE      RAM                      sim:0
weights                 40.0 MiB                 16.0 MiB
working  0 B + 10.0 MiB reserved  0 B + 16.0 MiB reserved

RECORD             KIND         USE      SIZE      LOCKS  IDLE    LOAD    HOLDERS    ON DEVICES
shapes@9e1a8f      vae (stale)  weights  5.00 MiB      0  12.0 s  1.50 s
shapes@9e1a8f      transformer  weights  32.0 MiB      2          1.50 s  012345 ×2  sim:0 50%
lora/night@524770  lora         patches  3.00 MiB      1          1.50 s  pin

EVICTED         SIZE      REASON      AGO
b               5.00 MiB  room            3.00 s
old@9e1a8f:vae  5.00 MiB  keep_alive  1 min 15 s
)");
}

TEST(CtlMemory, BytesThatNoRecordAccountsForAreShown) {
  v1::GetCacheStatsResponse stats;
  EXPECT_THAT(CacheText(stats, kNow), Not(HasSubstr("ATTENTION")));
  stats.set_unaccounted_bytes(-2048);
  EXPECT_THAT(CacheText(stats, kNow), HasSubstr("ATTENTION  -2.00 KiB of RAM belong to no record: a bug"));
}

TEST(CtlMemory, AKeyDoesNotSayItsKindTwice) {
  EXPECT_EQ(ShortRecordKey("m@9e1a8f0544496637:vae", "vae"), "m@9e1a8f");
  EXPECT_EQ(ShortRecordKey("m@9e1a8f0544496637:conditioning/clip/104745b72c10e55f", "conditioning"),
            "m@9e1a8f:clip/104745");
  EXPECT_EQ(ShortRecordKey("m@9e1a8f0544496637:text_encoder_2", "text_encoder"), "m@9e1a8f:text_encoder_2");
  EXPECT_EQ(ShortRecordKey("lora/night", "lora"), "lora/night");
  EXPECT_EQ(ShortRecordKey("conditioning of clip", ""), "conditioning of clip");
}

v1::PlanResponse::Phase& AddPhase(v1::PlanResponse& plan, const std::string& component, int64_t resident) {
  v1::PlanResponse::Phase& phase = *plan.add_phases();
  phase.set_component(component);
  phase.set_device("sim:0");
  phase.set_working_bytes(2 * kMiB);
  phase.set_resident_bytes(resident);
  phase.set_full_bytes(32 * kMiB);
  return phase;
}

TEST(CtlMemory, APlanThatFitsSaysWhatItDoesAndHowLongItTakes) {
  v1::PlanResponse plan;
  plan.set_fits(true);
  plan.set_device("sim:0");
  plan.set_peak_ram_bytes(40 * kMiB);
  plan.set_seconds(2.5);
  plan.add_phases()->set_component("text_encoder");
  plan.mutable_phases(0)->set_cached(true);
  v1::PlanResponse::Phase& transformer = AddPhase(plan, "transformer", 8 * kMiB);
  transformer.set_working_measured(true);
  transformer.set_seconds(2);
  AddPhase(plan, "vae", 32 * kMiB);
  v1::PlanResponse::Load& load = *plan.add_loads();
  load.set_key("shapes@9e1a8f0544496637:vae");
  load.set_kind("vae");
  load.set_bytes(32 * kMiB);
  for (const char* device : {"", "sim:0"}) {
    v1::PlanResponse::Eviction& eviction = *plan.add_evictions();
    eviction.set_key("other@9e1a8f0544496637:vae");
    eviction.set_kind("vae");
    eviction.set_bytes(5 * kMiB);
    eviction.set_device(device);
  }
  EXPECT_EQ(PlanText(plan), R"(fits, on sim:0
takes about 2.50 s
holds at most 40.0 MiB of RAM

PHASE         DEVICE  WORKING              RESIDENT  SHARE  STREAMED  TIME
text_encoder                                                          cached
transformer   sim:0   2.00 MiB  measured   8.00 MiB    25%  24.0 MiB  2.00 s
vae           sim:0   2.00 MiB  estimated  32.0 MiB   100%

LOADS          KIND  SIZE
shapes@9e1a8f  vae   32.0 MiB
1 record, 32.0 MiB

EVICTS        KIND  SIZE      FROM
other@9e1a8f  vae   5.00 MiB  RAM
other@9e1a8f  vae   5.00 MiB  sim:0
2 records, 10.0 MiB
)");
}

TEST(CtlMemory, APlanThatDoesNotFitSaysWhy) {
  v1::PlanResponse plan;
  plan.set_device("cpu");
  *plan.mutable_reason() = ToRpcStatus(MakeError(absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED",
                                                 "the transformer does not fit",
                                                 {{"budget", "ram"}, {"needed_bytes", "33554432"}}));
  EXPECT_EQ(PlanText(plan),
            "does not fit, on cpu\n"
            "BUDGET_EXHAUSTED: the transformer does not fit\n"
            "  budget: ram\n"
            "  needed_bytes: 32.0 MiB\n"
            "holds at most 0 B of RAM\n");
}

TEST(CtlMemory, APlanForTheFirstJobKnowsNoTime) {
  v1::PlanResponse plan;
  plan.set_fits(true);
  plan.set_device("cpu");
  EXPECT_THAT(PlanText(plan), HasSubstr("\ntakes a time that is not known yet: no such job has run here\n"));
}

TEST(CtlMemory, AnAdaptedJobSaysWhatWasDoneAndWhy) {
  v1::JobEvent::Adapted adapted;
  adapted.set_component("vae");
  adapted.set_device("sim:0");
  adapted.set_reason("2 bytes are missing");
  adapted.set_measure(v1::JobEvent::Adapted::MEASURE_TILED);
  EXPECT_EQ(AdaptedText(adapted), "memory is short for vae on sim:0: works in tiles (2 bytes are missing)");
  adapted.set_measure(v1::JobEvent::Adapted::MEASURE_STREAMED);
  EXPECT_THAT(AdaptedText(adapted), HasSubstr(": streams its weights ("));
  adapted.set_measure(v1::JobEvent::Adapted::MEASURE_EVICTED);
  EXPECT_THAT(AdaptedText(adapted), HasSubstr(": took out what nobody uses ("));
}

TEST(CtlMemory, PhasesOfAJobShowWhatTheyTook) {
  v1::JobEvent::Done done;
  EXPECT_EQ(PhasesText(done), "");
  done.add_phases()->set_component("text_encoder");
  done.mutable_phases(0)->set_cached(true);
  v1::PhaseReport& transformer = *done.add_phases();
  transformer.set_component("transformer");
  transformer.set_device("sim:0");
  transformer.set_working_bytes(2 * kMiB);
  transformer.set_resident_bytes(8 * kMiB);
  transformer.set_full_bytes(32 * kMiB);
  v1::PhaseReport& vae = *done.add_phases();
  vae.set_component("vae");
  vae.set_device("cpu");
  vae.set_working_bytes(2 * kMiB);
  vae.set_working_peak_bytes(kMiB);
  vae.set_tiled(true);
  EXPECT_EQ(PhasesText(done), R"(PHASE         DEVICE  WORKING   PEAK      RESIDENT  SHARE  STREAMED
text_encoder                                                         cached
transformer   sim:0   2.00 MiB            8.00 MiB    25%  24.0 MiB
vae           cpu     2.00 MiB  1.00 MiB                             in tiles
)");
}

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

v1::JobEvent Header(int index, const std::string& data) {
  v1::JobEvent event;
  event.mutable_image_header()->set_index(index);
  event.mutable_image_header()->set_size(static_cast<int64_t>(data.size()));
  event.mutable_image_header()->set_sha256(Sha256Hex(data));
  return event;
}

v1::JobEvent Chunk(int index, int64_t offset, const std::string& data) {
  v1::JobEvent event;
  event.mutable_image_chunk()->set_index(index);
  event.mutable_image_chunk()->set_offset(offset);
  event.mutable_image_chunk()->set_data(data);
  return event;
}

TEST(CtlImages, ChunksMakeUpTheFile) {
  ImageReceiver receiver;
  EXPECT_FALSE(receiver.OnEvent(Header(0, "abcdef"))->has_value());
  EXPECT_FALSE(receiver.OnEvent(Chunk(0, 0, "abc"))->has_value());
  auto image = receiver.OnEvent(Chunk(0, 3, "def"));
  ASSERT_TRUE(image.ok() && image->has_value());
  EXPECT_EQ((*image)->data, "abcdef");
  EXPECT_TRUE(receiver.Finish().ok());
}

TEST(CtlImages, AWrongChecksumIsDamage) {
  ImageReceiver receiver;
  ASSERT_TRUE(receiver.OnEvent(Header(0, "abc")).ok());
  EXPECT_EQ(ErrorReason(receiver.OnEvent(Chunk(0, 0, "abd")).status()), "DAMAGED_DATA");
}

TEST(CtlImages, ChunksOutOfPlaceAreDamage) {
  for (const auto& chunk : {Chunk(0, 1, "a"), Chunk(1, 0, "a"), Chunk(0, 0, "abcd"), Chunk(0, 0, "")}) {
    ImageReceiver receiver;
    ASSERT_TRUE(receiver.OnEvent(Header(0, "abc")).ok());
    EXPECT_EQ(ErrorReason(receiver.OnEvent(chunk).status()), "DAMAGED_DATA") << chunk.ShortDebugString();
  }
}

TEST(CtlImages, AFileThatDoesNotEndIsDamage) {
  ImageReceiver receiver;
  ASSERT_TRUE(receiver.OnEvent(Header(0, "abc")).ok());
  ASSERT_TRUE(receiver.OnEvent(Chunk(0, 0, "ab")).ok());
  EXPECT_EQ(ErrorReason(receiver.Finish()), "DAMAGED_DATA");
  EXPECT_EQ(ErrorReason(receiver.OnEvent(Header(1, "abc")).status()), "DAMAGED_DATA");
}

TEST(CtlImages, TwoPixelsMakeOneCharacter) {
  const RgbImage image{1, 3, {1, 2, 3, 4, 5, 6, 7, 8, 9}};
  EXPECT_THAT(DrawHalfBlocks(image, 80, 24),
              ElementsAre("\x1b[38;2;1;2;3m\x1b[48;2;4;5;6m▀\x1b[0m", "\x1b[38;2;7;8;9m▀\x1b[0m"));
}

TEST(CtlImages, APictureFitsIntoTheTerminal) {
  const RgbImage wide{200, 100, std::vector<uint8_t>(200 * 100 * 3)};
  EXPECT_THAT(DrawHalfBlocks(wide, 80, 24), SizeIs(20));
  const RgbImage high{100, 200, std::vector<uint8_t>(200 * 100 * 3)};
  EXPECT_THAT(DrawHalfBlocks(high, 80, 24), SizeIs(24));
}

TEST(CtlImages, ASmallPictureIsEnlargedByAWholeNumber) {
  const RgbImage image{2, 1, {1, 1, 1, 2, 2, 2}};
  const RgbImage large = EnlargeToFit(image, 5, 24);
  EXPECT_EQ(large.width, 4);
  EXPECT_EQ(large.height, 2);
  EXPECT_EQ(large.pixels, (std::vector<uint8_t>{1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2,  //
                                                1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2}));
}

v1::SessionRequest Request(SessionScript& script, const std::string& line) {
  auto command = script.Parse(line);
  EXPECT_TRUE(command.ok()) << command.status();
  return command.ok() ? command->request : v1::SessionRequest();
}

TEST(CtlJob, VaeTilingIsTheServersWhereItIsNotGiven) {
  const auto tiling = [](const std::string& text) {
    JobOptions options;
    options.vae_tiling = text;
    return Params(options)->vae_tiling();
  };
  EXPECT_EQ(tiling(""), v1::VAE_TILING_UNSPECIFIED);
  EXPECT_EQ(tiling("never"), v1::VAE_TILING_NEVER);
  EXPECT_EQ(tiling("when-needed"), v1::VAE_TILING_WHEN_NEEDED);
  EXPECT_EQ(tiling("always"), v1::VAE_TILING_ALWAYS);
}

TEST(CtlSession, LinesBecomeRequests) {
  SessionScript script({});
  EXPECT_EQ(Request(script, "generate a red circle").denoise().params().prompt(), "a red circle");
  const auto loras = Request(script, "loras a:1 b:0.5").set_loras();
  ASSERT_EQ(loras.loras_size(), 2);
  EXPECT_EQ(loras.loras(1).name(), "b");
  EXPECT_EQ(loras.loras(1).weight(), 0.5);
  EXPECT_EQ(Request(script, "loras").set_loras().loras_size(), 0);
  EXPECT_EQ(Request(script, "cancel job-7").cancel().job_id(), "job-7");
  EXPECT_TRUE(Request(script, " close ").has_close());
}

TEST(CtlSession, CancelWithoutANameMeansTheLastJob) {
  SessionScript script({});
  EXPECT_EQ(script.Parse("cancel").status().code(), absl::StatusCode::kInvalidArgument);
  const std::string job = Request(script, "generate x").denoise().job_id();
  EXPECT_EQ(Request(script, "cancel").cancel().job_id(), job);
}

TEST(CtlSession, EveryJobHasItsOwnName) {
  SessionScript script({});
  EXPECT_NE(Request(script, "generate x").denoise().job_id(),
            Request(script, "generate x").denoise().job_id());
}

TEST(CtlSession, SetChangesTheJobsThatFollow) {
  v1::GenerateParams start;
  start.set_steps(4);
  SessionScript script(start);
  EXPECT_EQ(Request(script, "generate x").denoise().params().steps(), 4);
  for (const char* line :
       {"set steps 8", "set seed 18446744073709551615", "set negative_prompt dark sky",
        "set true_cfg_scale 2.5", "set image_format IMAGE_FORMAT_JPEG", "set vae_tiling VAE_TILING_ALWAYS"}) {
    auto command = script.Parse(line);
    ASSERT_TRUE(command.ok()) << command.status();
    EXPECT_EQ(command->kind, SessionCommand::Kind::kNothing);
  }
  const auto params = Request(script, "generate x").denoise().params();
  EXPECT_EQ(params.steps(), 8);
  EXPECT_EQ(params.seed(), 18446744073709551615u);
  EXPECT_EQ(params.negative_prompt(), "dark sky");
  EXPECT_EQ(params.true_cfg_scale(), 2.5);
  EXPECT_EQ(params.image_format(), v1::IMAGE_FORMAT_JPEG);
  EXPECT_EQ(params.vae_tiling(), v1::VAE_TILING_ALWAYS);
  ASSERT_TRUE(script.Parse("set steps").ok());
  EXPECT_FALSE(Request(script, "generate x").denoise().params().has_steps());
}

TEST(CtlSession, AMessageCanBeGivenAsJson) {
  SessionScript script({});
  const auto request =
      Request(script, R"({"requestId": "r", "denoise": {"jobId": "j", "params": {"prompt": "p"}}})");
  EXPECT_EQ(request.request_id(), "r");
  EXPECT_EQ(request.denoise().job_id(), "j");
  EXPECT_EQ(Request(script, "cancel").cancel().job_id(), "j");
  EXPECT_EQ(Request(script, R"({"denoise": {}})").denoise().job_id(), "job-1");
}

TEST(CtlSession, EmptyLinesAndCommentsAreNothing) {
  SessionScript script({});
  EXPECT_EQ(script.Parse("")->kind, SessionCommand::Kind::kNothing);
  EXPECT_EQ(script.Parse("# generate x")->kind, SessionCommand::Kind::kNothing);
  EXPECT_EQ(script.Parse("wait")->kind, SessionCommand::Kind::kWait);
}

TEST(CtlSession, WhatIsNotUnderstoodIsAnErrorWithTheCommands) {
  SessionScript script({});
  for (const char* line : {"paint x", "generate", "set colour red", "set steps many", "{", "loras :1"}) {
    EXPECT_EQ(ErrorReason(script.Parse(line).status()), "USAGE") << line;
  }
  EXPECT_THAT(std::string(script.Parse("paint x").status().message()), HasSubstr("generate PROMPT"));
}

}  // namespace
}  // namespace latentd::ctl
