#include "cache/cuda/staged_copies.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "cache/base/error.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

constexpr int64_t kBufferBytes = 256;

// A device with a compute and a copy queue, as reluctant as a real one may be: nothing runs before somebody
// waits for it, except that copies run at once where nothing holds them (kEager). What would go wrong on some
// day with a real device goes wrong always here.
class FakeDevice {
 public:
  enum Mode { kLazy, kEager };
  explicit FakeDevice(Mode mode, int buffers = 3) : mode_(mode) {
    for (int i = 0; i < buffers; ++i) memory_.emplace_back(static_cast<size_t>(kBufferBytes));
  }

  std::unique_ptr<StagedCopies> NewStream() {
    std::vector<void*> buffers;
    for (std::vector<char>& buffer : memory_) buffers.push_back(buffer.data());
    return std::make_unique<StagedCopies>(std::make_unique<Engine>(this), std::move(buffers), kBufferBytes);
  }

  // Queues a kernel that reads.
  void ComputeReads(const std::string& slot, std::string* out) {
    Queue(kCompute, {[&slot, out] { *out = slot; }, nullptr});
  }
  void Synchronize() {
    MutexLock lock(&mu_);
    RunTo(kCompute, queues_[kCompute].size());
    RunTo(kCopies, queues_[kCopies].size());
  }

  int drains() const { return drains_; }
  int copies() const { return copies_; }
  void FailCopy(int n) { fail_copy_ = n; }
  void FailMarks() { fail_marks_ = true; }

 private:
  enum Which { kCompute, kCopies };
  struct Place {
    Which queue;
    size_t position;
  };
  struct Op {
    std::function<void()> run;
    CopyEngine::Mark after;  // instead of running: a place that has to be passed
  };

  class Engine : public CopyEngine {
   public:
    explicit Engine(FakeDevice* device) : device_(device) {}
    absl::StatusOr<Mark> MarkCompute() override { return device_->MarkOf(kCompute); }
    absl::Status ComputeAfter(const Mark& mark) override {
      device_->Queue(kCompute, {nullptr, mark});
      return absl::OkStatus();
    }
    absl::Status CopyAfter(const Mark& mark) override {
      device_->Queue(kCopies, {nullptr, mark});
      return absl::OkStatus();
    }
    absl::Status Copy(void* to, const void* pinned, int64_t bytes) override {
      if (++device_->copies_ == device_->fail_copy_) {
        return MakeError(absl::StatusCode::kInternal, "COPY_FAILED", "as told");
      }
      device_->Queue(kCopies, {[=] { std::memcpy(to, pinned, static_cast<size_t>(bytes)); }, nullptr});
      return absl::OkStatus();
    }
    absl::StatusOr<Mark> MarkCopies() override { return device_->MarkOf(kCopies); }
    absl::Status Wait(const Mark& mark) override {
      MutexLock lock(&device_->mu_);
      device_->Pass(mark);
      return absl::OkStatus();
    }
    void Drain() override {
      MutexLock lock(&device_->mu_);
      ++device_->drains_;
      device_->RunTo(kCopies, device_->queues_[kCopies].size());
    }

   private:
    FakeDevice* const device_;
  };

  absl::StatusOr<CopyEngine::Mark> MarkOf(Which queue) {
    if (fail_marks_) return MakeError(absl::StatusCode::kUnavailable, "DEVICE_LOST", "as told");
    MutexLock lock(&mu_);
    return std::make_shared<const Place>(Place{queue, queues_[queue].size()});
  }

  void Queue(Which queue, Op op) {
    MutexLock lock(&mu_);
    queues_[queue].push_back(std::move(op));
    while (mode_ == kEager && queue == kCopies && done_[kCopies] < queues_[kCopies].size()) {
      const Op& next = queues_[kCopies][done_[kCopies]];
      const auto* place = static_cast<const Place*>(next.after.get());
      if (place != nullptr && done_[place->queue] < place->position) break;
      RunTo(kCopies, done_[kCopies] + 1);
    }
  }

  void Pass(const CopyEngine::Mark& mark) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto* place = static_cast<const Place*>(mark.get());
    RunTo(place->queue, place->position);
  }

  void RunTo(Which queue, size_t position) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    while (done_[queue] < position) {
      const Op op = queues_[queue][done_[queue]];
      if (op.after != nullptr) {
        Pass(op.after);
      } else {
        op.run();
      }
      ++done_[queue];
    }
  }

  const Mode mode_;
  std::vector<std::vector<char>> memory_;
  std::atomic<int> copies_{0}, fail_copy_{0}, drains_{0};
  std::atomic<bool> fail_marks_{false};
  Mutex mu_;
  std::vector<Op> queues_[2] ABSL_GUARDED_BY(mu_);
  size_t done_[2] ABSL_GUARDED_BY(mu_) = {0, 0};
};

std::string Pattern(size_t bytes, int seed) {
  std::string text(bytes, '\0');
  std::iota(text.begin(), text.end(), static_cast<char>(seed));
  return text;
}

class StagedCopiesTest : public testing::TestWithParam<FakeDevice::Mode> {};
INSTANTIATE_TEST_SUITE_P(Device, StagedCopiesTest, testing::Values(FakeDevice::kLazy, FakeDevice::kEager),
                         [](const auto& i) { return i.param == FakeDevice::kLazy ? "Lazy" : "Eager"; });

TEST_P(StagedCopiesTest, BytesArriveWhateverTheSizeOfThePieces) {
  FakeDevice device(GetParam());
  auto stream = device.NewStream();
  std::vector<std::string> from, to;
  for (size_t bytes : {0u, 1u, 63u, 64u, 65u, 191u, 256u, 257u, 5000u}) {
    from.push_back(Pattern(bytes, static_cast<int>(bytes)));
    to.emplace_back(bytes, 'x');
  }
  std::vector<CopyStream::Piece> pieces;
  for (size_t i = 0; i < from.size(); ++i) {
    pieces.push_back({to[i].data(), from[i].data(), static_cast<int64_t>(from[i].size())});
  }
  EXPECT_EQ(*stream->Begin(pieces), 1u);
  EXPECT_EQ(*stream->Begin({}), 2u);
  EXPECT_TRUE(stream->Await(2).ok());
  EXPECT_TRUE(stream->Await(1).ok());  // awaited with the later one
  std::string seen;
  device.ComputeReads(to.back(), &seen);
  device.Synchronize();
  EXPECT_EQ(seen, from.back());
  EXPECT_EQ(to, from);
}

TEST_P(StagedCopiesTest, ACopyComesAfterWhatWasComputedBeforeItAndBeforeWhatIsComputedAfterIt) {
  FakeDevice device(GetParam());
  auto stream = device.NewStream();
  constexpr size_t kSlotBytes = 1000;  // several times around the ring
  std::string slot(kSlotBytes, 'x');
  std::vector<std::string> seen(20);
  std::vector<std::string> from;
  for (size_t i = 0; i < seen.size(); ++i) from.push_back(Pattern(kSlotBytes, static_cast<int>(7 * i)));
  for (size_t i = 0; i < seen.size(); ++i) {
    const uint64_t copy = *stream->Begin({{slot.data(), from[i].data(), kSlotBytes}});
    ASSERT_TRUE(stream->Await(copy).ok());
    const std::string kept = from[i];
    from[i].assign(kSlotBytes, '!');  // the source may change once the copy is awaited
    device.ComputeReads(slot, &seen[i]);
    from[i] = kept;
  }
  device.Synchronize();
  for (size_t i = 0; i < seen.size(); ++i)
    EXPECT_EQ(seen[i], Pattern(kSlotBytes, static_cast<int>(7 * i))) << i;
}

// As weights are streamed: two slots, the next block under way while one is computed with.
TEST_P(StagedCopiesTest, TwoSlotsTakeTurns) {
  FakeDevice device(GetParam());
  auto stream = device.NewStream();
  constexpr size_t kBlocks = 30;
  std::vector<std::string> blocks;
  for (size_t i = 0; i < kBlocks; ++i) blocks.push_back(Pattern(100 + 40 * i, static_cast<int>(i)));
  std::string slots[2] = {std::string(2000, 'x'), std::string(2000, 'x')};
  uint64_t copies[2] = {0, 0};
  std::vector<std::string> seen(kBlocks);
  const auto begin = [&](size_t i) {
    copies[i % 2] =
        *stream->Begin({{slots[i % 2].data(), blocks[i].data(), static_cast<int64_t>(blocks[i].size())}});
  };
  begin(0);
  for (size_t i = 0; i < kBlocks; ++i) {
    if (i + 1 < kBlocks) begin(i + 1);
    ASSERT_TRUE(stream->Await(copies[i % 2]).ok());
    device.ComputeReads(slots[i % 2], &seen[i]);
  }
  device.Synchronize();
  for (size_t i = 0; i < kBlocks; ++i) EXPECT_EQ(seen[i].substr(0, blocks[i].size()), blocks[i]) << i;
}

TEST_P(StagedCopiesTest, ItsEndWaitsForWhatWasBegun) {
  FakeDevice device(GetParam());
  const std::string from = Pattern(3000, 1);
  std::string to(from.size(), 'x');
  auto stream = device.NewStream();
  ASSERT_TRUE(stream->Begin({{to.data(), from.data(), static_cast<int64_t>(from.size())}}).ok());
  stream.reset();
  EXPECT_EQ(device.drains(), 1);
  EXPECT_EQ(to, from);
}

TEST_P(StagedCopiesTest, AnErrorOfTheCopyThreadIsGivenFromThenOnAndNothingIsCopiedAnyMore) {
  FakeDevice device(GetParam());
  auto stream = device.NewStream();
  const std::string from = Pattern(3000, 1);
  std::string to(from.size(), 'x');
  device.FailCopy(3);
  const auto bytes = static_cast<int64_t>(from.size());
  const absl::StatusOr<uint64_t> first = stream->Begin({{to.data(), from.data(), bytes}});
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(ErrorReason(stream->Await(*first)), "COPY_FAILED");
  EXPECT_EQ(ErrorReason(stream->Await(*first)), "COPY_FAILED");
  EXPECT_EQ(ErrorReason(stream->Begin({{to.data(), from.data(), bytes}}).status()), "COPY_FAILED");
  EXPECT_EQ(device.copies(), 3);
  stream.reset();  // what was under way when it failed may still read the ring
  EXPECT_EQ(device.drains(), 1);
}

TEST_P(StagedCopiesTest, AnErrorOfTheComputingThreadIsGivenFromThenOn) {
  FakeDevice device(GetParam());
  auto stream = device.NewStream();
  device.FailMarks();
  EXPECT_EQ(ErrorReason(stream->Begin({}).status()), "DEVICE_LOST");
  EXPECT_EQ(ErrorReason(stream->Await(0)), "DEVICE_LOST");
}

TEST(StagedCopies, ACopyThatWasNeverBegunIsAnErrorNotAWait) {
  FakeDevice device(FakeDevice::kLazy);
  EXPECT_FALSE(device.NewStream()->Await(1).ok());
}

}  // namespace
}  // namespace latentd
