#include "server/rpc/listener.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

constexpr int kBacklog = 128;
constexpr int kRetryMs = 100;         // between attempts while there are no descriptors
constexpr int kFirstSystemdFd = 3;    // SD_LISTEN_FDS_START
constexpr int kFdsPerConnection = 5;  // the client's, a pair to gRPC, and some for everything else
constexpr int kShareForEach = 8;      // of this many connections, each listener has one for itself alone

absl::Status BindError(const std::string& address, const std::string& what, int error) {
  auto code = absl::StatusCode::kInternal;
  const char* reason = "BIND_FAILED";
  if (error == EADDRINUSE) code = absl::StatusCode::kFailedPrecondition, reason = "ADDRESS_IN_USE";
  if (error == EACCES || error == EPERM) code = absl::StatusCode::kPermissionDenied;
  return MakeError(code, reason,
                   absl::StrCat("cannot listen on ", address, ": ", what, ": ", std::strerror(error)),
                   {{"address", address}});
}

absl::Status InUse(const std::string& address, const std::string& why) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "ADDRESS_IN_USE",
                   absl::StrCat("cannot listen on ", address, ": ", why), {{"address", address}});
}

sockaddr_un UnixAddress(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof(address.sun_path) - 1));
  return address;
}

bool SomebodyListens(const std::string& path) {
  Fd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const sockaddr_un address = UnixAddress(path);
  // A full backlog (EAGAIN) has a listener too.
  return connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
         errno == EAGAIN;
}

// The address that a socket is bound to, in our spelling.
std::string BoundAddress(int fd) {
  sockaddr_storage storage = {};
  socklen_t size = sizeof(storage);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return "?";
  if (storage.ss_family == AF_UNIX)
    return absl::StrCat("unix:", reinterpret_cast<sockaddr_un*>(&storage)->sun_path);
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getnameinfo(reinterpret_cast<sockaddr*>(&storage), size, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "?";
  }
  Address address;
  address.host = host;
  address.port = std::atoi(port);
  return address.ToString();
}

int64_t ConnectionsThatFit(int64_t wanted) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return wanted;
  return std::clamp<int64_t>(static_cast<int64_t>(limit.rlim_cur) / kFdsPerConnection, 1, wanted);
}

Fd OpenReserve() { return Fd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

bool OutOfDescriptors(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

}  // namespace

Listener::Listener(const ListenerOptions& options)
    : max_connections_(ConnectionsThatFit(options.max_connections)),
      own_memory_(options.request_memory == nullptr
                      ? std::make_unique<RequestMemory>(2 * options.http2.max_message_bytes, nullptr)
                      : nullptr),
      limits_{.connections = max_connections_,
              .connections_per_listener = max_connections_,
              .connections_per_peer = options.max_connections_per_peer,
              .http2 = options.http2} {}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(const ListenerOptions& options) {
  std::unique_ptr<Listener> listener(new Listener(options));
  listener->epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  listener->wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  listener->reserve_ = OpenReserve();
  if (!listener->epoll_ || !listener->wake_) return BindError("any address", "no descriptors", errno);
  RETURN_IF_ERROR(listener->TakeSystemdSockets());
  if (listener->sockets_.empty()) {
    for (const std::string& text : options.addresses) {
      ASSIGN_OR_RETURN(const Address address, ParseAddress(text));
      RETURN_IF_ERROR(address.is_unix() ? listener->BindUnix(address) : listener->BindTcp(address));
    }
  }
  const auto others = static_cast<int64_t>(listener->sockets_.size()) - 1;
  const int64_t for_each = std::max<int64_t>(1, listener->max_connections_ / kShareForEach);
  listener->limits_.connections_per_listener =
      std::max<int64_t>(1, listener->max_connections_ - others * for_each);
  RequestMemory* memory =
      options.request_memory == nullptr ? listener->own_memory_.get() : options.request_memory;
  listener->relay_ = std::make_unique<Relay>(listener->limits_, memory);
  return listener;
}

void Listener::Add(Socket socket) {
  addresses_.push_back(BoundAddress(socket.fd.get()));
  sockets_.push_back(std::move(socket));
}

absl::Status Listener::BindUnix(const Address& address) {
  const std::string name = address.ToString();
  const std::filesystem::path folder = std::filesystem::path(address.path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);  // bind tells if that failed

  struct stat file = {};
  if (lstat(address.path.c_str(), &file) == 0) {
    if (!S_ISSOCK(file.st_mode)) return InUse(name, "there is a file that is no socket");
    if (SomebodyListens(address.path)) return InUse(name, "another daemon listens there");
    unlink(address.path.c_str());
  }
  Socket socket{.fd = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0))};
  if (!socket.fd) return BindError(name, "socket", errno);
  // The file's mode is the socket's less the umask: never wider than meant, and as meant a moment later.
  constexpr mode_t kMode = 0660;
  fchmod(socket.fd.get(), kMode);
  const sockaddr_un target = UnixAddress(address.path);
  if (bind(socket.fd.get(), reinterpret_cast<const sockaddr*>(&target), sizeof(target)) != 0) {
    return BindError(name, "bind", errno);
  }
  chmod(address.path.c_str(), kMode);
  if (lstat(address.path.c_str(), &file) == 0) {
    socket.file = address.path;
    socket.device = file.st_dev;
    socket.inode = file.st_ino;
  }
  if (listen(socket.fd.get(), kBacklog) != 0) return BindError(name, "listen", errno);
  Add(std::move(socket));
  return absl::OkStatus();
}

absl::Status Listener::BindTcp(const Address& address) {
  const std::string name = address.ToString();
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (int error = getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found);
      error != 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_ADDRESS",
                     absl::StrCat("cannot listen on ", name, ": ", gai_strerror(error)), {{"address", name}});
  }
  std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  absl::Status missing;
  bool bound = false;
  for (const addrinfo* target = found; target != nullptr; target = target->ai_next) {
    Socket socket{.fd = Fd(::socket(target->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0))};
    const int on = 1;
    // Over the remains of a daemon that just ended, but not beside one that lives: that would be
    // SO_REUSEPORT.
    setsockopt(socket.fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (target->ai_family == AF_INET6)
      setsockopt(socket.fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
    if (!socket.fd || bind(socket.fd.get(), target->ai_addr, target->ai_addrlen) != 0) {
      // A name may stand for an address family that this machine does not have.
      if (errno != EADDRNOTAVAIL && errno != EAFNOSUPPORT) return BindError(name, "bind", errno);
      missing = BindError(name, "bind", errno);
      continue;
    }
    if (listen(socket.fd.get(), kBacklog) != 0) return BindError(name, "listen", errno);
    Add(std::move(socket));
    bound = true;
  }
  return bound ? absl::OkStatus() : missing;
}

absl::Status Listener::TakeSystemdSockets() {
  const char* pid = std::getenv("LISTEN_PID");
  const char* count = std::getenv("LISTEN_FDS");
  int64_t pid_number = 0, fds = 0;
  const bool ours = pid != nullptr && count != nullptr && absl::SimpleAtoi(pid, &pid_number) &&
                    pid_number == getpid() && absl::SimpleAtoi(count, &fds);
  for (const char* variable : {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}) unsetenv(variable);
  for (int64_t i = 0; ours && i < fds; ++i) {
    Socket socket{.fd = Fd(static_cast<int>(kFirstSystemdFd + i))};
    const int fd = socket.fd.get();
    int listening = 0, type = 0;
    socklen_t size = sizeof(int);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 || listening == 0 ||
        getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM) {
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_ADDRESS",
                       absl::StrCat("descriptor ", fd, " of LISTEN_FDS is no listening stream socket"));
    }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    Add(std::move(socket));
  }
  return absl::OkStatus();
}

void Listener::AddTo(grpc::ServerBuilder& builder,
                     const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials);
}

void Listener::Start() {
  const auto watch = [&](int fd) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  };
  watch(wake_.get());
  for (const Socket& socket : sockets_) watch(socket.fd.get());
  thread_ = std::thread([this] { Run(); });
}

void Listener::Stop() {
  stopping_ = true;
  if (thread_.joinable()) {
    eventfd_write(wake_.get(), 1);
    thread_.join();
  }
  for (const Socket& socket : sockets_) {
    struct stat file = {};
    if (!socket.file.empty() && lstat(socket.file.c_str(), &file) == 0 && file.st_dev == socket.device &&
        file.st_ino == socket.inode) {
      unlink(socket.file.c_str());
    }
  }
  sockets_.clear();
}

Listener::Stats Listener::stats() const {
  Stats stats = relay_->stats();
  stats.refused += refused_;
  return stats;
}

void Listener::Run() {
  constexpr int kEvents = 64;
  epoll_event events[kEvents];
  while (!stopping_) {
    const int count = epoll_wait(epoll_.get(), events, kEvents, -1);
    bool short_of_descriptors = false;
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == wake_.get()) continue;
      while (AcceptOne(fd)) {
      }
      short_of_descriptors |= OutOfDescriptors(errno);
    }
    // A socket stays readable while nothing can be taken from it: without a pause this would spin.
    if (short_of_descriptors) usleep(kRetryMs * 1000);
  }
}

bool Listener::AcceptOne(int listen_fd) {
  Fd connection(accept4(listen_fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!connection) {
    if (errno == ECONNABORTED || errno == EINTR) return true;
    return OutOfDescriptors(errno) && RefuseOne(listen_fd);
  }
  const int on = 1;
  setsockopt(connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // a Unix socket ignores it
  Fd for_grpc = relay_->Add(std::move(connection), listen_fd);
  if (!for_grpc) return true;
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
  parameters.listener_fd = listen_fd;
  parameters.fd = for_grpc.release();
  acceptor_->HandleNewConnection(&parameters);
  return true;
}

bool Listener::RefuseOne(int listen_fd) {
  if (!reserve_) reserve_ = OpenReserve();
  if (!reserve_) return false;
  reserve_.reset();
  Fd connection(accept4(listen_fd, nullptr, nullptr, SOCK_CLOEXEC));
  const int error = errno;
  const bool taken = static_cast<bool>(connection);
  connection.reset();
  reserve_ = OpenReserve();
  errno = error;
  if (!taken) return false;
  if (refused_++ == 0)
    spdlog::warn("out of file descriptors: connections are closed; raise the limit of open files");
  return true;
}

}  // namespace latentd
