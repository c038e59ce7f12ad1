// Two threads: the main one draws and reads keys, the other asks the server. An interrupt and a new size of
// the terminal wake the main one.
#include "server/ctl/top_live.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "cache/base/error.h"
#include "latentd/v1/cache.grpc.pb.h"
#include "latentd/v1/server.grpc.pb.h"
#include "server/ctl/terminal.h"
#include "server/ctl/text.h"
#include "server/ctl/top.h"
#include "server/rpc/listener.h"

namespace latentd::ctl {
namespace {

constexpr absl::Duration kDefaultInterval = absl::Seconds(1);
// Of one question, where the user gave no limit: a server that hangs is an error to show.
constexpr absl::Duration kAskLimit = absl::Seconds(5);
constexpr char kCtrlZ = 0x1a;

// Asks over one connection for as long as that is good.
class Source {
 public:
  explicit Source(const GlobalOptions& global) : global_(global) {}

  absl::StatusOr<TopSnapshot> Ask() {
    absl::StatusOr<TopSnapshot> snapshot = TryAsk();
    if (!snapshot.ok()) channel_ = nullptr;
    return snapshot;
  }

 private:
  absl::StatusOr<TopSnapshot> TryAsk() {
    if (channel_ == nullptr) {
      ASSIGN_OR_RETURN(channel_, Connect(global_));
    }
    auto server = v1::ServerService::NewStub(channel_);
    auto cache = v1::CacheService::NewStub(channel_);
    TopSnapshot out;
    {
      Call call(global_, kAskLimit);
      RETURN_IF_ERROR(call.Result(server->GetServerInfo(call.context(), {}, &out.info)));
    }
    {
      Call call(global_, kAskLimit);
      RETURN_IF_ERROR(call.Result(server->ListSessions(call.context(), {}, &out.sessions)));
    }
    {
      Call call(global_, kAskLimit);
      RETURN_IF_ERROR(call.Result(cache->GetCacheStats(call.context(), {}, &out.cache)));
    }
    out.time = absl::Now();
    return out;
  }

  const GlobalOptions& global_;
  std::shared_ptr<grpc::Channel> channel_;
};

void Take(absl::StatusOr<TopSnapshot> snapshot, TopState& state) {
  state.error = snapshot.status();
  if (!snapshot.ok()) return;
  // Another run of the server counts anew.
  const bool same = state.now && state.now->info.instance() == snapshot->info.instance();
  state.before = same ? std::move(state.now) : std::nullopt;
  state.now = *std::move(snapshot);
}

// Asks at every interval in a thread of its own.
class Poller {
 public:
  Poller(Source source, TopState first, absl::Duration interval)
      : news_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        source_(std::move(source)),
        interval_(interval),
        state_(std::move(first)),
        thread_([this] { Run(); }) {}

  ~Poller() {
    {
      absl::MutexLock lock(&mu_);
      stop_ = true;
    }
    // A call may begin just now.
    while (!Finished(absl::Milliseconds(20))) CancelCall();
    thread_.join();
  }

  // Readable when there is something new.
  int fd() const { return news_.get(); }

  TopState Latest() {
    eventfd_t count = 0;
    eventfd_read(news_.get(), &count);
    absl::MutexLock lock(&mu_);
    return state_;
  }

 private:
  bool Finished(absl::Duration within) {
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&finished_), within);
  }

  void Run() {
    absl::MutexLock lock(&mu_);
    while (!mu_.AwaitWithTimeout(absl::Condition(&stop_), interval_)) {
      mu_.Unlock();
      absl::StatusOr<TopSnapshot> snapshot = source_.Ask();
      mu_.Lock();
      Take(std::move(snapshot), state_);
      eventfd_write(news_.get(), 1);
    }
    finished_ = true;
  }

  const Fd news_;
  Source source_;  // the thread's
  const absl::Duration interval_;
  absl::Mutex mu_;
  TopState state_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

int resized = -1;  // the descriptor that OnResize makes readable

void OnResize(int) {
  const int error = errno;
  eventfd_write(resized, 1);
  errno = error;
}

// SIGWINCH as a descriptor. It stays for the rest of the process.
int ResizeFd() {
  resized = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  struct sigaction action = {};
  action.sa_handler = OnResize;
  action.sa_flags = SA_RESTART;
  sigaction(SIGWINCH, &action, nullptr);
  return resized;
}

void RunLive(Source source, TopState first, absl::Duration interval) {
  FullScreen screen;
  const InterruptWatch interrupt([&] { screen.Leave(); });
  const int resize = ResizeFd();
  screen.Enter();
  Poller poller(std::move(source), std::move(first), interval);
  const bool keys = IsTerminal(STDIN_FILENO);
  while (true) {
    const TerminalSize size = GetTerminalSize();
    screen.Draw(DrawTop(poller.Latest(), size, absl::Now()), size);
    pollfd wait[] = {{.fd = poller.fd(), .events = POLLIN, .revents = 0},
                     {.fd = interrupt.fd(), .events = POLLIN, .revents = 0},
                     {.fd = resize, .events = POLLIN, .revents = 0},
                     {.fd = keys ? STDIN_FILENO : -1, .events = POLLIN, .revents = 0}};
    if (poll(wait, 4, -1) < 0) continue;
    if (wait[1].revents != 0) break;
    if (wait[2].revents != 0) {
      eventfd_t count = 0;
      eventfd_read(resize, &count);
    }
    if (wait[3].revents != 0) {
      char key = 0;
      if (read(STDIN_FILENO, &key, 1) != 1 || key == 'q' || key == 'Q') break;
      if (key == kCtrlZ) screen.Suspend();
    }
  }
  screen.Leave();  // at once: the poller's end may take a moment
}

}  // namespace

absl::Status RunTop(const GlobalOptions& global, const TopOptions& options) {
  Source source(global);
  TopState state;
  ASSIGN_OR_RETURN(TopSnapshot first, source.Ask());
  Take(std::move(first), state);
  const char* terminal = std::getenv("TERM");
  const bool can_draw =
      IsTerminal(STDOUT_FILENO) && terminal != nullptr && absl::string_view(terminal) != "dumb";
  if (!options.once && !global.json && can_draw) {
    RunLive(std::move(source), std::move(state), options.interval.value_or(kDefaultInterval));
    return absl::OkStatus();
  }
  if (options.interval) {
    absl::SleepFor(*options.interval);
    ASSIGN_OR_RETURN(TopSnapshot second, source.Ask());
    Take(std::move(second), state);
  }
  std::string out;
  if (global.json) {
    out = TopJson(state) + "\n";
  } else {
    // What is not for eyes alone is not cut, unless a width was asked for.
    const bool cut = IsTerminal(STDOUT_FILENO) || std::getenv("COLUMNS") != nullptr;
    const TerminalSize size = {.columns = cut ? GetTerminalSize().columns : 0, .rows = 0};
    for (const StyledLine& line : DrawTop(state, size, absl::Now())) out += line.text + "\n";
  }
  std::fwrite(out.data(), 1, out.size(), stdout);
  std::fflush(stdout);
  return absl::OkStatus();
}

}  // namespace latentd::ctl
