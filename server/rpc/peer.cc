#include "server/rpc/peer.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

constexpr absl::string_view kPairPrefix = "latentd/";
constexpr absl::string_view kAbstract = "unix-abstract:";

// gRPC writes addresses as URIs.
std::string PercentDecoded(absl::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && absl::ascii_isxdigit(text[i + 1]) &&
        absl::ascii_isxdigit(text[i + 2])) {
      out += absl::HexStringToBytes(text.substr(i + 1, 2));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace

SocketPeer PeerOfSocket(int fd) {
  sockaddr_storage storage = {};
  socklen_t size = sizeof(storage);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return {{"?", false}, "?"};
  if (storage.ss_family == AF_UNIX) {
    ucred credentials = {};
    socklen_t length = sizeof(credentials);
    const bool known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0;
    return {{"unix:", true}, known ? absl::StrCat("uid ", credentials.uid) : "uid ?"};
  }
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getnameinfo(reinterpret_cast<sockaddr*>(&storage), size, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return {{"?", false}, "?"};
  }
  if (storage.ss_family == AF_INET6) return {{absl::StrCat("ipv6:[", host, "]:", port), false}, host};
  return {{absl::StrCat("ipv4:", host, ":", port), false}, host};
}

std::string PairName(const Peer& peer, absl::string_view number) {
  return absl::StrCat(kPairPrefix, number, "/", peer.address);
}

Peer PeerOf(absl::string_view grpc_peer) {
  std::string address = PercentDecoded(grpc_peer);
  absl::string_view name = address;
  if (absl::ConsumePrefix(&name, kAbstract) && absl::ConsumePrefix(&name, kPairPrefix)) {
    address = std::string(name.substr(name.find('/') + 1));
  }
  const bool local = absl::StartsWith(address, "unix:") || absl::StartsWith(address, kAbstract);
  return {local ? "unix:" : address, local};
}

absl::Status CheckAdmin(absl::string_view grpc_peer, bool over_tcp, absl::string_view what) {
  if (over_tcp || PeerOf(grpc_peer).local) return absl::OkStatus();
  return MakeError(absl::StatusCode::kPermissionDenied, "ADMIN_REQUIRES_LOCAL",
                   absl::StrCat(what,
                                " is for clients on the server's Unix socket; use that one, or let the "
                                "operator set admin_over_tcp"));
}

}  // namespace latentd
