// Carries bytes between clients and gRPC, and ends connections that ask too much.
//
// For each connection there is a socket pair, one end of which gRPC has, and an Http2Guard, which says what
// may pass. A client that does not read is not read to: what gRPC has for it stays in the pair. There are
// limits on connections: of all, of one listener (so that others keep some), of one peer. Beyond them a new
// connection takes the place of one that has said nothing yet, or has never made a call; else it is refused.
//
// One thread of its own carries everything. Add and stats may be called from any thread.
#ifndef LATENTD_SERVER_RPC_RELAY_H_
#define LATENTD_SERVER_RPC_RELAY_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "cache/base/fd.h"
#include "cache/base/mutex.h"
#include "server/rpc/http2_guard.h"
#include "server/rpc/peer.h"
#include "server/rpc/request_memory.h"

namespace latentd {

struct RelayLimits {
  int64_t connections = 256;
  int64_t connections_per_listener = 256;
  int64_t connections_per_peer = 256;
  Http2Limits http2;
};

class Relay {
 public:
  struct Stats {
    int64_t open = 0;       // connections now
    int64_t accepted = 0;   // ever
    int64_t refused = 0;    // beyond a limit, or without descriptors
    int64_t displaced = 0;  // silent or unused ones that made room
    int64_t ended = 0;      // for what they did
  };

  // `memory` must outlive it.
  Relay(const RelayLimits& limits, RequestMemory* memory);
  // Carries what gRPC has said to its end, for two seconds at most, and closes all connections.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Takes a client's connection. Returns the end for gRPC; none when it was refused. `listener` tells
  // listeners apart.
  Fd Add(Fd client, int listener);

  Stats stats() const;

 private:
  struct Connection;
  // What may be looked at from other threads.
  struct Entry {
    int listener = 0;
    std::string group;
    bool spoken = false, used = false;
    absl::Time born;
  };

  bool MakeRoom(int listener, const std::string& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Displace(int listener, const std::string* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Forget(uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void Run();
  void TakeIn();
  void OnEvent(Connection& connection, bool of_client, uint32_t events);
  void Carry(Connection& connection);
  static bool Listens(const Connection& connection);
  bool CarryToServer(Connection& connection);
  bool CarryToClient(Connection& connection);
  void Watch(Connection& connection);
  void Tick();
  void End(Connection& connection);

  const RelayLimits limits_;
  RequestMemory* const memory_;
  const std::string nonce_;
  Fd epoll_, wake_;
  std::atomic<bool> stopping_ = false;

  mutable Mutex mu_;
  uint64_t next_ ABSL_GUARDED_BY(mu_) = 1;
  std::map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mu_);  // of open connections; ids grow with time
  std::map<int, int64_t> by_listener_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, int64_t> by_group_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<Connection>> fresh_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> displaced_ ABSL_GUARDED_BY(mu_);
  Stats stats_ ABSL_GUARDED_BY(mu_);

  // The thread's.
  SharedLimits shared_;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::vector<char> scratch_;
  absl::Time logged_ = absl::InfinitePast();
  int64_t waiting_ = 0;  // connections whose client has to wait
  std::thread thread_;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_RELAY_H_
