// Clients that do not read: what waits for them is promised, and bounded by holding their jobs.
#include <atomic>

#include "cache/base/error.h"
#include "gtest/gtest.h"
#include "tests/stress/in_process_server.h"

namespace latentd {
namespace {

constexpr int kPictures = 6;

int64_t ImagesPromised(InProcessServer& server) {
  return server.stats().ram.use(MemoryUse::kImages).reserved_bytes;
}

// A session whose client stopped reading before a job of some pictures, which waits for it.
class ReaderTest : public testing::TestWithParam<v1::ImageFormat> {
 protected:
  static Config ConfigOfReader() {
    Config config = InProcessServer::DefaultConfig();
    config.max_unread_bytes = 1000;  // more than steps are, and less than any picture
    return config;
  }
  ReaderTest() : server_(ConfigOfReader()), session_(server_.Open()) {
    session_.Watch([this](const v1::JobEvent& event) {
      MutexLock lock(&mu_);
      if (event.has_image_header()) ++headers_;
      if (event.has_image_chunk()) bytes_ += static_cast<int64_t>(event.image_chunk().data().size());
      changed_.SignalAll();
    });
    session_.StopReading();
    v1::GenerateParams params = SmallJob();
    params.set_width(128);
    params.set_height(128);
    params.set_count(kPictures);
    params.set_image_format(GetParam());
    session_.Send(params);
    MutexLock lock(&mu_);
    while (bytes_ == 0) changed_.Wait(&mu_);
  }

  int headers() {
    MutexLock lock(&mu_);
    return headers_;
  }

  InProcessServer server_;
  Mutex mu_;
  CondVar changed_;
  int headers_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  InProcessServer::Session session_;
};

TEST_P(ReaderTest, AJobWaitsForItsReaderAndHoldsNobodyUp) {
  // Others have the executor and the workers meanwhile, job after job.
  for (int i = 0; i < 3; ++i) {
    const Outcome other = server_.Generate(SmallJob());
    EXPECT_TRUE(other.status.ok()) << other.status;
  }
  EXPECT_EQ(headers(), 1) << "files are made as they are read";
  {
    MutexLock lock(&mu_);
    EXPECT_GE(ImagesPromised(server_), bytes_) << "what is unread is promised";
  }
  session_.Read();
  const Outcome outcome = session_.Wait();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(headers(), kPictures);
  EXPECT_EQ(outcome.sha256.size(), static_cast<size_t>(kPictures));
  EXPECT_TRUE(session_.End().ok());  // `done` is said before the job has let everything go
  EXPECT_EQ(ImagesPromised(server_), 0);
  EXPECT_EQ(server_.WhatIsNotAtRest(), "");
}

TEST_P(ReaderTest, AWaitingJobCanBeCancelled) {
  EXPECT_TRUE(session_.Cancel().ok());
  EXPECT_TRUE(absl::IsCancelled(session_.Wait().status));
  {
    MutexLock lock(&mu_);
    // What was sent stays promised until it is read; of the rest nothing is left.
    EXPECT_EQ(ImagesPromised(server_), bytes_);
  }
  session_.Read();
  EXPECT_EQ(ImagesPromised(server_), 0);
  EXPECT_TRUE(session_.End().ok());
  EXPECT_EQ(server_.WhatIsNotAtRest(), "");
}

TEST_P(ReaderTest, ASessionEndsWhileItsJobWaits) {
  EXPECT_TRUE(session_.End().ok());
  session_.Read();
  EXPECT_EQ(server_.WhatIsNotAtRest(), "");
}

INSTANTIATE_TEST_SUITE_P(Formats, ReaderTest,
                         testing::Values(v1::IMAGE_FORMAT_PNG, v1::IMAGE_FORMAT_JPEG,
                                         v1::IMAGE_FORMAT_LATENTS),
                         [](const auto& param) { return v1::ImageFormat_Name(param.param); });

}  // namespace
}  // namespace latentd
