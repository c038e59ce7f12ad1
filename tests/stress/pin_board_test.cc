#include "server/pin_board.h"

#include <future>

#include "absl/time/clock.h"
#include "cache/error.h"
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
