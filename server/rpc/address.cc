#include "server/rpc/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

constexpr char kSystemSocket[] = "unix:/run/latentd/latentd.sock";

absl::Status InvalidAddress(absl::string_view text, absl::string_view why) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_ADDRESS",
                   absl::StrCat("address '", text, "': ", why, "; write unix:PATH or HOST:PORT"),
                   {{"address", std::string(text)}});
}

std::string SocketBelow(const char* variable) {
  const char* folder = std::getenv(variable);
  return folder != nullptr && *folder == '/' ? absl::StrCat("unix:", folder, "/latentd.sock") : "";
}

std::string LoopbackAddress() { return absl::StrCat("127.0.0.1:", kDefaultPort); }

}  // namespace

// A name may lead anywhere, whatever it looks like; the one that does not is reserved (RFC 6761).
bool Address::is_local() const {
  if (is_unix() || host == "localhost") return true;
  in_addr v4 = {};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6 = {};
  if (inet_pton(AF_INET6, host.c_str(), &v6) != 1) return false;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
}

std::string Address::ToString() const {
  if (is_unix()) return absl::StrCat("unix:", path);
  if (absl::StrContains(host, ":")) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

absl::StatusOr<Address> ParseAddress(absl::string_view text) {
  Address out;
  if (absl::StartsWith(text, "unix:")) {
    out.path = std::string(text.substr(5));
    if (out.path.empty()) return InvalidAddress(text, "no path");
    if (out.path.size() >= sizeof(sockaddr_un::sun_path)) {
      return InvalidAddress(
          text, absl::StrCat("path is longer than ", sizeof(sockaddr_un::sun_path) - 1, " bytes"));
    }
    return out;
  }
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return InvalidAddress(text, "no port");
  absl::string_view host = text.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (absl::StrContains(host, ":")) {
    return InvalidAddress(text, "an IPv6 address stands in brackets");
  }
  if (host.empty()) return InvalidAddress(text, "no host");
  if (!absl::SimpleAtoi(text.substr(colon + 1), &out.port) || out.port < 0 || out.port > 65535) {
    return InvalidAddress(text, "the port is not a number from 0 to 65535");
  }
  out.host = std::string(host);
  return out;
}

std::vector<std::string> DefaultListenAddresses() {
  std::vector<std::string> out;
  std::string socket = SocketBelow("XDG_RUNTIME_DIR");
  if (socket.empty()) socket = SocketBelow("RUNTIME_DIRECTORY");
  if (socket.empty() && geteuid() == 0) socket = kSystemSocket;
  if (!socket.empty()) out.push_back(socket);
  out.push_back(LoopbackAddress());
  return out;
}

std::vector<std::string> DefaultClientAddresses() {
  std::vector<std::string> out;
  if (std::string socket = SocketBelow("XDG_RUNTIME_DIR"); !socket.empty()) out.push_back(socket);
  out.push_back(kSystemSocket);
  out.push_back(LoopbackAddress());
  return out;
}

}  // namespace latentd
