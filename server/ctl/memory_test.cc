#include "server/ctl/memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cache/base/error.h"
#include "server/ctl/test_stats.h"
#include "server/rpc/grpc_errors.h"

namespace latentd::ctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

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

TEST(CtlMemory, ARecordIsShownByTheModelsThatUseIt) {
  v1::CacheRecord record;
  record.set_key("weights/9e1a8f0544496637:vae");
  EXPECT_EQ(NamedKey(record.key(), record.names()), "weights/9e1a8f0544496637:vae");
  record.add_names("a@1111111111111111");
  EXPECT_EQ(NamedKey(record.key(), record.names()), "a@1111111111111111:vae");
  record.add_names("b@2222222222222222");
  record.add_names("c@3333333333333333");
  EXPECT_EQ(NamedKey(record.key(), record.names()), "a@1111111111111111 +2:vae");
  EXPECT_EQ(NamedKey("lora/night@1111111111111111", record.names()), "lora/night@1111111111111111");
}

TEST(CtlMemory, AKeyDoesNotSayItsKindTwice) {
  EXPECT_EQ(ShortRecordKey("m@9e1a8f0544496637:vae", "vae"), "m@9e1a8f");
  EXPECT_EQ(ShortRecordKey("m@9e1a8f0544496637:conditioning/clip/104745b72c10e55f", "conditioning"),
            "m@9e1a8f:clip/104745");
  EXPECT_EQ(ShortRecordKey("m@9e1a8f0544496637:text_encoder_2", "text_encoder"), "m@9e1a8f:text_encoder_2");
  EXPECT_EQ(ShortRecordKey("lora/night", "lora"), "lora/night");
  EXPECT_EQ(ShortRecordKey("m@9e1a8f0544496637 +2:vae", "vae"), "m@9e1a8f +2");
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

}  // namespace
}  // namespace latentd::ctl
