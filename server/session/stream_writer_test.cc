// A stream without gRPC: the test is the reactor, and says when a message was taken.
#include "server/session/stream_writer.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

struct FakeMessage {
  std::string text;
  size_t bytes = 100;
  size_t ByteSizeLong() const { return bytes; }
};

struct FakeReactor {
  void StartWrite(const FakeMessage* message) { writes.push_back(message); }
  void Finish(grpc::Status status) { finished.push_back(status.error_code()); }
  std::vector<const FakeMessage*> writes;
  std::vector<grpc::StatusCode> finished;
};

class StreamWriterTest : public testing::Test {
 protected:
  using Writer = StreamWriter<FakeReactor, FakeMessage>;

  void Send(const std::string& text, size_t bytes = 100, const std::string& replaces = "") {
    Writer::Options options;
    options.replaces = replaces;
    options.memory = *ram.Reserve({.bytes = static_cast<int64_t>(bytes), .what = text});
    writer.Send({text, bytes}, std::move(options));
  }
  // The text of the message that is on its way, which the reader then takes.
  std::string Take() {
    const std::string text = reactor.writes.back()->text;
    const size_t before = reactor.writes.size();
    writer.OnWriteDone(true);
    EXPECT_LE(reactor.writes.size(), before + 1);
    return text;
  }
  int64_t promised() const { return ram.stats().reserved_bytes; }

  RamBudget ram{1 << 20};
  FakeReactor reactor;
  absl::Time now = absl::UnixEpoch();
  int broken_off = 0;
  Writer writer{&reactor, [this] { ++broken_off; }, [this] { return now; }};
};

TEST_F(StreamWriterTest, APromiseEndsWhenItsMessageWasTaken) {
  Send("a", 100);
  Send("b", 200);
  EXPECT_EQ(reactor.writes.size(), 1u);  // one at a time
  EXPECT_EQ(promised(), 300);
  EXPECT_EQ(writer.unread_bytes(), 300 + 2 * Writer::kMessageOverhead);
  EXPECT_EQ(Take(), "a");
  EXPECT_EQ(promised(), 200);
  EXPECT_EQ(Take(), "b");
  EXPECT_EQ(promised(), 0);
  EXPECT_EQ(writer.unread_bytes(), 0);
  writer.Finish(grpc::Status::OK);
  EXPECT_THAT(reactor.finished, ElementsAre(grpc::StatusCode::OK));
}

// Whatever lies between them, as steps do: of two previews of a picture the newer one stays.
TEST_F(StreamWriterTest, OfAPicturesPreviewsTheNewestWaits) {
  Send("step 1");
  Send("preview 1 of picture 0", 100, "0/job");
  Send("preview 1 of picture 1", 100, "1/job");
  Send("step 2");
  Send("preview 2 of picture 0", 100, "0/job");
  EXPECT_EQ(promised(), 400);
  EXPECT_EQ(Take(), "step 1");
  EXPECT_EQ(Take(), "preview 1 of picture 1");
  EXPECT_EQ(Take(), "step 2");
  Send("preview 3 of picture 0", 100, "0/job");  // the one before is on its way
  EXPECT_EQ(Take(), "preview 2 of picture 0");
  EXPECT_EQ(Take(), "preview 3 of picture 0");
  EXPECT_EQ(promised(), 0);
}

TEST_F(StreamWriterTest, WhoWaitsIsCalledOnceWhenSoMuchWasRead) {
  std::vector<std::string> called;
  writer.WhenRead(0, [&] { called.push_back("at once"); });
  EXPECT_THAT(called, ElementsAre("at once"));
  for (int i = 0; i < 3; ++i) Send("x", 100);
  const int64_t one = 100 + Writer::kMessageOverhead;
  writer.WhenRead(2 * one - 1, [&] { called.push_back("one left"); });
  writer.WhenRead(2 * one, [&] { called.push_back("two left"); });
  Take();
  EXPECT_THAT(called, ElementsAre("at once", "two left"));
  Take();
  EXPECT_THAT(called, ElementsAre("at once", "two left", "one left"));
  Take();
  EXPECT_EQ(called.size(), 3u);
}

TEST_F(StreamWriterTest, ACancelledCallKeepsNothingAndCallsWhoWaits) {
  for (int i = 0; i < 3; ++i) Send("x", 100);
  int called = 0;
  writer.WhenRead(1000, [&] { ++called; });
  writer.OnCancel();
  EXPECT_EQ(called, 1);
  EXPECT_EQ(promised(), 100);  // on its way
  Send("late");
  writer.OnWriteDone(false);
  EXPECT_EQ(promised(), 0);
  EXPECT_THAT(reactor.finished, ElementsAre(grpc::StatusCode::CANCELLED));
  EXPECT_FALSE(writer.done());
  writer.OnDone();
  EXPECT_TRUE(writer.done());
  writer.BreakOff();  // there is nothing to break off any more
  EXPECT_EQ(broken_off, 0);
}

TEST_F(StreamWriterTest, WhoTakesNothingIsTooSlow) {
  const ReadFloor floor{absl::Seconds(10), 0};
  EXPECT_FALSE(writer.too_slow(floor));
  now += absl::Seconds(100);
  EXPECT_FALSE(writer.too_slow(floor)) << "nothing waits";
  Send("x");
  now += absl::Seconds(10);
  EXPECT_FALSE(writer.too_slow(floor));
  now += absl::Seconds(1);
  EXPECT_TRUE(writer.too_slow(floor));
}

// One small message each 9 seconds is something, and not enough.
TEST_F(StreamWriterTest, WhoTakesLessThanTheFloorIsTooSlow) {
  const ReadFloor floor{absl::Seconds(10), 1000};
  for (int i = 0; i < 100; ++i) Send("x", 100);
  bool slow = false;
  for (int i = 0; i < 3; ++i) {
    now += absl::Seconds(9);
    Take();
    slow = slow || writer.too_slow(floor);
  }
  EXPECT_TRUE(slow);
}

TEST_F(StreamWriterTest, WhoTakesWhatTheFloorAsksForIsNot) {
  const ReadFloor floor{absl::Seconds(10), 1000};
  for (int i = 0; i < 200; ++i) Send("x", 1000);
  for (int i = 0; i < 150; ++i) {
    now += absl::Seconds(1);
    Take();
    EXPECT_FALSE(writer.too_slow(floor)) << i;
  }
  // And neither is who was given little: then nothing waited for it.
  while (promised() > 0) Take();
  for (int i = 0; i < 10; ++i) {
    Send("x", 10);
    Take();
    now += absl::Seconds(9);
    EXPECT_FALSE(writer.too_slow(floor));
  }
}

TEST_F(StreamWriterTest, WhatIsUnsentCanBeDroppedForAReason) {
  for (int i = 0; i < 3; ++i) Send("x", 100);
  writer.DropUnsent();
  EXPECT_EQ(promised(), 100);
  writer.Finish(grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "too slow"));
  EXPECT_THAT(reactor.finished, IsEmpty());
  writer.BreakOff();
  EXPECT_EQ(broken_off, 1);
  Take();
  EXPECT_THAT(reactor.finished, ElementsAre(grpc::StatusCode::DEADLINE_EXCEEDED));
}

}  // namespace
}  // namespace latentd
