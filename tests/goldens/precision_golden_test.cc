// Whole runs in low precision, against diffusers' own: a run in bf16 or fp16 may be as far from the pictures
// of diffusers in fp32 as diffusers' run of that type is, and a tenth more, as root mean square over eight
// seeds.
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Version.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gtest/gtest.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

constexpr double kShare = 1.1;
// Our pictures are of bytes: rounding to them moves a number in 0 to 1 by this, as root mean square.
constexpr double kRounding = 1 / 255.0 / 3.46;

double Distance(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).to(at::kDouble).square().mean().sqrt().item<double>();
}

class PrecisionGolden : public testing::TestWithParam<std::tuple<const char*, const char*>> {};

TEST_P(PrecisionGolden, ARunIsAsNearToFp32AsDiffusersIs) {
  const auto& [model, type] = GetParam();
  if (type == std::string("bf16") && !absl::StartsWith(at::get_cpu_capability(), "AVX512") &&
      std::getenv("ATEN_CPU_CAPABILITY") != nullptr) {
    GTEST_SKIP() << "LibTorch's attention takes AMX where there is some, and then lacks what packs for it";
  }
  const Golden golden(absl::StrCat("precision-", model));
  ModelFiles files;
  files.name = model;
  files.folder = GoldenPath(model);
  GenerateParams params;
  params.prompt = golden.Setting("prompt");
  if (!golden.Setting("negative").empty()) params.negative_prompt = golden.Setting("negative");
  params.noise = golden["noise"];
  params.steps = golden.Int("steps");
  params.guidance = golden.Double("guidance");
  params.width = params.height = 64;
  for (int64_t i = 0; i < params.noise.size(0); ++i) params.seeds.push_back(static_cast<uint64_t>(i));
  const auto pipeline = OpenModel(files);
  if (pipeline->family() == "flux") params.max_sequence_length = 32;

  const RunResult run =
      Generate(*pipeline, params, {}, {}, std::string(type) == "bf16" ? at::kBFloat16 : at::kHalf);

  std::vector<at::Tensor> pixels;
  for (const at::Tensor& picture : run.pixels)
    pixels.push_back(picture.permute({2, 0, 1}).to(at::kFloat).div(255));
  for (const auto& [what, ours, rounding] : {std::tuple{"latents", run.latents.back().to(at::kFloat), 0.0},
                                             {"pictures", at::stack(pixels), kRounding}}) {
    const at::Tensor exact = golden[absl::StrCat("fp32.", what)];
    const double theirs = Distance(golden[absl::StrCat(type, ".", what)], exact);
    const double distance = Distance(ours, exact);
    std::printf("%-13s %s %-8s %.5f, diffusers %.5f, ratio %.2f\n", model, type, what, distance, theirs,
                distance / theirs);
    EXPECT_LE(distance, kShare * theirs + rounding) << model << " " << type << " " << what;
  }
}

INSTANTIATE_TEST_SUITE_P(All, PrecisionGolden,
                         testing::Combine(testing::Values("tiny-dev", "tiny-schnell", "tiny-sd15",
                                                          "tiny-sdxl"),
                                          testing::Values("bf16", "fp16")),
                         [](const auto& info) {
                           return absl::StrReplaceAll(
                               absl::StrCat(std::get<0>(info.param), "_", std::get<1>(info.param)),
                               {{"-", "_"}});
                         });

}  // namespace
}  // namespace latentd
