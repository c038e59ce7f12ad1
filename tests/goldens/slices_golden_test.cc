// A slice that failed for want of memory is done again with more, at whatever allocation it failed, and the
// run comes to what it comes to without.
#include <deque>
#include <string>

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "cache/memory_account.h"
#include "cache/weights/weight_stream.h"
#include "gtest/gtest.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

struct Case {
  const char* model;
  const char* syntax;  // of a long prompt with weights; null: a plain one
  bool picture;
};

GenerateParams Params(const Case& c) {
  GenerateParams params;
  params.width = params.height = 64;
  params.steps = 2;
  params.seeds = {3, 4};
  params.prompt = "a red circle";
  if (c.syntax != nullptr) {
    params.prompt_syntax = c.syntax;
    params.prompt = c.syntax == std::string("compel")
                        ? "(a red circle)0.5 on a (blue)0.2 (wide)1.4 field"
                        : "a (red:1.3) circle [on:above:0.5] a (blue:0.2) field";
    for (int i = 0; i < 40; ++i) params.prompt += " and more words";
    params.negative_prompt = "dark";
  }
  if (c.picture) {
    params.SetPicture(MediaRole::kInit,
                      at::arange(64 * 64 * 3, at::kLong).remainder(251).view({64, 64, 3}).to(at::kByte));
    params.strength = 1;
  }
  return params;
}

// The slice under limits that grow until it is done. Says how often it failed.
SliceReport Insist(PhaseWork& work, const WeightViews& views, int64_t& failures) {
  for (int64_t limit = 64;; limit += limit / 2) {
    const auto account = MemoryAccount::Open();
    account->set_limit(limit);
    try {
      const MemoryAccount::Scope scope(account);
      const auto report = work.Slice(views, {});
      EXPECT_TRUE(report.ok()) << report.status();
      return report.ok() ? *report : SliceReport{.phase_over = true};
    } catch (const StatusError& e) {
      EXPECT_TRUE(IsPromiseExceeded(e.status())) << e.status();
      if (++failures % 2 == 0) work.LetGo();
    }
  }
}

class SlicesGolden : public testing::TestWithParam<Case> {};

TEST_P(SlicesGolden, ThatFailAreDoneAgain) {
  const auto pipeline = OpenModel(
      {.name = GetParam().model, .folder = GoldenPath(GetParam().model), .file = "", .base_folder = ""});
  const RunResult wanted = Generate(*pipeline, Params(GetParam()));
  std::map<std::string, std::shared_ptr<const WeightSet>> weights;
  for (const Component& component : pipeline->components()) weights[component.name] = Load(component);
  const auto run = pipeline->Prepare(Params(GetParam()));
  ASSERT_TRUE(run.ok()) << run.status();
  RunState state;
  for (size_t i = 0; i < (*run)->phases().size(); ++i) {
    if ((*run)->phases()[i].kind == PhaseKind::kDenoise) {
      for (const auto& [name, tensor] : wanted.conditioning)
        EXPECT_TRUE(at::equal(tensor, state.conditioning[name])) << name;
    }
    const auto work = (*run)->Begin(i, state);
    ASSERT_TRUE(work.ok()) << work.status();
    int64_t failures = 0;
    for (bool over = false; !over;) {
      std::deque<WeightView> held;
      WeightViews views;
      for (const std::string& name : (*work)->reads())
        views.Add(name, held.emplace_back(*weights.at(name), nullptr));
      over = Insist(**work, views, failures).phase_over;
    }
    EXPECT_GT(failures, 3) << i;
  }
  ASSERT_EQ(state.pictures.size(), wanted.pixels.size());
  for (size_t i = 0; i < state.pictures.size(); ++i)
    EXPECT_TRUE(at::equal(state.pictures[i], wanted.pixels[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(All, SlicesGolden,
                         testing::Values(Case{"tiny-dev", nullptr, true}, Case{"tiny-sd15", "compel", false},
                                         Case{"tiny-sd15", "a1111", true},
                                         Case{"tiny-sdxl", "compel", true}));

}  // namespace
}  // namespace latentd
