#include "server/rpc/http2_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace latentd {
namespace {

using ::testing::HasSubstr;

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
// Types and flags of RFC 9113, section 6.
constexpr uint8_t kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kPing = 6, kGoaway = 7, kUpdate = 8,
                  kMore = 9;
constexpr uint8_t kEndStream = 1, kAck = 1, kEndHeaders = 4, kPadded = 8;
constexpr int64_t kMiB = 1 << 20;

std::string FrameOf(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload = "") {
  std::string out;
  for (int shift : {16, 8, 0}) out += static_cast<char>(payload.size() >> shift);
  out += static_cast<char>(type);
  out += static_cast<char>(flags);
  for (int shift : {24, 16, 8, 0}) out += static_cast<char>(stream >> shift);
  return out + payload;
}

// gRPC's prefix of a message of that size.
std::string Prefix(uint32_t size) {
  std::string out(1, '\0');
  for (int shift : {24, 16, 8, 0}) out += static_cast<char>(size >> shift);
  return out;
}

std::string Call(uint32_t stream) {
  return FrameOf(kHeaders, kEndHeaders, stream, "headers") +
         FrameOf(kData, kEndStream, stream, Prefix(3) + "abc");
}

std::string AnswerTo(uint32_t stream) {
  return FrameOf(kHeaders, kEndHeaders, stream, "h") +
         FrameOf(kHeaders, kEndHeaders | kEndStream, stream, "t");
}

class Http2GuardTest : public ::testing::Test {
 protected:
  Http2GuardTest() { Reset(); }

  // A connection that has said hello.
  void Reset(bool greeted = true) {
    guard_.reset();
    in_.clear();
    guard_ = std::make_unique<Http2Guard>(limits_, &memory_, &shared_, "client", now_);
    Server(FrameOf(kSettings, 0, 0));
    if (greeted) Client(kPreface + FrameOf(kSettings, 0, 0) + FrameOf(kSettings, kAck, 0));
    server_.clear();
    client_.clear();
  }

  // Bytes of the client; true when it has to wait.
  bool Client(const std::string& bytes) {
    in_ += bytes;
    const bool waits = guard_->PassClientBytes(in_, server_, now_);
    guard_->TakeRefusals(server_, client_);
    return waits;
  }
  void Server(const std::string& bytes) {
    guard_->PassServerBytes(bytes, client_);
    guard_->TakeRefusals(server_, client_);
  }
  void Pass(absl::Duration time) {
    now_ += time;
    guard_->Tick(now_);
    guard_->TakeRefusals(server_, client_);
  }
  std::string Over() const { return std::string(guard_->over().message()); }

  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  Http2Limits limits_{.max_streams = 4, .max_streams_of_all = 100, .max_message_bytes = 8 * kMiB};
  RequestMemory memory_{10 * kMiB, nullptr};
  SharedLimits shared_;
  std::unique_ptr<Http2Guard> guard_;
  std::string in_;      // of the client, not passed yet
  std::string server_;  // what reached the server
  std::string client_;  // what reached the client
};

TEST_F(Http2GuardTest, WhatPassesIsNotChangedHoweverItIsCut) {
  std::string sent = FrameOf(kHeaders, 0, 1, "head") + FrameOf(kMore, kEndHeaders, 1, "more") +
                     FrameOf(kData, 0, 1, Prefix(600) + std::string(300, 'a')) +
                     FrameOf(kData, kEndStream, 1, std::string(300, 'b')) + FrameOf(kPing, 0, 0, "12345678");
  for (char byte : sent) EXPECT_FALSE(Client(std::string(1, byte)));
  EXPECT_EQ(server_, sent);
  const std::string answer = AnswerTo(1);
  for (char byte : answer) Server(std::string(1, byte));
  EXPECT_EQ(client_, answer);
  EXPECT_TRUE(guard_->over().ok()) << Over();
  EXPECT_EQ(guard_->open_streams(), 0);
}

TEST_F(Http2GuardTest, WhoSpeaksNoHttp2IsSentAway) {
  Reset(false);
  Client("GET / HTTP/1.1\r\n");
  EXPECT_THAT(Over(), HasSubstr("no HTTP/2"));
  EXPECT_EQ(server_, "");
}

TEST_F(Http2GuardTest, AConnectionThatSaysNothingEnds) {
  Reset(false);
  Client(kPreface);
  Pass(limits_.request_timeout);
  EXPECT_TRUE(guard_->over().ok());
  Pass(absl::Seconds(1));
  EXPECT_THAT(Over(), HasSubstr("said nothing"));
}

TEST_F(Http2GuardTest, AnIdleConnectionStays) {
  Pass(absl::Hours(1));
  EXPECT_TRUE(guard_->over().ok()) << Over();
}

TEST_F(Http2GuardTest, PingsArePacedAndAFloodEndsTheConnection) {
  std::string flood;
  for (int i = 0; i < 10'000; ++i) flood += FrameOf(kPing, 0, 0, "12345678");
  EXPECT_TRUE(Client(flood));
  const size_t at_once = server_.size() / 17;
  EXPECT_LE(at_once, 256u);
  now_ += absl::Seconds(1);
  EXPECT_TRUE(Client(""));
  EXPECT_LE(server_.size() / 17 - at_once, 33u);
  for (int i = 0; i < 10 && guard_->over().ok(); ++i) {
    Client("");
    Pass(absl::Seconds(1));
  }
  EXPECT_THAT(Over(), HasSubstr("only costs"));
  EXPECT_THAT(guard_->Goodbye(), HasSubstr(std::string("\0\0\0\x0b", 4)));  // ENHANCE_YOUR_CALM
}

TEST_F(Http2GuardTest, WhoReadsMuchMaySendPingsInProportion) {
  for (int i = 0; i < 10'000; ++i) {
    Server(FrameOf(kData, 0, 1, std::string(16'000, 'x')));
    ASSERT_FALSE(Client(FrameOf(kPing, 0, 0, "12345678") + FrameOf(kUpdate, 0, 0, "1234") +
                        FrameOf(kUpdate, 0, 1, "1234")));
    client_.clear();
  }
}

TEST_F(Http2GuardTest, ResetsOfNewCallsArePaced) {
  std::string flood;
  for (uint32_t i = 0; i < 10'000; ++i) {
    flood += FrameOf(kHeaders, kEndHeaders, 2 * i + 1, "h") + FrameOf(kReset, 0, 2 * i + 1, "1234");
  }
  EXPECT_TRUE(Client(flood));
  EXPECT_LE(server_.size(), 100u * (10 + 13));
  EXPECT_LE(guard_->open_streams(), 1);
}

TEST_F(Http2GuardTest, ResetsOfAllConnectionsTogetherArePaced) {
  while (shared_.resets.Take(now_)) {
  }
  EXPECT_TRUE(Client(Call(1) + FrameOf(kReset, 0, 1, "1234")));
  now_ += absl::Seconds(1);
  EXPECT_FALSE(Client(""));
}

TEST_F(Http2GuardTest, AHeaderBlockHasAnEnd) {
  Client(FrameOf(kHeaders, 0, 1, "h"));
  for (int i = 0; i < 9; ++i) Client(FrameOf(kMore, 0, 1, "m"));
  EXPECT_THAT(Over(), HasSubstr("too many headers"));
  Reset();
  Client(FrameOf(kHeaders, 0, 1, std::string(16'000, 'h')));
  for (int i = 0; i < 4; ++i) Client(FrameOf(kMore, 0, 1, std::string(16'000, 'h')));
  EXPECT_THAT(Over(), HasSubstr("too many headers"));
  Reset();
  Client(FrameOf(kHeaders, 0, 1, "h") + FrameOf(kPing, 0, 0, "12345678"));
  EXPECT_THAT(Over(), HasSubstr("header block"));
}

TEST_F(Http2GuardTest, PaddedDataAndPromisesEndTheConnection) {
  Client(FrameOf(kHeaders, kEndHeaders, 1, "h") + FrameOf(kData, kPadded, 1, "\x01xx"));
  EXPECT_FALSE(guard_->over().ok());
  Reset();
  Client(FrameOf(5, 0, 1, "promise"));
  EXPECT_FALSE(guard_->over().ok());
}

TEST_F(Http2GuardTest, CallsAtATimeAreLimitedOnceTheClientKnows) {
  for (uint32_t i = 0; i < 4; ++i) Client(Call(2 * i + 1));
  EXPECT_EQ(guard_->open_streams(), 4);
  Server(AnswerTo(1));
  Client(Call(9));
  EXPECT_TRUE(guard_->over().ok()) << Over();
  Client(Call(11));
  EXPECT_THAT(Over(), HasSubstr("more calls at a time"));
}

TEST_F(Http2GuardTest, CallsBeyondTheLimitAreRefusedWhileTheClientCannotKnow) {
  Reset(false);
  Client(kPreface + FrameOf(kSettings, 0, 0));
  for (uint32_t i = 0; i < 4; ++i) Client(Call(2 * i + 1));
  client_.clear();
  server_.clear();
  Client(Call(9));
  EXPECT_TRUE(guard_->over().ok()) << Over();
  // gRPC learns of the call and of its end, in this order: its table of headers must see the block.
  const std::string reset = FrameOf(kReset, 0, 9, std::string("\0\0\0\x08", 4));
  EXPECT_EQ(server_, FrameOf(kHeaders, kEndHeaders, 9, "headers") + reset +
                         FrameOf(kData, kEndStream, 9, Prefix(3) + "abc"));
  EXPECT_THAT(client_, HasSubstr("grpc-status\x01"
                                 "8"));
  EXPECT_EQ(guard_->open_streams(), 4);
}

TEST_F(Http2GuardTest, CallsOfAllConnectionsAreLimitedButEachHasSome) {
  limits_.max_streams = 1000;
  shared_.open_streams = 100;
  shared_.connections = 9;
  Reset();
  for (uint32_t i = 0; i < 40; ++i) Client(Call(2 * i + 1));
  EXPECT_EQ(guard_->open_streams(), Http2Guard::kStreamsForSure);
  EXPECT_EQ(shared_.open_streams, 100 + Http2Guard::kStreamsForSure);
  EXPECT_TRUE(guard_->over().ok()) << Over();
  guard_.reset();
  EXPECT_EQ(shared_.open_streams, 100);
  EXPECT_EQ(shared_.connections, 8) << "without this one";
  shared_.connections = 3;
  Reset();
  for (uint32_t i = 0; i < 40; ++i) Client(Call(2 * i + 1));
  EXPECT_EQ(guard_->open_streams(), 100 / 4) << "its share is more where there are few";
}

TEST_F(Http2GuardTest, ACallWithoutARequestHearsOfItsEnd) {
  Client(FrameOf(kHeaders, kEndHeaders, 1, "h"));
  Client(Call(3));
  Pass(limits_.request_timeout);
  EXPECT_EQ(guard_->open_streams(), 2);
  Pass(absl::Seconds(1));
  EXPECT_EQ(guard_->open_streams(), 1) << "the one with a request stays";
  EXPECT_THAT(client_, HasSubstr("grpc-status\x01"
                                 "4"));
  EXPECT_THAT(client_, HasSubstr("grpc-status-details-bin"));
  EXPECT_TRUE(absl::EndsWith(server_, FrameOf(kReset, 0, 1, std::string("\0\0\0\x08", 4))));
}

TEST_F(Http2GuardTest, ACallThatWasAnsweredMayBeSilent) {
  Client(FrameOf(kHeaders, kEndHeaders, 1, "h"));
  Server(FrameOf(kHeaders, kEndHeaders, 1, "h"));
  Client(FrameOf(kHeaders, kEndHeaders, 3, "h") + FrameOf(kData, 0, 3, Prefix(1) + "a"));
  Pass(absl::Hours(1));
  EXPECT_EQ(guard_->open_streams(), 2);
}

TEST_F(Http2GuardTest, RefusalsWaitForTheEndOfTheServersFrame) {
  Client(FrameOf(kHeaders, kEndHeaders, 1, "h"));
  const std::string frame = FrameOf(kData, 0, 3, "abcdef");
  Server(frame.substr(0, 12));
  Pass(limits_.request_timeout + absl::Seconds(1));
  EXPECT_EQ(client_, frame.substr(0, 12));
  Server(frame.substr(12));
  EXPECT_TRUE(absl::StartsWith(client_, frame));
  EXPECT_GT(client_.size(), frame.size());
}

TEST_F(Http2GuardTest, AMessageThatIsTooLargeIsRefusedAtItsFirstBytes) {
  Client(FrameOf(kHeaders, kEndHeaders, 1, "h") + FrameOf(kData, 0, 1, Prefix(9 * kMiB)));
  EXPECT_THAT(client_, HasSubstr("grpc-status\x01"
                                 "8"));
  EXPECT_THAT(client_, HasSubstr("max_message_bytes"));
  EXPECT_EQ(memory_.bytes(), 0);
  EXPECT_EQ(guard_->open_streams(), 0);
}

TEST_F(Http2GuardTest, AMessageKeepsItsRoomUntilItIsAnswered) {
  Client(FrameOf(kHeaders, kEndHeaders, 1, "h") + FrameOf(kData, 0, 1, Prefix(6 * kMiB)));
  EXPECT_EQ(memory_.bytes(), 6 * kMiB);
  for (int i = 0; i < 6; ++i) Client(FrameOf(kData, 0, 1, std::string(kMiB, 'a')));
  EXPECT_EQ(memory_.bytes(), 6 * kMiB);
  Server(FrameOf(kHeaders, kEndHeaders, 1, "h"));
  EXPECT_EQ(memory_.bytes(), 0);
}

TEST_F(Http2GuardTest, AMessageWaitsForRoomAndGoesOnWhenThereIsSome) {
  auto other = memory_.Take(6 * kMiB, "", "");
  ASSERT_TRUE(other);
  const std::string body(kMiB, 'a');
  EXPECT_TRUE(Client(FrameOf(kHeaders, kEndHeaders, 1, "h") + FrameOf(kData, 0, 1, Prefix(5 * kMiB) + body)));
  EXPECT_LT(server_.size(), 100u);
  other->Release();
  EXPECT_FALSE(Client(""));
  EXPECT_GT(server_.size(), body.size());
  EXPECT_EQ(memory_.bytes(), 5 * kMiB);
}

TEST_F(Http2GuardTest, AMessageThatFindsNoRoomIsRefused) {
  auto other = memory_.Take(6 * kMiB, "", "");
  EXPECT_TRUE(
      Client(FrameOf(kHeaders, kEndHeaders, 1, "h") + FrameOf(kData, 0, 1, Prefix(5 * kMiB) + "abc")));
  Pass(limits_.request_timeout + absl::Seconds(1));
  EXPECT_THAT(client_, HasSubstr("beside those of other clients"));
  EXPECT_FALSE(Client(FrameOf(kPing, 0, 0, "12345678"))) << "the connection goes on";
  EXPECT_TRUE(guard_->over().ok()) << Over();
}

TEST_F(Http2GuardTest, AMessageThatStandsStillIsRefused) {
  Client(FrameOf(kHeaders, kEndHeaders, 1, "h") + FrameOf(kData, 0, 1, Prefix(5 * kMiB) + "abc"));
  EXPECT_EQ(memory_.bytes(), 5 * kMiB);
  Pass(3 * limits_.request_timeout + absl::Seconds(1));
  EXPECT_EQ(memory_.bytes(), 0);
  EXPECT_THAT(client_, HasSubstr("did not come in time"));
}

TEST_F(Http2GuardTest, ALaterChunkMayWaitForTheServerToAskForIt) {
  Client(FrameOf(kHeaders, kEndHeaders, 1, "h") + FrameOf(kData, 0, 1, Prefix(3) + "abc"));
  Client(FrameOf(kData, 0, 1, Prefix(kMiB) + std::string(60'000, 'a')));
  Pass(absl::Minutes(5));
  EXPECT_EQ(guard_->open_streams(), 1);
  Pass(absl::Minutes(6));
  EXPECT_EQ(guard_->open_streams(), 0);
}

TEST_F(Http2GuardTest, AFrameThatStandsStillEndsTheConnection) {
  Client(FrameOf(kHeaders, kEndHeaders, 1, "headers").substr(0, 11));
  Pass(3 * limits_.request_timeout);
  EXPECT_TRUE(guard_->over().ok());
  Pass(absl::Seconds(1));
  EXPECT_THAT(Over(), HasSubstr("stands still"));
}

TEST_F(Http2GuardTest, CrumbsOfDataArePaced) {
  Client(FrameOf(kHeaders, kEndHeaders, 1, "h") + FrameOf(kData, 0, 1, Prefix(kMiB)));
  std::string crumbs;
  for (int i = 0; i < 1000; ++i) crumbs += FrameOf(kData, 0, 1, "x");
  EXPECT_TRUE(Client(crumbs));
  Reset();
  std::string empty;
  for (int i = 0; i < 1000; ++i) empty += FrameOf(kData, kEndStream, 1);
  EXPECT_TRUE(Client(empty));
}

}  // namespace
}  // namespace latentd
