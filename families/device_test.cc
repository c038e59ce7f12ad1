// Everything in a call is on one device: the one that the weights are on. The `meta` device shows it without
// a GPU: its operators compute shapes alone. They do not all refuse a tensor of another device, as CUDA's do,
// so an observer looks at what each operator is given.
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/ATen.h"
#include "families/encoders/clip_text_model.h"
#include "families/encoders/t5_encoder.h"
#include "families/flux/flux_denoiser.h"
#include "families/flux/flux_transformer.h"
#include "families/prompt/embedding_triggers.h"
#include "families/sampling/guidance.h"
#include "families/sampling/sampler.h"
#include "families/sd/sd_denoiser.h"
#include "families/sd/unet.h"
#include "families/vae/autoencoder_kl.h"
#include "families/vae/picture_codec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/library.h"

namespace latentd {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

// ------------------------------------------------------------------------------------------- the observer

constexpr auto kObserverKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// As long as it lives, notes the operators that this thread calls with tensors of two devices, and counts
// copies from one to the other. Numbers in host memory go with any device.
class DeviceWatch {
 public:
  DeviceWatch() : include_(kObserverKey) { current_ = this; }
  ~DeviceWatch() { current_ = nullptr; }

  const std::set<std::string>& mixed() const { return mixed_; }
  int64_t copies() const { return copies_; }

  static void Observe(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard not_what_it_is_made_of(kObserverKey);
    std::set<at::DeviceType> devices;
    const size_t inputs = op.schema().arguments().size();
    for (size_t i = stack->size() - inputs; i < stack->size(); ++i) Take((*stack)[i], devices);
    const bool copies_in = op.schema().name() == "aten::copy_";
    if (devices.size() > 1 && !copies_in) current_->mixed_.insert(op.schema().name());
    op.callBoxed(stack);
    if (devices.empty()) return;  // what makes a tensor out of none copies nothing
    const size_t outputs = op.schema().returns().size();
    for (size_t i = stack->size() - outputs; i < stack->size(); ++i) Take((*stack)[i], devices);
    if (devices.size() > 1) ++current_->copies_;
  }

 private:
  static void Take(const c10::IValue& value, std::set<at::DeviceType>& devices) {
    std::vector<at::Tensor> tensors;
    if (value.isTensor()) tensors = {value.toTensor()};
    if (value.isTensorList()) tensors = value.toTensorVector();
    for (const at::Tensor& t : tensors) {
      if (t.defined() && !(t.is_cpu() && t.dim() == 0)) devices.insert(t.device().type());
    }
  }

  static thread_local DeviceWatch* current_;
  const c10::impl::IncludeDispatchKeyGuard include_;
  std::set<std::string> mixed_;
  int64_t copies_ = 0;
};
thread_local DeviceWatch* DeviceWatch::current_ = nullptr;

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&DeviceWatch::Observe>());
}

// Shapes of operators for which LibTorch has them in Python only.

at::Tensor EmbeddingShape(const at::Tensor& weight, const at::Tensor& ids, int64_t, bool, bool) {
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(weight.size(1));
  return at::empty(shape, weight.options());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> LayerNormShape(const at::Tensor& x, at::IntArrayRef,
                                                              const std::optional<at::Tensor>&,
                                                              const std::optional<at::Tensor>&, double) {
  return {at::empty_like(x, at::MemoryFormat::Contiguous), at::empty({}, x.options()),
          at::empty({}, x.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> GroupNormShape(const at::Tensor& x,
                                                              const std::optional<at::Tensor>&,
                                                              const std::optional<at::Tensor>&, int64_t,
                                                              int64_t, int64_t, int64_t, double) {
  return {at::empty_like(x, at::MemoryFormat::Contiguous), at::empty({}, x.options()),
          at::empty({}, x.options())};
}

at::Tensor ConvolutionShape(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>&,
                            at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef, bool,
                            at::IntArrayRef, int64_t) {
  auto extent = [&](int64_t i) {
    const auto k = static_cast<size_t>(i);
    return (x.size(2 + i) + 2 * padding[k] - weight.size(2 + i)) / stride[k] + 1;
  };
  return at::empty({x.size(0), weight.size(0), extent(0), extent(1)}, x.options());
}

// [batch, heads, tokens, dim], laid out with the tokens before the heads.
at::Tensor AttentionShape(const at::Tensor& q, const at::Tensor&, const at::Tensor& v,
                          const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
}

at::Tensor DeviationShape(const at::Tensor& x, at::OptionalIntArrayRef dims, const std::optional<at::Scalar>&,
                          bool keep) {
  return x.sum(dims, keep);
}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("embedding", EmbeddingShape);
  m.impl("native_layer_norm", LayerNormShape);
  m.impl("native_group_norm", GroupNormShape);
  m.impl("complex", [](const at::Tensor& re, const at::Tensor&) {
    return at::empty(re.sizes(), re.options().dtype(at::kComplexFloat));
  });
  m.impl("convolution_overrideable", ConvolutionShape);
  m.impl("flip", [](const at::Tensor& x, at::IntArrayRef) { return at::empty_like(x); });
  m.impl("scaled_dot_product_attention", AttentionShape);
  m.impl("std.correction", DeviationShape);
}

// ------------------------------------------------------------------------------------------- the networks

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
  // With `added_dim`, as SDXL: 32 channels of pooled text and two numbers.
  static UNetConfig SmallUNet(int64_t added_dim) {
    UNetConfig config;
    config.levels = {UNetConfig::Level::Of(32, 2, 1, 1, false, true), UNetConfig::Level::Of(64, 2, 1, 2)};
    config.middle = 2;
    config.context_dim = 24;
    config.linear_projection = added_dim > 0;
    config.added_dim = added_dim;
    config.time_ids_dim = 8;
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
  EXPECT_EQ(copies, 2) << "of t5 and pooled";
  const at::Tensor vec = transformer.Modulation(view, 0.5f, conditioning);
  ExpectOnMeta(vec, {1, config.dim()});
  ExpectOnMeta(transformer(view, Meta({1, kRows * kColumns, config.in_channels}), vec, text),
               {1, kRows * kColumns, config.out_channels});
  EXPECT_EQ(watch.copies(), copies) << "a step waits for the device when it copies";
  EXPECT_THAT(watch.mixed(), IsEmpty());
}

TEST_P(DeviceTest, TextEncoders) {
  const ClipTextModel clip(
      (ClipTextConfig{.vocabulary = 64, .dim = 32, .hidden = 64, .layers = 2, .heads = 2, .eos = 9}));
  const WeightSet clip_weights = OnMeta(clip.layout());
  const WeightView clip_view(clip_weights, nullptr);
  {
    const DeviceWatch watch;
    const ClipTextModel::Output output = clip(clip_view, {1, 5, 9, 0});
    ExpectOnMeta(output.hidden, {1, 4, 32});
    ExpectOnMeta(output.pooled, {1, 32});
    EXPECT_THAT(watch.mixed(), IsEmpty());
  }
  {
    const DeviceWatch watch;
    ExpectOnMeta(clip(clip_view, {1, kFirstRowId + 1, kFirstRowId, 9}, {}, {}, at::zeros({2, 32})).hidden,
                 {1, 4, 32});
    EXPECT_THAT(watch.mixed(), IsEmpty());
  }
  for (const bool gated : {false, true}) {
    const T5Encoder t5((T5Config{.vocabulary = 64,
                                 .dim = 32,
                                 .head_dim = 8,
                                 .heads = 2,
                                 .hidden = 64,
                                 .layers = 2,
                                 .gated = gated,
                                 .activation = gated ? Activation::kGeluTanh : Activation::kRelu}));
    const WeightSet t5_weights = OnMeta(t5.layout());
    const WeightView t5_view(t5_weights, nullptr);
    const DeviceWatch watch;
    ExpectOnMeta(t5(t5_view, {3, 1, 0, 0, 0}), {1, 5, 32});
    EXPECT_THAT(watch.mixed(), IsEmpty());
  }
}

TEST_P(DeviceTest, UNets) {
  for (const bool linear : {false, true}) {
    const UNet2DCondition unet(SmallUNet(linear ? 48 : 0));
    const UNetConfig& config = unet.config();
    const WeightSet weights = OnMeta(unet.layout());
    const WeightView view(weights, nullptr);
    const DeviceWatch watch;
    const UNetConditioning conditioning =
        unet.PrepareConditioning(view, Host({2, 5, config.context_dim}), Host({2, 32}), Host({2, 2}));
    ExpectOnMeta(conditioning.context, {2, 5, config.context_dim});
    const int64_t copies = watch.copies();
    const at::Tensor time = unet.TimeEmbedding(view, 500, 1, conditioning);
    ExpectOnMeta(time, {linear ? 2 : 1, config.time_dim()});
    ExpectOnMeta(unet(view, Meta({2, 4, 9, 7}), time, conditioning.context), {2, 4, 9, 7});
    EXPECT_EQ(watch.copies(), copies);
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

// What a denoiser begins with is in host memory, and goes to the device in the first step; nothing else is
// copied.
void ExpectInputsFromHostAlone(Denoiser& denoiser, const WeightView& view) {
  EXPECT_TRUE(denoiser.latents().is_cpu());
  const DeviceWatch watch;
  int64_t copies = -1;
  while (!denoiser.done()) {
    ASSERT_TRUE(denoiser.Step(view).ok());
    if (copies < 0) copies = watch.copies();
  }
  EXPECT_GT(copies, 0);
  EXPECT_EQ(watch.copies(), copies) << "only the first step copies to the device";
  EXPECT_THAT(CopyOutError([&] { denoiser.latents(); }), HasSubstr(kCopyOut));
  EXPECT_THAT(CopyOutError([&] { denoiser.prediction(); }), HasSubstr(kCopyOut));
  EXPECT_THAT(watch.mixed(), IsEmpty());
}

TEST_P(DeviceTest, DenoiserTakesItsInputsFromHostMemoryAndGivesLatentsBack) {
  const FluxConfig config = SmallFlux();
  const auto transformer = std::make_shared<const FluxTransformer>(config);
  const WeightSet weights = OnMeta(transformer->layout());
  const WeightView view(weights, nullptr);
  const FluxPrompt prompt{.t5 = Host({1, 5, config.text_dim}), .pooled = Host({1, config.pooled_dim})};
  const at::Tensor latents = PackLatents(Host({1, 16, 10, 8}));
  const auto denoiser = MakeFluxDenoiser({.transformer = transformer,
                                          .sigmas = {1, 0.6F, 0.3F, 0},
                                          .pictures = {latents, latents},
                                          .controls = {},
                                          .prompts = {prompt, prompt},
                                          .guidance = 3.5,
                                          .true_cfg_scale = 2,
                                          .latent_height = 10,
                                          .latent_width = 8});
  ExpectInputsFromHostAlone(*denoiser, view);
}

TEST_P(DeviceTest, PicturesAndTheirLatentsComeFromAndGoToHostMemory) {
  const AutoencoderKl vae(SmallVae());
  const WeightSet weights = OnMeta(vae.layout());
  const WeightView view(weights, nullptr);
  const at::Tensor pixels = at::zeros({80, 64, 3}, at::kByte), kept = at::ones({1, 1, 80, 64}, at::kBool);
  for (const int64_t tile : {0, 32}) {
    for (const VaePicture& picture : {VaePicture{pixels}, VaePicture{pixels, kept}}) {
      const DeviceWatch watch;
      PictureEncoder encoder(vae, {picture});
      EXPECT_THAT(CopyOutError([&] {
                    while (!encoder.Slice(view, tile)) {
                    }
                  }),
                  HasSubstr(kCopyOut));
      EXPECT_THAT(watch.mixed(), IsEmpty());
    }
    const DeviceWatch watch;
    PictureDecoder decoder(vae, Host({1, 16, 10, 8}));
    EXPECT_THAT(CopyOutError([&] {
                  while (!decoder.over()) (void)decoder.Slice(view, tile);
                }),
                HasSubstr(kCopyOut));
    EXPECT_THAT(watch.mixed(), IsEmpty());
  }
}

TEST_P(DeviceTest, NoSliceOfAFullSizeAutoencoderIsLongerThanAStep) {
  AutoencoderKlConfig config;
  config.channels = {128, 256, 512, 512};
  config.layers_per_block = 2;
  const AutoencoderKl vae(config);
  const WeightSet weights = OnMeta(vae.layout());
  const WeightView view(weights, nullptr);
  const at::Tensor latents = Meta({1, 4, 128, 128});
  int64_t whole = 1, tiled = 1;
  for (auto pass = vae.BeginDecode(latents); !pass.Slice(view);) ++whole;
  for (auto pass = vae.BeginDecode(latents, 512); !pass.Slice(view);) ++tiled;
  // 10 TFLOP of a picture of 1024 × 1024, of which the largest layer has an eighth: nearly every stage is a
  // slice of its own.
  EXPECT_GE(whole, 20);
  EXPECT_GE(tiled, 9 * 15);
  int64_t small = 1;
  for (auto pass = vae.BeginDecode(Meta({1, 4, 8, 8})); !pass.Slice(view);) ++small;
  EXPECT_EQ(small, 1) << "slices are not cut for nothing";

  // What is half done and let go of, or wanted in other tiles, is begun anew.
  PictureDecoder decoder(vae, Host({1, 4, 128, 128}));
  const auto slices_to_the_end = [&](int64_t tile) {
    int64_t slices = 0;
    CopyOutError([&] {
      while (true) {
        ++slices;
        (void)decoder.Slice(view, tile);
      }
    });
    return slices;
  };
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(decoder.Slice(view, 0).ok());
  decoder.LetGo();
  EXPECT_EQ(slices_to_the_end(0), whole);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(decoder.Slice(view, 0).ok());
  EXPECT_EQ(slices_to_the_end(512), tiled);
}

TEST_P(DeviceTest, SdDenoisersTakeTheirInputsFromHostMemoryAndGiveLatentsBack) {
  const auto unet = std::make_shared<const UNet2DCondition>(SmallUNet(0));
  const WeightSet weights = OnMeta(unet->layout());
  const WeightView view(weights, nullptr);
  const SdPromptRow row{.hidden = {Host({1, 5, 24})}, .pooled = {}, .time_ids = {}};
  SdDenoising run{.predictor = SdPredictor(unet, 0.5),
                  .prompts = {{.rows = {row, row}, .weights = {1}}},
                  .prompts_of_step = {0},
                  .pictures = {},
                  .mask = {.mask = Host({1, 1, 10, 8}), .gradient = true},
                  .tiles = LayTiles(10, 8, 6, 6, 2),
                  .guidance = {5, 1}};
  const auto schedule = NoiseSchedule::Create({});
  for (int i = 0; i < 2; ++i) {
    SdPicture picture;
    picture.x = picture.original = picture.noise = Host({1, 4, 10, 8});
    picture.source = std::make_shared<NoiseSource>(7);
    SamplerOptions options;
    options.steps = 3;
    options.noise = picture.source;
    auto sampler = MakeSampler("dpmpp_2m", schedule, options);
    ASSERT_TRUE(sampler.ok()) << sampler.status();
    picture.sampler = *std::move(sampler);
    run.pictures.push_back(std::move(picture));
  }
  const auto denoiser = MakeSdDenoiser(std::move(run));
  ExpectInputsFromHostAlone(*denoiser, view);
}

// Only noise is copied, from the host.
TEST(SamplerDeviceTest, StepsStayOnTheirDevice) {
  const c10::InferenceMode inference;
  for (const Prediction prediction : {Prediction::kEpsilon, Prediction::kVelocity}) {
    NoiseScheduleConfig config;
    config.prediction = prediction;
    const auto schedule = NoiseSchedule::Create(config);
    for (const SamplerInfo& info : AllSamplers()) {
      SamplerOptions options;
      options.steps = 6;
      auto sampler = MakeSampler(info.name, schedule, options);
      ASSERT_TRUE(sampler.ok()) << info.name << ": " << sampler.status();
      const at::Tensor noise = at::empty({1, 4, 2, 3}, at::TensorOptions(at::kFloat).device(at::kMeta));
      const DeviceWatch watch;
      at::Tensor x = (*sampler)->AddNoise(noise, noise);
      while (!(*sampler)->done()) {
        x = (*sampler)->Step((*sampler)->ScaleInput(x).to(at::kHalf), x);
        EXPECT_TRUE(x.is_meta() && (*sampler)->prediction().is_meta()) << info.name;
        EXPECT_EQ(x.scalar_type(), at::kFloat) << info.name;
      }
      EXPECT_TRUE(Guide(x, x, 7.5).is_meta());
      EXPECT_EQ(watch.copies() > 0, info.stochastic) << info.name;
      EXPECT_LE(watch.copies(), (*sampler)->evaluation_count()) << info.name;
      EXPECT_THAT(watch.mixed(), IsEmpty()) << info.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeviceTest, testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(toString(info.param)); });

}  // namespace
}  // namespace latentd
