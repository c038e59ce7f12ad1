#include "server/rpc/peer.h"

#include <gtest/gtest.h>

#include "cache/base/error.h"

namespace latentd {
namespace {

// As gRPC writes it: a URI, in which brackets are escaped.
TEST(Peer, IsReadFromTheNameOfThePair) {
  const Peer tcp = PeerOf("unix-abstract:latentd/00ff-7/ipv4:10.0.0.9:1234");
  EXPECT_EQ(tcp.address, "ipv4:10.0.0.9:1234");
  EXPECT_FALSE(tcp.local);
  const Peer six = PeerOf("unix-abstract:latentd/00ff-7/ipv6:%5B::1%5D:1234");
  EXPECT_EQ(six.address, "ipv6:[::1]:1234");
  EXPECT_FALSE(six.local);
  const Peer local = PeerOf("unix-abstract:latentd/00ff-7/unix:");
  EXPECT_EQ(local.address, "unix:");
  EXPECT_TRUE(local.local);
  EXPECT_FALSE(PeerOf("unix-abstract:latentd/00ff-7/?").local);
}

TEST(Peer, OfAConnectionWithoutARelay) {
  EXPECT_FALSE(PeerOf("ipv4:127.0.0.1:1234").local);
  EXPECT_TRUE(PeerOf("unix:/run/latentd.sock").local);
  EXPECT_FALSE(PeerOf("").local);
}

TEST(Peer, OnlyTheUnixSocketIsForAdministration) {
  EXPECT_TRUE(
      CheckAdmin(std::string("unix-abstract:") + PairName({"unix:", true}, "1"), false, "SetCap").ok());
  const std::string tcp = std::string("unix-abstract:") + PairName({"ipv4:127.0.0.1:5", false}, "1");
  const absl::Status refused = CheckAdmin(tcp, false, "SetCap");
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ErrorReason(refused), "ADMIN_REQUIRES_LOCAL");
  EXPECT_TRUE(CheckAdmin(tcp, true, "SetCap").ok());
}

}  // namespace
}  // namespace latentd
