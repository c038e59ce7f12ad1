#include "cache/base/start_thread.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

TEST(StartThread, RunsItsBody) {
  bool ran = false;
  absl::StatusOr<std::thread> thread = StartThread("a test", [&] { ran = true; });
  ASSERT_TRUE(thread.ok()) << thread.status();
  thread->join();
  EXPECT_TRUE(ran);
}

TEST(StartThread, AFailureThatIsAskedForIsATypedError) {
  FaultInjector::Arm(FaultPoint::kThread, 1);
  const absl::StatusOr<std::thread> thread = StartThread("a test", [] { ADD_FAILURE(); });
  EXPECT_TRUE(FaultInjector::Disarm());
  EXPECT_EQ(ErrorReason(thread.status()), "NO_THREADS");
}

// In a process of its own, with a limit of one process for a user that has one: the system's refusal itself.
TEST(StartThread, WhatTheSystemRefusesIsATypedError) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit limit{1, 1};
    // Limits do not hold for root.
    if (setrlimit(RLIMIT_NPROC, &limit) != 0 ||
        (getuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0))) {
      _exit(2);
    }
    absl::StatusOr<std::thread> thread = StartThread("a test", [] {});
    if (thread.ok()) thread->detach();
    _exit(ErrorReason(thread.status()) == "NO_THREADS" && absl::IsResourceExhausted(thread.status()) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  if (WEXITSTATUS(status) == 2) GTEST_SKIP() << "this user may not change its limits";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace latentd
