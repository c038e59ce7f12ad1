// Who is at the other end of a call.
//
// Between a client and gRPC stands a Relay, so that gRPC sees one end of a socket pair. The relay names its
// own end after the client; gRPC reports that name, and PeerOf reads it.
#ifndef LATENTD_SERVER_RPC_PEER_H_
#define LATENTD_SERVER_RPC_PEER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace latentd {

struct Peer {
  std::string address;  // "ipv4:127.0.0.1:50000", "ipv6:[::1]:50000", "unix:"
  bool local = false;   // on a Unix socket: one whom the socket's file mode lets in
};

// Who is connected to this socket, and for how many a limit by peer counts it: the address without the port,
// or the user. "?" when the system does not say.
struct SocketPeer {
  Peer peer;
  std::string group;  // "127.0.0.1", "uid 1000"
};
SocketPeer PeerOfSocket(int fd);

// A name for the relay's end of a socket pair, for an abstract Unix address; `number` makes it unlike others.
std::string PairName(const Peer& peer, absl::string_view number);

// From what grpc::ServerContext::peer() says, of a relay's connection or another one.
Peer PeerOf(absl::string_view grpc_peer);

// OK for a client on a Unix socket, or for everybody where `over_tcp`. Else PERMISSION_DENIED
// ADMIN_REQUIRES_LOCAL; `what` starts the message: "SetCap".
absl::Status CheckAdmin(absl::string_view grpc_peer, bool over_tcp, absl::string_view what);

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_PEER_H_
