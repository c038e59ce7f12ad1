// Turns of pictures, with a denoiser that counts.
#include "families/denoiser.h"

#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/finite_watch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

class CountingDenoiser : public Denoiser {
 public:
  CountingDenoiser(int64_t steps, int64_t pictures) : steps_(steps), now_(static_cast<size_t>(pictures), 0) {}
  int64_t step_count() const override { return steps_; }
  int64_t picture_count() const override { return static_cast<int64_t>(now_.size()); }
  bool done() const override { return done_ == steps_; }
  at::Tensor latents() const override { return at::tensor(now_); }

  std::function<float(int64_t step, int64_t picture)> value = [](int64_t, int64_t) { return 1.0f; };
  std::vector<std::string> turns;

 protected:
  absl::StatusOr<at::Tensor> StepPicture(const WeightView&, int64_t picture) override {
    turns.push_back(absl::StrCat(done_ + 1, ".", picture));
    aside_.resize(static_cast<size_t>(picture));
    aside_.push_back(now_[static_cast<size_t>(picture)] + 1);
    return at::tensor({0.0f, value(done_ + 1, picture)});
  }
  StepReport EndStep() override {
    now_ = std::move(aside_);
    aside_.clear();
    return {.index = ++done_, .count = steps_, .sigma = 0};
  }

 private:
  const int64_t steps_;
  int64_t done_ = 0;
  std::vector<float> now_, aside_;
};

class DenoiserTest : public testing::Test {
 protected:
  DenoiserTest() : weights(std::make_shared<ComponentLayout>(), {}), view(weights, nullptr) {}
  WeightSet weights;
  WeightView view;
};

TEST_F(DenoiserTest, APictureATurn) {
  CountingDenoiser denoiser(2, 3);
  std::vector<int64_t> reports;
  while (!denoiser.done()) {
    const auto report = denoiser.Turn(view);
    ASSERT_TRUE(report.ok()) << report.status();
    reports.push_back(*report ? (*report)->index : 0);
  }
  EXPECT_THAT(denoiser.turns, ElementsAre("1.0", "1.1", "1.2", "2.0", "2.1", "2.2"));
  EXPECT_THAT(reports, ElementsAre(0, 0, 1, 0, 0, 2));
  EXPECT_TRUE(at::equal(denoiser.latents(), at::tensor({2.0f, 2.0f, 2.0f})));
}

TEST_F(DenoiserTest, ATurnThatAnExceptionLeavesIsMadeAgain) {
  CountingDenoiser denoiser(1, 2);
  bool thrown = false;
  denoiser.value = [&](int64_t, int64_t picture) -> float {
    if (picture == 1 && !std::exchange(thrown, true)) throw std::runtime_error("no memory");
    return 1;
  };
  ASSERT_TRUE(denoiser.Turn(view).ok());
  EXPECT_THROW(denoiser.Turn(view).IgnoreError(), std::runtime_error);
  const auto report = denoiser.Turn(view);
  ASSERT_TRUE(report.ok() && *report) << report.status();
  EXPECT_THAT(denoiser.turns, ElementsAre("1.0", "1.1", "1.1"));
  EXPECT_TRUE(at::equal(denoiser.latents(), at::tensor({1.0f, 1.0f})));
}

TEST_F(DenoiserTest, WhatIsNotFiniteIsSaidWithStepAndPicture) {
  for (const float bad : {kNan, kInf, -kInf}) {
    CountingDenoiser denoiser(3, 2);
    denoiser.value = [&](int64_t step, int64_t picture) { return step == 2 && picture == 1 ? bad : 1.0f; };
    ASSERT_TRUE(denoiser.Step(view).ok());
    const absl::Status status = denoiser.Step(view).status();
    EXPECT_EQ(ErrorReason(status), "NON_FINITE");
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    const ErrorDetails details = GetErrorDetails(status);
    EXPECT_EQ(details.at("phase"), "denoise");
    EXPECT_EQ(details.at("step"), "2");
    EXPECT_EQ(details.at("picture"), "1");
  }
}

TEST(FiniteWatch, FindsOneNumberAmongMany) {
  for (const int64_t n : {1, 7, 8, 63, 1000}) {
    for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
      at::Tensor x = at::randn({n});
      EXPECT_TRUE(IsFinite(x));
      for (const float bad : {kNan, kInf, -kInf}) {
        x[at] = bad;
        EXPECT_FALSE(IsFinite(x)) << bad << " at " << at << " of " << n;
        EXPECT_FALSE(IsFinite(x.to(at::kBFloat16)));
      }
    }
  }
  EXPECT_TRUE(IsFinite(at::full({2}, std::numeric_limits<float>::max())));
  EXPECT_TRUE(IsFinite(at::tensor({1, 2}, at::kLong)));
  EXPECT_TRUE(IsFinite(at::empty({0})));
  EXPECT_TRUE(IsFinite(at::Tensor()));
}

}  // namespace
}  // namespace latentd
