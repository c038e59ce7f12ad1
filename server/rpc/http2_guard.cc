#include "server/rpc/http2_guard.h"

#include <cstring>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/rpc/grpc_errors.h"

namespace latentd {
namespace {

constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr size_t kHeadBytes = 9;  // of a frame

enum FrameType : uint8_t {
  kData = 0,
  kHeaders = 1,
  kRstStream = 3,
  kSettings = 4,
  kPushPromise = 5,
  kGoaway = 7,
  kWindowUpdate = 8,
  kContinuation = 9
};
constexpr uint8_t kEndStream = 0x1, kAck = 0x1, kEndHeaders = 0x4, kPadded = 0x8;
constexpr uint32_t kNoError = 0, kCancel = 8, kEnhanceYourCalm = 11;

// gRPC takes 8 KiB of metadata; what goes far beyond is no request.
constexpr int64_t kMaxHeaderBlock = 64 * 1024;
constexpr int kMaxContinuations = 8;
// Data frames below this that end no message: each may keep a whole read buffer in gRPC.
constexpr uint32_t kCrumb = 512;
// Messages up to this size are bounded by the number of calls alone.
constexpr uint32_t kSmallMessage = 16 * 1024;
// Those up to this size may wait for long while gRPC is not asked for them: chunks of uploads.
constexpr uint32_t kChunkMessage = 2 * 1024 * 1024;
constexpr absl::Duration kChunkTime = absl::Minutes(10);
constexpr int64_t kMinBytesPerSecond = 64 * 1024;
// How much longer than to its first byte a request may take.
constexpr int kPatience = 3;

// One more frame that only costs, for so many bytes of data.
constexpr double kReadBytesPerFrame = 2048, kSentBytesPerFrame = 4096, kReadBytesPerUpdate = 512;

void AppendFrame(std::string& out, uint8_t type, uint8_t flags, uint32_t stream, absl::string_view payload) {
  const auto length = static_cast<uint32_t>(payload.size());
  const unsigned char head[kHeadBytes] = {static_cast<unsigned char>(length >> 16),
                                          static_cast<unsigned char>(length >> 8),
                                          static_cast<unsigned char>(length),
                                          type,
                                          flags,
                                          static_cast<unsigned char>(stream >> 24),
                                          static_cast<unsigned char>(stream >> 16),
                                          static_cast<unsigned char>(stream >> 8),
                                          static_cast<unsigned char>(stream)};
  out.append(reinterpret_cast<const char*>(head), kHeadBytes);
  absl::StrAppend(&out, payload);
}

std::string BigEndian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16), static_cast<char>(value >> 8),
          static_cast<char>(value)};
}

// HPACK: a string as it is, its length in a prefix of 7 bits.
void AppendHpackString(std::string& out, absl::string_view text) {
  size_t length = text.size();
  if (length < 127) {
    out += static_cast<char>(length);
  } else {
    out += static_cast<char>(127);
    for (length -= 127; length >= 128; length /= 128) out += static_cast<char>(length % 128 + 128);
    out += static_cast<char>(length);
  }
  absl::StrAppend(&out, text);
}

// A field that is not put into the table, so that the server's own encoder is not disturbed.
void AppendField(std::string& out, absl::string_view name, absl::string_view value) {
  out += '\0';
  AppendHpackString(out, name);
  AppendHpackString(out, value);
}

std::string PercentEncoded(absl::string_view text) {
  std::string out;
  for (unsigned char c : text) {
    if (c >= 0x20 && c < 0x7f && c != '%') {
      out += static_cast<char>(c);
    } else {
      absl::StrAppend(&out, "%", absl::Hex(c, absl::kZeroPad2));
    }
  }
  return out;
}

// A header block that ends a call. The first one of a call has HTTP's status too.
std::string EndOfCall(const absl::Status& status, bool first) {
  constexpr char kStatus200 = static_cast<char>(0x88);  // of HPACK's static table
  const google::rpc::Status rpc = ToRpcStatus(status);
  std::string block;
  if (first) {
    block += kStatus200;
    AppendField(block, "content-type", "application/grpc");
  }
  AppendField(block, "grpc-status", absl::StrCat(rpc.code()));
  AppendField(block, "grpc-message", PercentEncoded(rpc.message()));
  std::string details = absl::Base64Escape(rpc.SerializeAsString());
  while (absl::EndsWith(details, "=")) details.pop_back();
  AppendField(block, "grpc-status-details-bin", details);
  return block;
}

absl::Status TooManyCalls(absl::string_view whose, int64_t limit) {
  return MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_CALLS",
                   absl::StrCat(whose, " has ", limit, " calls, which is the limit; wait for one"),
                   {{"limit", absl::StrCat(limit)}, {"retry_ms", "1000"}});
}

absl::Status TooLarge(uint32_t bytes, int64_t limit) {
  return MakeError(
      absl::StatusCode::kResourceExhausted, "MESSAGE_TOO_LARGE",
      absl::StrCat("a request of ", bytes, " bytes is more than max_message_bytes, which is ", limit),
      {{"bytes", absl::StrCat(bytes)}, {"limit", absl::StrCat(limit)}});
}

absl::Status NoRoom(uint32_t bytes, int64_t limit) {
  return MakeError(absl::StatusCode::kResourceExhausted, "REQUESTS_EXHAUSTED",
                   absl::StrCat("no room for a request of ", bytes,
                                " bytes beside those of other clients; try again later"),
                   {{"bytes", absl::StrCat(bytes)}, {"limit", absl::StrCat(limit)}, {"retry_ms", "2000"}});
}

absl::Status NoRequest(absl::Duration limit) {
  return MakeError(
      absl::StatusCode::kDeadlineExceeded, "NO_REQUEST",
      absl::StrCat("the call was opened, and no request came for ", absl::FormatDuration(limit)));
}

absl::Status Stalled() {
  return MakeError(absl::StatusCode::kDeadlineExceeded, "REQUEST_STALLED",
                   "a part of the request came, and the rest did not come in time");
}

}  // namespace

bool Allowance::Take(absl::Time now) {
  if (filled_ != absl::InfinitePast()) Add(per_second_ * absl::ToDoubleSeconds(now - filled_));
  filled_ = now;
  if (left_ < 1) return false;
  left_ -= 1;
  return true;
}

Http2Guard::Http2Guard(const Http2Limits& limits, RequestMemory* memory, SharedLimits* shared,
                       std::string owner, absl::Time now)
    : limits_(limits),
      memory_(memory),
      shared_(shared),
      owner_(std::move(owner)),
      born_(now),
      control_(128, 256, 32),
      resets_(32, 256, 32),
      updates_(2000, 4000, 2000),
      calls_(500, 2000, 2000) {}

Http2Guard::~Http2Guard() {
  shared_->open_streams -= open_streams();
  if (preface_passed_) --shared_->connections;
}

Http2Guard::Turn Http2Guard::End(absl::string_view why) {
  over_ = absl::ResourceExhaustedError(why);
  return Turn::kMore;
}

Http2Guard::Frame Http2Guard::ParseFrame(const char* bytes) {
  const auto at = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(bytes[i])); };
  return {.length = at(0) << 16 | at(1) << 8 | at(2),
          .type = static_cast<uint8_t>(at(3)),
          .flags = static_cast<uint8_t>(at(4)),
          .stream = (at(5) << 24 | at(6) << 16 | at(7) << 8 | at(8)) & 0x7fffffffu};
}

// ------------------------------------------------------------------------------------------- the client's
// side

bool Http2Guard::PassClientBytes(std::string& in, std::string& out, absl::Time now) {
  size_t at = 0;
  Turn turn = Turn::kGo;
  while (over_.ok() && turn == Turn::kGo) {
    size_t passed = 0;
    turn = PassPiece(absl::string_view(in).substr(at), &passed, now);
    out.append(in, at, passed);
    at += passed;
    if (between_client_frames() && !to_server_.empty()) {
      out += to_server_;
      to_server_.clear();
    }
  }
  in.erase(0, at);
  const bool half = payload_left_ > 0 || !in.empty();
  if (at > 0 || !half) half_since_ = half ? now : absl::InfiniteFuture();
  if (turn != Turn::kWait) backlog_since_ = absl::InfiniteFuture();
  if (turn == Turn::kWait) half_since_ = absl::InfiniteFuture();
  return turn == Turn::kWait;
}

Http2Guard::Turn Http2Guard::PassPiece(absl::string_view in, size_t* passed, absl::Time now) {
  if (!preface_passed_) return PassPreface(in, passed);
  if (payload_left_ > 0) {
    in = in.substr(0, payload_left_);
    if (in.empty()) return Turn::kMore;
    *passed = frame_.type == kData ? AdmitPayload(in, now) : in.size();
    if (*passed == 0) return Turn::kWait;
    payload_left_ -= static_cast<uint32_t>(*passed);
    if (payload_left_ == 0) FrameDone();
    return Turn::kGo;
  }
  if (in.size() < kHeadBytes) return Turn::kMore;
  const Frame frame = ParseFrame(in.data());
  const Turn turn = Admit(frame, now);
  if (turn != Turn::kGo) return turn;
  *passed = kHeadBytes;
  frame_ = frame;
  payload_left_ = frame.length;
  if (payload_left_ == 0) FrameDone();
  return Turn::kGo;
}

Http2Guard::Turn Http2Guard::PassPreface(absl::string_view in, size_t* passed) {
  const size_t there = std::min(in.size(), kPreface.size());
  if (in.substr(0, there) != kPreface.substr(0, there)) return End("speaks no HTTP/2");
  if (there < kPreface.size()) return Turn::kMore;
  preface_passed_ = true;
  ++shared_->connections;
  *passed = kPreface.size();
  return Turn::kGo;
}

Http2Guard::Turn Http2Guard::Paced(Allowance& allowance, absl::Time now) {
  if (allowance.Take(now)) return Turn::kGo;
  backlog_since_ = std::min(backlog_since_, now);
  return Turn::kWait;
}

Http2Guard::Turn Http2Guard::Admit(const Frame& frame, absl::Time now) {
  if (headers_of_ != 0 && frame.type != kContinuation) return End("broke off a header block");
  if (!settings_passed_ && frame.type != kSettings) return End("did not begin with its settings");
  switch (frame.type) {
    case kHeaders:
      return AdmitHeaders(frame, now);
    case kContinuation:
      return AdmitContinuation(frame);
    case kData:
      return AdmitData(frame, now);
    case kRstStream:
      return AdmitReset(frame, now);
    case kSettings:
      return AdmitSettings(frame, now);
    case kPushPromise:
      return End("sent a promise");
    case kWindowUpdate:
      return Paced(updates_, now);
    default:  // PING, PRIORITY, and what there may be
      if (frame.length > kCrumb) return End("sent a large frame of no use");
      return Paced(control_, now);
  }
}

Http2Guard::Turn Http2Guard::AdmitSettings(const Frame& frame, absl::Time now) {
  if (frame.length > kCrumb) return End("sent too many settings");
  const bool free = (frame.flags & kAck) != 0 ? !settings_agreed_ : !settings_passed_;
  if (!free) {
    if (const Turn turn = Paced(control_, now); turn != Turn::kGo) return turn;
  }
  settings_passed_ = true;
  if (frame.flags & kAck) settings_agreed_ = true;
  return Turn::kGo;
}

Http2Guard::Turn Http2Guard::AdmitHeaders(const Frame& frame, absl::Time now) {
  if (frame.length > kMaxHeaderBlock) return End("sent too many headers");
  const bool is_new = frame.stream > last_stream_;
  if (is_new && open_streams() >= limits_.max_streams && settings_agreed_) {
    return End("has more calls at a time than it was told");
  }
  if (const Turn turn = Paced(is_new ? calls_ : control_, now); turn != Turn::kGo) return turn;
  headers_of_ = frame.stream;
  headers_bytes_ = frame.length;
  continuations_ = 0;
  refused_ = absl::OkStatus();
  if (!is_new) {
    const auto it = streams_.find(frame.stream);
    if (it != streams_.end() && (frame.flags & kEndStream)) it->second.half_closed = true;
    return Turn::kGo;
  }
  if (open_streams() >= limits_.max_streams) {
    refused_ = TooManyCalls("this connection", limits_.max_streams);
  } else if (shared_->open_streams >= limits_.max_streams_of_all && open_streams() >= FairShare()) {
    refused_ = TooManyCalls("the server", limits_.max_streams_of_all);
  }
  last_stream_ = frame.stream;
  Stream& stream = streams_[frame.stream];
  ++shared_->open_streams;
  stream.opened = stream.moved = now;
  stream.half_closed = (frame.flags & kEndStream) != 0;
  return Turn::kGo;
}

int64_t Http2Guard::FairShare() const {
  return std::max(kStreamsForSure, limits_.max_streams_of_all / std::max<int64_t>(1, shared_->connections));
}

Http2Guard::Turn Http2Guard::AdmitContinuation(const Frame& frame) {
  headers_bytes_ += frame.length;
  if (headers_of_ == 0 || frame.stream != headers_of_ || ++continuations_ > kMaxContinuations ||
      headers_bytes_ > kMaxHeaderBlock) {
    return End("sent too many headers");
  }
  return Turn::kGo;
}

Http2Guard::Turn Http2Guard::AdmitReset(const Frame& frame, absl::Time now) {
  if (!streams_.contains(frame.stream)) return Paced(control_, now);
  // The server's allowance last: what is taken of it is used.
  if (const Turn turn = Paced(resets_, now); turn != Turn::kGo) return turn;
  if (const Turn turn = Paced(shared_->resets, now); turn != Turn::kGo) {
    resets_.GiveBack();
    return turn;
  }
  Close(frame.stream);
  return Turn::kGo;
}

Http2Guard::Turn Http2Guard::AdmitData(const Frame& frame, absl::Time now) {
  if (frame.flags & kPadded) return End("pads its data");  // gRPC takes none
  if (frame.length >= kCrumb) return Turn::kGo;
  const auto it = streams_.find(frame.stream);
  if (it == streams_.end()) return Paced(control_, now);
  const Stream& stream = it->second;
  const bool half_closes = (frame.flags & kEndStream) != 0 && !stream.half_closed;
  if (frame.length == 0) return half_closes ? Turn::kGo : Paced(control_, now);
  const bool begins = stream.left == 0 && stream.prefix_bytes == 0;
  return Paced(begins || stream.left == frame.length ? calls_ : control_, now);
}

void Http2Guard::FrameDone() {
  switch (frame_.type) {
    case kHeaders:
    case kContinuation:
      if (frame_.flags & kEndHeaders) {
        const uint32_t id = headers_of_;
        headers_of_ = 0;
        if (!refused_.ok()) Refuse(id, refused_);
        refused_ = absl::OkStatus();
      }
      break;
    case kData:
      if (auto it = streams_.find(frame_.stream); it != streams_.end() && (frame_.flags & kEndStream)) {
        it->second.half_closed = true;
      }
      control_.Add(frame_.length / kSentBytesPerFrame);
      break;
    default:
      break;
  }
}

size_t Http2Guard::AdmitPayload(absl::string_view bytes, absl::Time now) {
  const auto it = streams_.find(frame_.stream);
  if (it == streams_.end()) return bytes.size();  // gRPC knows that the call is over, and skips them
  Stream& stream = it->second;
  if (stream.waits_since != absl::InfiniteFuture() && !FindRoom(stream, now)) return 0;
  stream.moved = now;
  size_t at = 0;
  while (at < bytes.size()) {
    if (stream.left > 0) {
      const auto piece = static_cast<uint32_t>(std::min<size_t>(stream.left, bytes.size() - at));
      stream.left -= piece;
      at += piece;
      stream.any_message |= stream.left == 0;
      continue;
    }
    // A byte that says whether it is compressed, then the length.
    stream.prefix[stream.prefix_bytes++] = static_cast<unsigned char>(bytes[at++]);
    if (stream.prefix_bytes < sizeof(stream.prefix)) {
      if (stream.prefix_bytes == 1) stream.must_be_whole = now + limits_.request_timeout * kPatience;
      continue;
    }
    stream.prefix_bytes = 0;
    StartMessage(it->first, stream, now);
    if (!streams_.contains(frame_.stream)) return bytes.size();
    if (stream.waits_since != absl::InfiniteFuture()) return at;
  }
  return at;
}

void Http2Guard::StartMessage(uint32_t id, Stream& stream, absl::Time now) {
  const unsigned char* p = stream.prefix;
  const uint32_t size = static_cast<uint32_t>(p[1]) << 24 | static_cast<uint32_t>(p[2]) << 16 |
                        static_cast<uint32_t>(p[3]) << 8 | static_cast<uint32_t>(p[4]);
  stream.charge.Release();  // gRPC has asked for the next, so the last one is delivered
  if (size > limits_.max_message_bytes) return Refuse(id, TooLarge(size, limits_.max_message_bytes));
  const bool may_wait = stream.any_message && size <= kChunkMessage;
  stream.must_be_whole = now + (may_wait ? kChunkTime : limits_.request_timeout * kPatience) +
                         absl::Seconds(size / kMinBytesPerSecond);
  stream.size = stream.left = size;
  stream.any_message |= size == 0;
  if (size > kSmallMessage && !FindRoom(stream, now)) stream.waits_since = now;
}

bool Http2Guard::FindRoom(Stream& stream, absl::Time now) {
  auto charge = memory_->Take(stream.size, owner_, "a request");
  if (!charge) return false;
  stream.charge = *std::move(charge);
  if (stream.waits_since != absl::InfiniteFuture()) stream.must_be_whole += now - stream.waits_since;
  stream.waits_since = absl::InfiniteFuture();
  return true;
}

// ------------------------------------------------------------------------------------------- the server's
// side

void Http2Guard::PassServerBytes(absl::string_view in, std::string& out) {
  control_.Add(static_cast<double>(in.size()) / kReadBytesPerFrame);
  updates_.Add(static_cast<double>(in.size()) / kReadBytesPerUpdate);
  while (!in.empty()) {
    if (between_server_frames() && !to_client_.empty()) {
      out += to_client_;
      to_client_.clear();
    }
    size_t piece = 0;
    if (server_left_ > 0) {
      piece = std::min<size_t>(server_left_, in.size());
      server_left_ -= static_cast<uint32_t>(piece);
    } else {
      piece = std::min(kHeadBytes - server_head_.size(), in.size());
      absl::StrAppend(&server_head_, in.substr(0, piece));
      if (server_head_.size() == kHeadBytes) {
        const Frame frame = ParseFrame(server_head_.data());
        server_head_.clear();
        server_left_ = frame.length;
        OnServerFrame(frame);
      }
    }
    absl::StrAppend(&out, in.substr(0, piece));
    in.remove_prefix(piece);
    server_spoke_ = true;
  }
}

void Http2Guard::OnServerFrame(const Frame& frame) {
  const bool headers = frame.type == kHeaders || frame.type == kContinuation;
  server_in_headers_ = headers && (frame.flags & kEndHeaders) == 0;
  if (frame.type == kRstStream) return Close(frame.stream);
  if (frame.type != kHeaders && frame.type != kData) return;
  control_.Add(1);  // some clients send a PING for what they read, to learn how fast the connection is
  if (frame.flags & kEndStream) return Close(frame.stream);
  auto it = streams_.find(frame.stream);
  if (it == streams_.end()) return;
  it->second.answered = true;
  if (it->second.left == 0) it->second.charge.Release();  // it was taken from gRPC
}

void Http2Guard::Close(uint32_t id) { shared_->open_streams -= static_cast<int64_t>(streams_.erase(id)); }

void Http2Guard::Refuse(uint32_t id, const absl::Status& status) {
  const auto it = streams_.find(id);
  if (it == streams_.end()) return;
  AppendFrame(to_server_, kRstStream, 0, id, BigEndian(kCancel));
  AppendFrame(to_client_, kHeaders, kEndHeaders | kEndStream, id, EndOfCall(status, !it->second.answered));
  if (!it->second.half_closed) AppendFrame(to_client_, kRstStream, 0, id, BigEndian(kNoError));
  Close(id);
}

void Http2Guard::TakeRefusals(std::string& to_server, std::string& to_client) {
  if (between_client_frames()) {
    to_server += to_server_;
    to_server_.clear();
  }
  if (between_server_frames()) {
    to_client += to_client_;
    to_client_.clear();
  }
}

std::string Http2Guard::Goodbye() const {
  std::string out;
  if (!between_server_frames()) return out;
  AppendFrame(out, kGoaway, 0, 0,
              absl::StrCat(BigEndian(last_stream_), BigEndian(kEnhanceYourCalm), over_.message()));
  return out;
}

// ------------------------------------------------------------------------------------------------------
// clocks

absl::Status Http2Guard::StandsStill(const Stream& stream, absl::Time now) const {
  const absl::Duration limit = limits_.request_timeout;
  if (stream.waits_since != absl::InfiniteFuture()) {
    return now - stream.waits_since > limit ? NoRoom(stream.size, memory_->limit()) : absl::OkStatus();
  }
  if (stream.left > 0 || stream.prefix_bytes > 0) {
    const bool may_wait = stream.any_message && stream.size <= kChunkMessage;
    const bool still = !may_wait && now - stream.moved > limit * kPatience;
    return still || now > stream.must_be_whole ? Stalled() : absl::OkStatus();
  }
  const bool silent = !stream.any_message && !stream.half_closed && !stream.answered;
  return silent && now - stream.opened > limit ? NoRequest(limit) : absl::OkStatus();
}

void Http2Guard::Tick(absl::Time now) {
  const absl::Duration limit = limits_.request_timeout;
  if (!over_.ok()) return;
  if (!settings_passed_ && now - born_ > limit) {
    End("said nothing");
    return;
  }
  if (now - backlog_since_ > limit) {
    End("sends more than it may of what only costs");
    return;
  }
  if (now - half_since_ > limit * kPatience) {
    End("stands still in a frame");
    return;
  }
  std::vector<std::pair<uint32_t, absl::Status>> refused;
  for (const auto& [id, stream] : streams_) {
    if (id == headers_of_) continue;
    if (absl::Status status = StandsStill(stream, now); !status.ok()) refused.emplace_back(id, status);
  }
  for (const auto& [id, status] : refused) Refuse(id, status);
}

}  // namespace latentd
