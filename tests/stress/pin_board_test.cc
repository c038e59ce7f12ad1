#include "server/catalog/pin_board.h"

#include <atomic>
#include <future>
#include <stop_token>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"
#include "tests/stress/in_process_server.h"

namespace latentd {
namespace {

constexpr char kLora[] = "dusk";

TEST(PinBoardTest, ALoadThatWaitsForMemoryEndsWhenTheBoardIsClosed) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB"}));
  ServerCore& core = server.core();
  const int64_t cap = server.stats().ram.cap_bytes;
  auto taken = core.ram->Reserve({.bytes = cap - 1024, .owner = "somebody", .what = "test"});
  ASSERT_TRUE(taken.ok()) << taken.status();
  auto load =
      std::async(std::launch::async, [&] { return core.pins->Load(kLora, {}, "sim:0", true).status(); });
  while (server.stats().ram.waiting == 0) absl::SleepFor(absl::Milliseconds(1));
  core.draining = true;
  core.pins->Close();
  EXPECT_EQ(ErrorReason(load.get()), "SERVER_DRAINING");
  taken->Release();
  EXPECT_EQ(ErrorReason(core.pins->Load(kLora, {}, "", true).status()), "SERVER_DRAINING");
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

TEST(PinBoardTest, ACancelEndsALoadThatWaitsForMemory) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB"}));
  ServerCore& core = server.core();
  auto taken =
      core.ram->Reserve({.bytes = server.stats().ram.cap_bytes - 1024, .owner = "somebody", .what = "test"});
  ASSERT_TRUE(taken.ok()) << taken.status();
  std::stop_source stop;
  auto load = std::async(std::launch::async, [&] {
    return core.pins->Load(kLora, {}, "", /*pin=*/true, stop.get_token()).status();
  });
  while (server.stats().ram.waiting == 0) absl::SleepFor(absl::Milliseconds(1));
  stop.request_stop();
  EXPECT_EQ(ErrorReason(load.get()), "CANCELLED");
  taken->Release();
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

// What ends their wait, a session that closes, is the workers' business.
TEST(PinBoardTest, LoadsWaitOnThreadsOfTheirOwnAndAreBounded) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB"}));
  ServerCore& core = server.core();
  const int workers = core.workers->thread_count();
  std::atomic<int> begun = 0, done = 0;
  std::atomic<bool> go_on = false;
  const auto load = [&] {
    ++begun;
    while (!go_on) absl::SleepFor(absl::Milliseconds(1));
    ++done;
  };
  for (int i = 0; i < PinBoard::kMaxLoads; ++i) ASSERT_TRUE(core.pins->Submit(load).ok());
  while (begun < PinBoard::kMaxLoads) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(core.workers->thread_count(), workers);
  const absl::Status one_more = core.pins->Submit(load);
  EXPECT_EQ(ErrorReason(one_more), "TOO_MANY_LOADS");
  EXPECT_EQ(GetErrorDetails(one_more).at("limit"), absl::StrCat(PinBoard::kMaxLoads));
  go_on = true;
  while (!core.pins->Submit(load).ok()) absl::SleepFor(absl::Milliseconds(1));
  while (done < PinBoard::kMaxLoads + 1) absl::SleepFor(absl::Milliseconds(1));
}

// A load that waits does not count as one that holds what another load has.
TEST(PinBoardTest, PinsAreHeldUnderOneNameWhicheverLoadTheyCameFrom) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB"}));
  ServerCore& core = server.core();
  ASSERT_TRUE(core.pins->Load(kLora, {}, "sim:0", /*pin=*/true).ok());
  ASSERT_TRUE(core.pins->Load(kDemoModel, {"vae"}, "", /*pin=*/true).ok());
  for (const RecordStats& record : server.stats().records) {
    for (const std::string& holder : record.holders) EXPECT_EQ(holder, "pin") << record.key.ToString();
  }
  ASSERT_TRUE(core.pins->Unload(kLora).ok());
  ASSERT_TRUE(core.pins->Unload(kDemoModel).ok());
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

TEST(PinBoardTest, NothingIsPinnedAfterwards) {
  InProcessServer server(InProcessServer::DefaultConfig({"sim:0=64MiB"}));
  ServerCore& core = server.core();
  ASSERT_TRUE(core.pins->Load(kLora, {}, "sim:0", true).ok());
  EXPECT_NE(server.WhatIsNotAtRest(), "");
  core.draining = true;
  core.pins->Close();
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

}  // namespace
}  // namespace latentd
