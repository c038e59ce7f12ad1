// Where a daemon listens and a client connects: "unix:PATH" or "HOST:PORT".
#ifndef LATENTD_SERVER_RPC_ADDRESS_H_
#define LATENTD_SERVER_RPC_ADDRESS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

inline constexpr int kDefaultPort = 7411;

struct Address {
  std::string path;  // of a Unix socket; empty for TCP
  std::string host;  // "127.0.0.1", "::1", "localhost"; without brackets
  int port = 0;

  bool is_unix() const { return !path.empty(); }
  // True when nobody outside of this machine can connect.
  bool is_local() const;
  // As it is written: "unix:/run/x.sock", "[::1]:7411". gRPC takes it as a target.
  std::string ToString() const;
};

// Errors: INVALID_ARGUMENT INVALID_ADDRESS with the two forms that are understood. Port 0 is taken: the
// system chooses.
absl::StatusOr<Address> ParseAddress(absl::string_view text);

// Where a daemon listens unless told otherwise: a Unix socket in $XDG_RUNTIME_DIR, else in
// $RUNTIME_DIRECTORY (systemd), else for root in /run/latentd; and loopback TCP.
std::vector<std::string> DefaultListenAddresses();

// Where a client looks for a daemon, in this order.
std::vector<std::string> DefaultClientAddresses();

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_ADDRESS_H_
