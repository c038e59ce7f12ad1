// latentd: the daemon's main. Exit codes: 0 after a drained stop, 78 (EX_CONFIG) for settings that cannot
// work, 1 for anything else.
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <iostream>
#include <thread>

#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "server/config.h"
#include "server/daemon.h"
#include "server/logging.h"
#include "server/version.h"
#include "spdlog/spdlog.h"

namespace {

// OpenMP's workers would spin while they wait, which on a busy machine costs a multiple of what it saves. The
// library reads this before main runs, so it takes a second start.
void WaitPassively(char** argv) {
  if (getenv("OMP_WAIT_POLICY") != nullptr) return;
  setenv("OMP_WAIT_POLICY", "PASSIVE", 1);
  execv("/proc/self/exe", argv);
}

// The second start is known to the system by the link that it went through: "exe". Threads take their name
// from here.
void NameProcess() { prctl(PR_SET_NAME, "latentd"); }

// Connections are counted against the limit of open files; the soft one is low by habit.
void RaiseFileLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

int main(int argc, char** argv) {
  WaitPassively(argv);
  NameProcess();
  RaiseFileLimit();
  const latentd::DaemonCommand command = latentd::ParseDaemonCommandLine(argc, argv, std::cout, std::cerr);
  if (command.exit) return command.exit_code;
  const latentd::Config& config = command.config;
  latentd::SetUpLogging(config.log_level, config.log_format);

  // Signals are waited for, not handled: blocked here, so in every thread that follows.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a limit of file size is an error of the upload that meets it

  auto daemon = latentd::Daemon::Start(config);
  if (!daemon.ok()) {
    spdlog::error("cannot start: {}", std::string(daemon.status().message()));
    return absl::IsInvalidArgument(daemon.status()) ? latentd::kExitConfig : 1;
  }
  spdlog::info("latentd {} listens on {}", latentd::kVersion, absl::StrJoin((*daemon)->addresses(), ", "));

  int signal_number = 0;
  sigwait(&signals, &signal_number);
  spdlog::info("{}: stopping", signal_number == SIGTERM ? "SIGTERM" : "SIGINT");
  // A second signal, or a stop that hangs, ends the process all the same.
  std::thread([&signals, limit = config.drain_timeout] {
    timespec wait = absl::ToTimespec(limit + absl::Seconds(15));
    const int second = sigtimedwait(&signals, nullptr, &wait);
    spdlog::error("{}", second > 0 ? "second signal: exit at once" : "the stop took too long: exit");
    _exit(1);
  }).detach();
  (*daemon)->Drain();
  daemon->reset();
  spdlog::info("stopped");
  spdlog::shutdown();
  _exit(0);
}
