// The daemon: a ServerCore behind gRPC, from its start to its drained end.
#ifndef LATENTD_SERVER_DAEMON_H_
#define LATENTD_SERVER_DAEMON_H_

#include <grpcpp/server.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/config.h"
#include "server/rpc/listener.h"
#include "server/server_core.h"

namespace latentd {

class Daemon {
 public:
  // Binds, builds and serves. Errors: those of ServerCore::Create and Listener::Bind; INTERNAL when gRPC
  // cannot start.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const Config& config);
  ~Daemon();

  const std::vector<std::string>& addresses() const { return listener_->addresses(); }
  ServerCore& core() { return *core_; }

  // Takes nothing new, tells the health service first, lets running jobs finish for the config's
  // drain_timeout, then cancels what is left and stops. Uploads end at once. Blocks. Once.
  void Drain();

 private:
  struct Services;
  Daemon() = default;

  std::unique_ptr<ServerCore> core_;
  std::unique_ptr<Services> services_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<grpc::Server> server_;
  bool drained_ = false;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_DAEMON_H_
