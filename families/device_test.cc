// Everything in a call is on one device: the one that the weights are on. The `meta` device shows it without
// a GPU: its operators compute shapes alone and take no other device's tensors for their own. Not all of them
// check that, so an observer looks at what every operator is given.
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/record_function.h"
#include "families/flux/flux_pipeline.h"
#include "families/flux/flux_transformer.h"
#include "families/text/clip_text_model.h"
#include "families/text/t5_encoder.h"
#include "families/vae/autoencoder_kl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// As long as it lives, notes the operators of this thread that are given tensors of two devices, and counts
// copies from one to the other. Scalars in host memory go with any device.
class DeviceWatch {
 public:
  DeviceWatch() {
    current_ = this;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&DeviceWatch::Before)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
  ~DeviceWatch() {
    at::removeCallback(handle_);
    current_ = nullptr;
  }

  const std::set<std::string>& mixed() const { return mixed_; }
  int64_t copies() const { return copies_; }

 private:
  static void Take(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) tensors.push_back(t);
    }
  }

  static std::unique_ptr<at::ObserverContext> Before(const at::RecordFunction& call) {
    std::vector<at::Tensor> tensors;
    for (const c10::IValue& value : call.inputs()) Take(value, tensors);
    std::set<at::DeviceType> devices;
    for (const at::Tensor& t : tensors) {
      if (t.defined() && !(t.is_cpu() && t.dim() == 0)) devices.insert(t.device().type());
    }
    if (devices.size() < 2) return nullptr;
    const std::string name = call.name();
    if (name == "aten::copy_") {
      ++current_->copies_;
    } else {
      current_->mixed_.insert(name);
    }
    return nullptr;
  }

  static thread_local DeviceWatch* current_;
  at::CallbackHandle handle_;
  std::set<std::string> mixed_;
  int64_t copies_ = 0;
};
thread_local DeviceWatch* DeviceWatch::current_ = nullptr;

class DeviceTest : public testing::TestWithParam<at::ScalarType> {
 protected:
  // Weights of that layout on meta, stored in the test's type.
  static WeightSet OnMeta(const std::shared_ptr<const ComponentLayout>& layout) {
    std::vector<Weight> weights;
    for (const TensorDecl& tensor : layout->tensors()) {
      weights.push_back({at::empty(tensor.shape, at::TensorOptions(GetParam()).device(at::kMeta))});
    }
    return WeightSet(layout, std::move(weights));
  }
  static at::Tensor Meta(at::IntArrayRef shape) {
    return at::empty(shape, at::TensorOptions(at::kFloat).device(at::kMeta));
  }
  static at::Tensor Host(at::IntArrayRef shape) { return at::zeros(shape); }
  static void ExpectOnMeta(const at::Tensor& t, const std::vector<int64_t>& shape) {
    ASSERT_TRUE(t.defined());
    EXPECT_TRUE(t.is_meta()) << t.device();
    EXPECT_EQ(t.sizes().vec(), shape);
  }

  static FluxConfig SmallFlux() {
    FluxConfig config;
    config.double_blocks = config.single_blocks = 2;
    config.heads = 2;
    config.guidance_embeds = true;
    return config;
  }
  static AutoencoderKlConfig SmallVae() {
    AutoencoderKlConfig config;
    config.latent_channels = 16;
    config.channels = {32, 32, 64, 64};
    return config;
  }

  const c10::InferenceMode inference_;
};

TEST_P(DeviceTest, FluxTransformer) {
  const FluxConfig config = SmallFlux();
  const FluxTransformer transformer(config);
  const WeightSet weights = OnMeta(transformer.layout());
  const WeightView view(weights, nullptr);
  constexpr int64_t kText = 5, kRows = 4, kColumns = 6;
  const DeviceWatch watch;
  // Prompts come from host memory.
  const FluxText text = transformer.PrepareText(view, Host({1, kText, config.text_dim}), kRows, kColumns);
  ExpectOnMeta(text.tokens, {1, kText, config.dim()});
  ExpectOnMeta(text.rope, {kText + kRows * kColumns, 1, config.head_dim / 2});
  const FluxConditioning conditioning =
      transformer.PrepareConditioning(view, Host({1, config.pooled_dim}), 3.5);
  ExpectOnMeta(conditioning.guidance, {1, config.dim()});
  ExpectOnMeta(conditioning.pooled, {1, config.dim()});

  const int64_t copies = watch.copies();
  const at::Tensor vec = transformer.Modulation(view, 0.5f, conditioning);
  ExpectOnMeta(vec, {1, config.dim()});
  ExpectOnMeta(transformer(view, Meta({1, kRows * kColumns, config.in_channels}), vec, text),
               {1, kRows * kColumns, config.out_channels});
  EXPECT_EQ(watch.copies(), copies) << "a step waits for the device when it copies";
  EXPECT_THAT(watch.mixed(), IsEmpty());
}

TEST_P(DeviceTest, TextEncoders) {
  const ClipTextModel clip((ClipTextConfig{.vocabulary = 64, .dim = 32, .hidden = 64, .layers = 2, .heads = 2, .eos = 9}));
  const WeightSet clip_weights = OnMeta(clip.layout());
  const WeightView clip_view(clip_weights, nullptr);
  {
    const DeviceWatch watch;
    const ClipTextModel::Output output = clip(clip_view, {1, 5, 9, 0});
    ExpectOnMeta(output.hidden, {1, 4, 32});
    ExpectOnMeta(output.pooled, {1, 32});
    EXPECT_THAT(watch.mixed(), IsEmpty());
  }
  for (const bool gated : {false, true}) {
    const T5Encoder t5((T5Config{.vocabulary = 64, .dim = 32, .head_dim = 8, .heads = 2, .hidden = 64, .layers = 2,
                                 .gated = gated, .activation = gated ? Activation::kGeluTanh : Activation::kRelu}));
    const WeightSet t5_weights = OnMeta(t5.layout());
    const WeightView t5_view(t5_weights, nullptr);
    const DeviceWatch watch;
    ExpectOnMeta(t5(t5_view, {3, 1, 0, 0, 0}), {1, 5, 32});
    EXPECT_THAT(watch.mixed(), IsEmpty());
  }
}

TEST_P(DeviceTest, Autoencoder) {
  const AutoencoderKl vae(SmallVae());
  const WeightSet weights = OnMeta(vae.layout());
  const WeightView view(weights, nullptr);
  for (const int64_t tile : {0, 32}) {
    const DeviceWatch watch;
    const AutoencoderKl::Posterior posterior = vae.Encode(view, Meta({1, 3, 64, 80}), tile);
    ExpectOnMeta(posterior.mean, {1, 16, 8, 10});
    ExpectOnMeta(posterior.std, {1, 16, 8, 10});
    ExpectOnMeta(vae.Decode(view, vae.FromModel(Meta({1, 16, 8, 10})), tile), {1, 3, 64, 80});
    EXPECT_THAT(watch.mixed(), IsEmpty()) << tile;
    EXPECT_EQ(watch.copies(), 0);
  }
}

// --------------------------------------------------------------------------------------------- the pipeline
// What it returns is in host memory. Numbers cannot be had from meta, so a phase is right when the last thing
// it does is to ask for them.

std::string CopyOutError(const std::function<void()>& phase) {
  try {
    phase();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  return "nothing was thrown";
}
constexpr char kCopyOut[] = "Cannot copy out of meta tensor";

FluxPipeline MakePipeline(const FluxConfig& config, const AutoencoderKlConfig& vae) {
  FluxParts parts;
  parts.transformer = std::make_shared<const FluxTransformer>(config);
  parts.vae = std::make_shared<const AutoencoderKl>(vae);
  return FluxPipeline(std::move(parts));
}

TEST_P(DeviceTest, DenoiserTakesItsInputsFromHostMemoryAndGivesLatentsBack) {
  const FluxConfig config = SmallFlux();
  const FluxPipeline pipeline = MakePipeline(config, SmallVae());
  const WeightSet weights = OnMeta(pipeline.parts().transformer->layout());
  const WeightView view(weights, nullptr);
  GenerateParams params;
  params.width = 64;
  params.height = 80;
  params.steps = 3;
  params.true_cfg_scale = 2;
  params.seeds = {1, 2};
  ASSERT_TRUE(pipeline.Validate(params).ok());
  const at::Tensor t5 = Host({1, 5, config.text_dim}), pooled = Host({1, config.pooled_dim});
  for (const at::Tensor& init : {at::Tensor(), Host({1, 16, 10, 8})}) {
    auto denoiser = pipeline.Begin(
        params, {{"t5", t5}, {"pooled", pooled}, {"neg.t5", t5}, {"neg.pooled", pooled}}, init);
    ASSERT_TRUE(denoiser.ok()) << denoiser.status();
    EXPECT_TRUE((*denoiser)->latents().is_cpu());
    const DeviceWatch watch;
    int64_t copies = -1;
    while (!(*denoiser)->done()) {
      ASSERT_TRUE((*denoiser)->Step(view).ok());
      if (copies < 0) copies = watch.copies();
    }
    EXPECT_EQ(watch.copies(), copies) << "only the first step copies to the device";
    EXPECT_THAT(CopyOutError([&] { (*denoiser)->latents(); }), HasSubstr(kCopyOut));
    EXPECT_THAT(CopyOutError([&] { (*denoiser)->prediction(); }), HasSubstr(kCopyOut));
    EXPECT_THAT(watch.mixed(), IsEmpty());
  }
}

TEST_P(DeviceTest, PicturesAndTheirLatentsComeFromAndGoToHostMemory) {
  const FluxPipeline pipeline = MakePipeline(SmallFlux(), SmallVae());
  const WeightSet weights = OnMeta(pipeline.parts().vae->layout());
  const WeightView view(weights, nullptr);
  GenerateParams params;
  params.width = 64;
  params.height = 80;
  params.seeds = {1, 2};
  params.init_image = at::zeros({50, 70, 3}, at::kByte);
  ASSERT_TRUE(pipeline.Validate(params).ok());
  for (const PhaseOptions& options : {PhaseOptions{}, PhaseOptions{.tile = 32}}) {
    const DeviceWatch watch;
    EXPECT_THAT(CopyOutError([&] { (void)pipeline.EncodeImage(view, params, options); }), HasSubstr(kCopyOut));
    EXPECT_THAT(CopyOutError([&] { (void)pipeline.Decode(view, Host({1, 16, 10, 8}), options); }),
                HasSubstr(kCopyOut));
    EXPECT_THAT(watch.mixed(), IsEmpty());
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeviceTest, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return info.param == at::kFloat ? "Fp32" : "Bf16"; });

}  // namespace
}  // namespace latentd
