// How jobs share an executor, and how soon they let go of it.
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "gtest/gtest.h"
#include "tests/stress/in_process_server.h"

namespace latentd {
namespace {

// A slice is one picture's step: beside a job of many pictures, a job of one has every other slice.
TEST(Slices, AJobOfManyPicturesTakesTurnsPictureByPicture) {
  constexpr int kPictures = 8, kSteps = 16;
  InProcessServer server(InProcessServer::DefaultConfig({"cpu"}));
  InProcessServer::Session many = server.Open(), one = server.Open();
  std::atomic<int> steps_of_many = 0;
  Mutex mu;
  CondVar changed;
  bool running = false;
  many.Watch([&](const v1::JobEvent& event) {
    if (!event.has_step()) return;
    ++steps_of_many;
    MutexLock lock(&mu);
    running = true;
    changed.SignalAll();
  });
  std::vector<int> seen;  // steps of the one when a step of the other job was done
  one.Watch([&](const v1::JobEvent& event) {
    if (event.has_step()) seen.push_back(steps_of_many);
  });
  v1::GenerateParams params = SmallJob();
  params.set_steps(1000);
  params.set_count(kPictures);
  many.Send(params);
  {
    MutexLock lock(&mu);
    while (!running) changed.Wait(&mu);
  }
  params = SmallJob("a green star");
  params.set_steps(kSteps);
  const Outcome outcome = one.Denoise(params);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  ASSERT_EQ(seen.size(), static_cast<size_t>(kSteps));
  // Between its first and its last step it had kSteps − 1 turns, and so had the other, of kPictures for a
  // step.
  EXPECT_LE(seen.back() - seen.front(), (kSteps - 1) / kPictures + 1);
  EXPECT_LT(steps_of_many, 1000) << "the long job was to run all the while";
  EXPECT_TRUE(many.Cancel().ok());
  EXPECT_TRUE(absl::IsCancelled(many.Wait().status));
  EXPECT_TRUE(many.End().ok());
  EXPECT_TRUE(one.End().ok());
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

// A cancel takes effect when a network next asks for a weight: nothing more is computed, wherever it comes.
TEST(Slices, ACancelTakesEffectInsideOfABlock) {
  for (const char* device : {"cpu", "sim:0=64MiB"}) {
    for (const bool tiles : {false, true}) {
      v1::GenerateParams params = SmallJob();
      params.set_width(128);
      params.set_height(128);
      params.set_count(2);
      if (tiles) params.set_vae_tiling(v1::VAE_TILING_ALWAYS);
      InProcessServer server(InProcessServer::DefaultConfig({device}));
      FaultInjector::Arm(FaultPoint::kWeight, int64_t{1} << 40);
      const int64_t before = FaultInjector::Passed(FaultPoint::kWeight);
      ASSERT_TRUE(server.Generate(params).status.ok());
      const int64_t weights = FaultInjector::Passed(FaultPoint::kWeight) - before;
      FaultInjector::Disarm();
      ASSERT_GT(weights, 100);
      for (const int64_t at : {int64_t{1}, int64_t{2}, weights / 7, weights / 3, weights / 2, weights * 2 / 3,
                               weights * 9 / 10, weights - 1, weights}) {
        params.set_prompt(absl::StrCat("a red circle ", at, device, tiles));  // encoded each time
        InProcessServer::Session session = server.Open();
        const int64_t start = FaultInjector::Passed(FaultPoint::kWeight);
        FaultInjector::Call(FaultPoint::kWeight, at, [&] { EXPECT_TRUE(session.Cancel().ok()); });
        const Outcome outcome = session.Denoise(params);
        EXPECT_EQ(FaultInjector::Passed(FaultPoint::kWeight) - start, at) << device << ", " << at;
        EXPECT_TRUE(FaultInjector::Disarm());
        EXPECT_TRUE(absl::IsCancelled(outcome.status)) << outcome.status;
        EXPECT_TRUE(session.End().ok());
        EXPECT_EQ(server.WhatIsNotAtRest(), "");
      }
    }
  }
}

// What throws in the middle of a picture's turn ends that job, and leaves the server as it was.
TEST(Slices, AFailureInsideOfABlockEndsThatJobOnly) {
  InProcessServer server(InProcessServer::DefaultConfig());
  const Outcome whole = server.Generate(SmallJob());
  ASSERT_TRUE(whole.status.ok());
  for (const int64_t at : {5, 50, 100}) {
    FaultInjector::Arm(FaultPoint::kWeight, at);
    EXPECT_EQ(ErrorReason(server.Generate(SmallJob()).status), "INFERENCE_FAILED");
    EXPECT_TRUE(FaultInjector::Disarm());
    EXPECT_EQ(server.WhatIsNotAtRest(), "");
    EXPECT_EQ(server.Generate(SmallJob()).sha256, whole.sha256);
  }
}

}  // namespace
}  // namespace latentd
