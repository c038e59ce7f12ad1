// Numbers that are not finite never become a picture, nor stay in memory: one weight is infinite, in each
// component of the demo model, and a formula takes the root of what rounding left of zero.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "cache/base/error.h"
#include "gtest/gtest.h"
#include "server/media/image_codec.h"
#include "tests/stress/in_process_server.h"
#include "tests/stress/weight_editor.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

struct Broken {
  const char* component;
  const char* file;
  const char* tensor;  // its name begins so
  const char* phase;
  bool from_image = false;
};
constexpr Broken kBroken[] = {
    {"text_encoder", "text_encoder/model.safetensors", "", "encode"},
    {"text_encoder_2", "text_encoder_2/model.safetensors", "", "encode"},
    {"transformer", "transformer/diffusion_pytorch_model.safetensors", "proj_out.weight", "denoise"},
    {"vae", "vae/diffusion_pytorch_model.safetensors", "decoder.conv_out.weight", "decode"},
    {"vae", "vae/diffusion_pytorch_model.safetensors", "encoder.conv_out.weight", "encode_image", true},
};

void PrintTo(const Broken& broken, std::ostream* out) { *out << broken.component << ", " << broken.phase; }

v1::GenerateParams JobOf(bool from_image) {
  v1::GenerateParams params = SmallJob();
  if (!from_image) return params;
  params.mutable_init_image()->set_data(*EncodePng(std::vector<uint8_t>(64 * 64 * 3, 90), 64, 64));
  params.mutable_init_image()->set_strength(0.6);
  return params;
}

class FiniteTest : public testing::TestWithParam<Broken> {};

TEST_P(FiniteTest, AnInfiniteWeightEndsTheJobAndIsNotKept) {
  const Broken& broken = GetParam();
  const ModelCopies copies({"broken"});
  EditTensors(absl::StrCat(copies.root(), "/broken/", broken.file), [&](NamedTensors& tensors) {
    for (auto& [name, tensor] : tensors) {
      if (broken.tensor[0] == '\0' ? absl::StrContains(name, "layer_norm") && tensor.dim() == 1
                                   : name == broken.tensor) {
        tensor.flatten()[0] = std::numeric_limits<float>::infinity();
      }
    }
  });
  Config config = InProcessServer::DefaultConfig();
  config.model_roots = {copies.root()};
  InProcessServer server(config);
  for (int i = 0; i < 2; ++i) {  // and again: nothing of it was kept
    const Outcome outcome =
        server.Generate(JobOf(broken.from_image), {}, v1::PATCH_MODE_UNSPECIFIED, "broken");
    EXPECT_EQ(ErrorReason(outcome.status), "NON_FINITE") << outcome.status;
    EXPECT_TRUE(absl::IsFailedPrecondition(outcome.status));
    ErrorDetails details = GetErrorDetails(outcome.status);
    EXPECT_EQ(details["phase"], broken.phase);
    EXPECT_EQ(details["component"], broken.component);
    if (details["phase"] == "denoise") {
      EXPECT_EQ(details["step"], "1");
      EXPECT_EQ(details["picture"], "0");
    }
    EXPECT_TRUE(outcome.sha256.empty());
    EXPECT_EQ(server.WhatIsNotAtRest(), "");
  }
  for (const RecordStats& record : server.stats().records) {
    EXPECT_FALSE(record.kind == "conditioning" &&
                 absl::StrContains(record.key.ToString(), broken.component) &&
                 GetParam().phase == std::string("encode"))
        << record.key.ToString();
  }
}

INSTANTIATE_TEST_SUITE_P(Components, FiniteTest, testing::ValuesIn(kBroken), [](const auto& param) {
  return absl::StrCat(param.param.component, "_", param.param.phase);
});

// At the first level of a schedule that begins with nothing but noise, with η of 1, DDIM takes the root of
// zero, whatever rounding makes of it. (Networks that predict noise divide by zero there, and are refused
// such samplers.)
TEST(Finite, TheRootOfZeroIsZero) {
  const char* goldens = std::getenv("LATENTD_GOLDENS");
  const fs::path models = goldens == nullptr ? "build/goldens" : goldens;
  const ModelCopies copies({});
  fs::copy(models / "tiny-sd15", fs::path(copies.root()) / "zero-snr", fs::copy_options::recursive);
  // The class is that of the index, which names another.
  const fs::path index = fs::path(copies.root()) / "zero-snr/model_index.json";
  std::stringstream text;
  text << std::ifstream(index).rdbuf();
  std::ofstream(index) << absl::StrReplaceAll(text.str(), {{"PNDMScheduler", "DDIMScheduler"}});
  std::ofstream(fs::path(copies.root()) / "zero-snr/scheduler/scheduler_config.json")
      << R"({"_class_name": "DDIMScheduler", "num_train_timesteps": 1000, "beta_start": 0.00085,)"
      << R"("beta_end": 0.012, "beta_schedule": "scaled_linear", "rescale_betas_zero_snr": true,)"
      << R"("timestep_spacing": "trailing", "set_alpha_to_one": false, "steps_offset": 1,)"
      << R"("prediction_type": "v_prediction"})";
  Config config = InProcessServer::DefaultConfig();
  config.model_roots = {copies.root()};
  InProcessServer server(config);
  v1::GenerateParams params = SmallJob();
  params.set_sampler("ddim");
  params.set_eta(1);
  for (const int steps : {2, 4, 5, 7, 10, 20}) {
    params.set_steps(steps);
    const Outcome outcome = server.Generate(params, {}, v1::PATCH_MODE_UNSPECIFIED, "zero-snr");
    EXPECT_TRUE(outcome.status.ok()) << steps << " steps: " << outcome.status;
  }
  EXPECT_EQ(server.WhatIsNotAtRest(), "");
}

}  // namespace
}  // namespace latentd
