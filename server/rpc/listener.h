// The daemon's sockets: binds them, accepts connections and hands these to a gRPC server.
//
// gRPC's own listener is not used, for what it does in the version of Debian 12: it never accepts again once
// file descriptors ran out, and it shares a port with a second daemon without a word. This one
//   - waits and goes on when descriptors run out, and tells the client by closing the connection
//   - keeps to a number of connections, of which each listener has some for itself, and each peer some at
//   most
//   - puts a Relay between clients and gRPC, which ends what would use up memory
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
#ifndef LATENTD_SERVER_RPC_LISTENER_H_
#define LATENTD_SERVER_RPC_LISTENER_H_

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
#include "cache/base/fd.h"
#include "server/rpc/address.h"
#include "server/rpc/relay.h"

namespace latentd {

struct ListenerOptions {
  std::vector<std::string> addresses;
  // Less when the limit of open files is below five times as many.
  int64_t max_connections = 256;
  int64_t max_connections_per_peer = 256;  // of one IP address, or one user of Unix sockets
  Http2Limits http2 = {};
  RequestMemory* request_memory = nullptr;  // outlives the listener; null: one of its own
};

class Listener {
 public:
  using Stats = Relay::Stats;

  // Errors: INVALID_ARGUMENT INVALID_ADDRESS; FAILED_PRECONDITION ADDRESS_IN_USE (somebody listens there, or
  // the path is a file of another kind); PERMISSION_DENIED and INTERNAL BIND_FAILED.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const ListenerOptions& options);

  // Stops, and ends all connections.
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

  explicit Listener(const ListenerOptions& options);
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

  const int64_t max_connections_;
  std::unique_ptr<RequestMemory> own_memory_;
  RelayLimits limits_;
  std::unique_ptr<Relay> relay_;  // from Bind on
  std::vector<std::string> addresses_;
  std::vector<Socket> sockets_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;

  Fd epoll_, wake_;
  Fd reserve_;  // given up for a moment to be able to accept and close when there are no descriptors
  std::thread thread_;
  std::atomic<bool> stopping_ = false;
  std::atomic<int64_t> refused_ = 0;  // for want of descriptors
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_LISTENER_H_
