#include "server/ctl/client.h"

#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "cache/base/error.h"
#include "server/ctl/text.h"
#include "server/rpc/address.h"
#include "server/rpc/grpc_errors.h"

namespace latentd::ctl {
namespace {

constexpr int kMaxResponseBytes = 64 << 20;
constexpr int kProbeMs = 1000;

struct Interrupts {
  absl::Mutex mu;
  int count ABSL_GUARDED_BY(mu) = 0;
  grpc::ClientContext* call ABSL_GUARDED_BY(mu) = nullptr;
  int watch ABSL_GUARDED_BY(mu) = -1;
  std::function<void()> before_exit ABSL_GUARDED_BY(mu);
};

Interrupts& TheInterrupts() {
  static auto& interrupts = *new Interrupts;
  return interrupts;
}

bool Answers(const sockaddr* target, socklen_t size) {
  const int fd = socket(target->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return false;
  bool connected = connect(fd, target, size) == 0;
  if (!connected && errno == EINPROGRESS) {
    pollfd wait = {.fd = fd, .events = POLLOUT, .revents = 0};
    int error = 1;
    socklen_t error_size = sizeof(error);
    connected = poll(&wait, 1, kProbeMs) == 1 &&
                getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_size) == 0 && error == 0;
  }
  close(fd);
  return connected;
}

bool Answers(const Address& address) {
  if (address.is_unix()) {
    sockaddr_un target = {};
    target.sun_family = AF_UNIX;
    address.path.copy(target.sun_path, sizeof(target.sun_path) - 1);
    return Answers(reinterpret_cast<const sockaddr*>(&target), sizeof(target));
  }
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found) != 0)
    return false;
  bool answers = false;
  for (const addrinfo* target = found; target != nullptr && !answers; target = target->ai_next) {
    answers = Answers(target->ai_addr, target->ai_addrlen);
  }
  freeaddrinfo(found);
  return answers;
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const GlobalOptions& options) {
  std::vector<std::string> candidates;
  if (!options.address.empty()) {
    candidates = {options.address};
  } else if (const char* address = std::getenv("LATENTD_ADDRESS"); address != nullptr && *address != '\0') {
    candidates = {address};
  } else {
    candidates = DefaultClientAddresses();
  }
  for (const std::string& candidate : candidates) {
    ASSIGN_OR_RETURN(const Address address, ParseAddress(candidate));
    if (!Answers(address)) continue;
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxResponseBytes);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    return grpc::CreateCustomChannel(address.ToString(), grpc::InsecureChannelCredentials(), arguments);
  }
  return MakeError(absl::StatusCode::kUnavailable, "NO_SERVER",
                   absl::StrCat("no daemon answers at ", absl::StrJoin(candidates, " or "),
                                "; start one, or say where it is with --address"),
                   {{"address", absl::StrJoin(candidates, " ")}});
}

void InstallInterruptHandler() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  std::thread([signals] {
    Interrupts& interrupts = TheInterrupts();
    while (true) {
      int signal = 0;
      sigwait(&signals, &signal);
      absl::MutexLock lock(&interrupts.mu);
      // With nothing to cancel, or nobody who listens, there is nothing to wait for.
      if (++interrupts.count > 1 || (interrupts.call == nullptr && interrupts.watch < 0)) {
        if (interrupts.before_exit) interrupts.before_exit();
        _exit(kExitInterrupted);
      }
      if (interrupts.call != nullptr) interrupts.call->TryCancel();
      if (interrupts.watch >= 0) eventfd_write(interrupts.watch, 1);
    }
  }).detach();
}

bool Interrupted() {
  absl::MutexLock lock(&TheInterrupts().mu);
  return TheInterrupts().count > 0;
}

InterruptWatch::InterruptWatch(std::function<void()> before_exit) : fd_(eventfd(0, EFD_CLOEXEC)) {
  absl::MutexLock lock(&TheInterrupts().mu);
  TheInterrupts().watch = fd_.get();
  TheInterrupts().before_exit = std::move(before_exit);
}

InterruptWatch::~InterruptWatch() {
  absl::MutexLock lock(&TheInterrupts().mu);
  TheInterrupts().watch = -1;
  TheInterrupts().before_exit = nullptr;
}

void CancelCall() {
  absl::MutexLock lock(&TheInterrupts().mu);
  if (TheInterrupts().call != nullptr) TheInterrupts().call->TryCancel();
}

Call::Call(const GlobalOptions& options, std::optional<absl::Duration> limit) {
  if (options.timeout) limit = options.timeout;
  if (limit) context_.set_deadline(absl::ToChronoTime(absl::Now() + *limit));
  absl::MutexLock lock(&TheInterrupts().mu);
  TheInterrupts().call = &context_;
}

Call::~Call() {
  absl::MutexLock lock(&TheInterrupts().mu);
  TheInterrupts().call = nullptr;
}

absl::Status Call::Result(const grpc::Status& status) const {
  if (status.error_code() == grpc::StatusCode::CANCELLED && Interrupted()) {
    return MakeError(absl::StatusCode::kCancelled, "INTERRUPTED", "interrupted");
  }
  return FromGrpcStatus(status);
}

}  // namespace latentd::ctl
