// The daemon's sockets: binds them, accepts connections and hands these to a gRPC server.
//
// gRPC's own listener is not used, for what it does in the version of Debian 12: it never accepts again once
// file descriptors ran out, and it shares a port with a second daemon without a word. This one
//   - waits and goes on when descriptors run out, and tells the client by closing the connection
//   - keeps to a number of connections
//   - binds a TCP port or Unix socket for itself alone; replaces a socket file that nobody listens on
//   - takes over sockets that systemd passes (LISTEN_FDS), in place of the addresses
//   - gives Unix sockets the mode 0660 and removes them when it stops
//
// Bind() first, then AddTo() before the server is built, Start() after; Stop() before the server's
// Shutdown(). All but Bind() from one thread; stats() from any.
//
//   ASSIGN_OR_RETURN(auto listener, Listener::Bind({.addresses = config.listen}));
//   listener->AddTo(builder, grpc::InsecureServerCredentials());
//   auto server = builder.BuildAndStart();
//   listener->Start();
#ifndef LATENTD_SERVER_LISTENER_H_
#define LATENTD_SERVER_LISTENER_H_

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "server/address.h"

namespace latentd {

// A file descriptor that is closed with its owner. Move-only.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

struct ListenerOptions {
  std::vector<std::string> addresses;
  // Less when the limit of open files is below four times as many.
  int64_t max_connections = 256;
};

class Listener {
 public:
  struct Stats {
    int64_t open = 0;      // connections now
    int64_t accepted = 0;  // ever
    int64_t refused = 0;   // closed at once: too many connections, or no descriptors
  };

  // Errors: INVALID_ARGUMENT INVALID_ADDRESS; FAILED_PRECONDITION ADDRESS_IN_USE (somebody listens there, or
  // the path is a file of another kind); PERMISSION_DENIED and INTERNAL BIND_FAILED.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const ListenerOptions& options);

  ~Listener() { Stop(); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  void AddTo(grpc::ServerBuilder& builder, const std::shared_ptr<grpc::ServerCredentials>& credentials);
  void Start();

  // Accepts no more, closes the sockets and removes their files. Connections go on. Idempotent.
  void Stop();

  // What is listened on, with the ports that the system chose for port 0.
  const std::vector<std::string>& addresses() const { return addresses_; }
  int64_t max_connections() const { return max_connections_; }
  Stats stats() const;

 private:
  // What is listened on.
  struct Socket {
    Fd fd;
    std::string file = "";  // to remove at the end; empty for TCP and for systemd's
    dev_t device = 0;       // of the file, so that another daemon's is not removed
    ino_t inode = 0;
  };

  explicit Listener(int64_t max_connections) : max_connections_(max_connections) {}
  absl::Status BindUnix(const Address& address);
  absl::Status BindTcp(const Address& address);
  absl::Status TakeSystemdSockets();
  void Add(Socket socket);

  void Run();
  // Takes one connection off the socket, to serve or to close it. False, with errno, when there is none or
  // nothing can be done.
  bool AcceptOne(int listen_fd);
  // The same with no descriptor free: closes it.
  bool RefuseOne(int listen_fd);
  void OnHangUp(int fd);

  int64_t max_connections_;
  std::vector<std::string> addresses_;
  std::vector<Socket> sockets_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;

  Fd epoll_, wake_;
  Fd reserve_;  // given up for a moment to be able to accept and close when there are no descriptors
  std::thread thread_;
  std::atomic<bool> stopping_ = false;
  std::atomic<int64_t> open_ = 0, accepted_ = 0, refused_ = 0;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_LISTENER_H_
