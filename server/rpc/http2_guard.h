// What one HTTP/2 connection may ask of the gRPC behind it. No sockets and no clock of its own in it.
//
// gRPC (in the version of Debian 12) keeps state for whatever a client sends: streams that are reset at once,
// PINGs whose answers are not read, half a message. A guard reads the frames that pass, in both directions,
// and says how far the client's bytes may go now:
//   - frames that only cost (PING, SETTINGS, RST_STREAM, crumbs of data, …) are paced: some at once, then so
//     many a second, and more in proportion to what is really transferred
//   - calls at a time, and calls of all connections together, are limited; what goes beyond is refused
//   - a request message goes on when there is room for all of it in the RequestMemory, which all guards
//   share,
//     and keeps that until gRPC has answered or asked for the next
//   - a connection that says nothing, a call without a request, and a request that stands still are ended
// Refused calls hear of it as gRPC errors with a reason. A client that breaks the protocol, or goes on
// beyond its pace, loses its connection (GOAWAY with ENHANCE_YOUR_CALM).
//
// The bytes must be plain HTTP/2: TLS would have to end before them.
//
// One thread at a time.
#ifndef LATENTD_SERVER_RPC_HTTP2_GUARD_H_
#define LATENTD_SERVER_RPC_HTTP2_GUARD_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/rpc/request_memory.h"

namespace latentd {

struct Http2Limits {
  int64_t max_streams = 128;          // at a time, of one connection; what gRPC tells clients
  int64_t max_streams_of_all = 4096;  // beyond them a connection has its share, and kStreamsForSure
  int64_t max_message_bytes = int64_t{48} << 20;
  absl::Duration request_timeout = absl::Seconds(10);
};

// Fills up over time, to at most its size.
class Allowance {
 public:
  Allowance(double start, double size, double per_second)
      : size_(size), per_second_(per_second), left_(start) {}

  // Takes one when there is one.
  bool Take(absl::Time now);
  void GiveBack() { Add(1); }
  void Add(double more) { left_ = std::min(size_, left_ + more); }

 private:
  double size_, per_second_, left_;
  absl::Time filled_ = absl::InfinitePast();
};

// What all guards of a server share.
struct SharedLimits {
  int64_t open_streams = 0;
  int64_t connections = 0;  // that have spoken
  Allowance resets{4000, 4000, 2000};
};

class Http2Guard {
 public:
  // Streams that a connection may open whatever others do; and its share of all.
  static constexpr int64_t kStreamsForSure = 16;

  // `memory` and `shared` are those of all guards of a server and outlive them. `owner` names the client in
  // the memory's accounts.
  Http2Guard(const Http2Limits& limits, RequestMemory* memory, SharedLimits* shared, std::string owner,
             absl::Time now);
  ~Http2Guard();
  Http2Guard(const Http2Guard&) = delete;
  Http2Guard& operator=(const Http2Guard&) = delete;

  // Moves what may pass from the front of `in` (bytes of the client) to the end of `out`. True when it
  // stopped because the client has to wait; false when more bytes are needed, or the connection is over().
  bool PassClientBytes(std::string& in, std::string& out, absl::Time now);

  // The same for bytes of the server, all of which pass; refusals are put between them.
  void PassServerBytes(absl::string_view in, std::string& out);

  // Looks at the clock. Refusals may become due: see TakeRefusals.
  void Tick(absl::Time now);

  // What refusals have for gRPC and, between two frames of the server, for the client. Call after the others.
  void TakeRefusals(std::string& to_server, std::string& to_client);

  // Why the connection must end; OK while it may go on.
  const absl::Status& over() const { return over_; }
  // The client has introduced itself (HTTP/2's preface); it has made a call.
  bool spoken() const { return preface_passed_; }
  bool used() const { return last_stream_ > 0; }
  int64_t open_streams() const { return static_cast<int64_t>(streams_.size()); }
  // GOAWAY with ENHANCE_YOUR_CALM; empty while a frame of the server is half sent.
  std::string Goodbye() const;

 private:
  struct Frame {
    uint32_t length = 0;
    uint8_t type = 0;
    uint8_t flags = 0;
    uint32_t stream = 0;
  };
  // A call.
  struct Stream {
    absl::Time opened;
    absl::Time moved;                                 // bytes of a message came
    absl::Time must_be_whole;                         // the message that is on its way
    absl::Time waits_since = absl::InfiniteFuture();  // for room: bytes of its message must not go on
    uint32_t size = 0, left = 0;                      // of that message, and what is still to come of it
    uint32_t prefix_bytes = 0;                        // of the next message's prefix that have come
    unsigned char prefix[5] = {};
    bool any_message = false;  // a whole one has come
    bool half_closed = false;  // the client has said all
    bool answered = false;     // the server's headers have passed
    RequestMemory::Charge charge;
  };
  enum class Turn { kGo, kWait, kMore };

  int64_t FairShare() const;
  static Frame ParseFrame(const char* bytes);
  Turn PassPiece(absl::string_view in, size_t* passed, absl::Time now);
  Turn PassPreface(absl::string_view in, size_t* passed);
  Turn Admit(const Frame& frame, absl::Time now);
  Turn AdmitHeaders(const Frame& frame, absl::Time now);
  Turn AdmitContinuation(const Frame& frame);
  Turn AdmitData(const Frame& frame, absl::Time now);
  Turn AdmitReset(const Frame& frame, absl::Time now);
  Turn AdmitSettings(const Frame& frame, absl::Time now);
  Turn Paced(Allowance& allowance, absl::Time now);
  void FrameDone();
  // How many bytes of a DATA frame may pass; none: wait.
  size_t AdmitPayload(absl::string_view bytes, absl::Time now);
  void StartMessage(uint32_t id, Stream& stream, absl::Time now);
  bool FindRoom(Stream& stream, absl::Time now);
  absl::Status StandsStill(const Stream& stream, absl::Time now) const;

  void OnServerFrame(const Frame& frame);
  void Refuse(uint32_t id, const absl::Status& status);
  void Close(uint32_t id);
  Turn End(absl::string_view why);
  bool between_client_frames() const { return preface_passed_ && payload_left_ == 0 && headers_of_ == 0; }
  bool between_server_frames() const {
    return server_head_.empty() && server_left_ == 0 && !server_in_headers_ && server_spoke_;
  }

  const Http2Limits limits_;
  RequestMemory* const memory_;
  SharedLimits* const shared_;
  const std::string owner_;
  const absl::Time born_;
  absl::Status over_;
  absl::flat_hash_map<uint32_t, Stream> streams_;

  // The client's side.
  bool preface_passed_ = false;
  bool settings_passed_ = false;
  bool settings_agreed_ = false;  // the client has acknowledged the server's, so it knows max_streams
  Frame frame_;                   // the one whose payload is passing
  uint32_t payload_left_ = 0;
  uint32_t headers_of_ = 0;  // the stream whose header block is not whole
  int64_t headers_bytes_ = 0;
  int continuations_ = 0;
  absl::Status refused_;  // what becomes of the call whose headers are passing
  uint32_t last_stream_ = 0;
  absl::Time half_since_ = absl::InfiniteFuture();     // a frame has begun, and nothing of it came since
  absl::Time backlog_since_ = absl::InfiniteFuture();  // frames that only cost wait for their turn
  Allowance control_, resets_, updates_, calls_;

  // The server's side.
  bool server_spoke_ = false;
  std::string server_head_;  // of a frame's 9 bytes
  uint32_t server_left_ = 0;
  bool server_in_headers_ = false;
  std::string to_server_, to_client_;  // of refusals
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_HTTP2_GUARD_H_
