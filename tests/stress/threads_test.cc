// A system that gives no more threads: the server says so at start, and goes on with what it has later.
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "gtest/gtest.h"
#include "tests/stress/in_process_server.h"

namespace latentd {
namespace {

TEST(Threads, AServerWithoutWorkersDoesNotStart) {
  FaultInjector::Arm(FaultPoint::kThread, 1);
  const auto core = ServerCore::Create(InProcessServer::DefaultConfig());
  EXPECT_TRUE(FaultInjector::Disarm());
  EXPECT_EQ(ErrorReason(core.status()), "NO_THREADS") << core.status();
}

// The thread that copies to a device is made for each phase that streams.
TEST(Threads, AJobWithoutAThreadFailsAndTheNextOneDoesNot) {
  Config config = InProcessServer::DefaultConfig();
  config.residency = "stream";
  InProcessServer server(config);
  const Outcome whole = server.Generate(SmallJob());
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  bool refused = false;
  for (int n = 1; n < 20; ++n) {
    FaultInjector::Arm(FaultPoint::kThread, n);
    const Outcome outcome = server.Generate(SmallJob());
    if (!FaultInjector::Disarm()) break;
    // A worker that is not there leaves the work to the others.
    EXPECT_TRUE(outcome.status.ok() || ErrorReason(outcome.status) == "NO_THREADS") << outcome.status;
    refused = refused || !outcome.status.ok();
    EXPECT_EQ(server.WhatIsNotAtRest(), "");
  }
  EXPECT_TRUE(refused);
  EXPECT_EQ(server.Generate(SmallJob()).sha256, whole.sha256);
}

}  // namespace
}  // namespace latentd
