#include "tests/bench/noop_daemon.h"

#include <iostream>
#include <memory>
#include <utility>

#include "ATen/ops/zeros.h"
#include "families/image_pipeline.h"
#include "server/config.h"
#include "server/daemon.h"
#include "server/logging.h"
#include "tests/bench/bench_model.h"

namespace latentd::bench {
namespace {

class NoopDenoiser : public Denoiser {
 public:
  explicit NoopDenoiser(int64_t steps) : steps_(steps) {}
  int64_t step_count() const override { return steps_; }
  bool done() const override { return index_ == steps_; }
  int64_t picture_count() const override { return 1; }
  at::Tensor latents() const override { return at::zeros({1, 1, 1, 1}); }

 protected:
  absl::StatusOr<at::Tensor> StepPicture(const WeightView&, int64_t) override { return latents(); }
  StepReport EndStep() override {
    ++index_;
    return StepReport{.index = index_, .count = steps_, .sigma = 1};
  }

 private:
  const int64_t steps_;
  int64_t index_ = 0;
};

class NoopPipeline : public ImagePipeline {
 public:
  explicit NoopPipeline(const std::string& weights) {
    auto layout = std::make_shared<ComponentLayout>();
    layout->Add("weight", {16});
    Component network;
    network.name = "network";
    network.layout = std::move(layout);
    network.files = OrDie(WeightFiles::Open(weights));
    components_.push_back(std::move(network));
  }

  absl::string_view family() const override { return "noop"; }
  absl::string_view variant() const override { return ""; }
  const std::vector<Component>& components() const override { return components_; }
  const ModelDefaults& defaults() const override { return defaults_; }
  RequestUses MakeUses() const override { return UsesOf(defaults(), 8, {}); }
  absl::Status Validate(GenerateParams& params) const override {
    if (!params.width) params.width = 8;
    if (!params.height) params.height = 8;
    if (!params.steps) params.steps = defaults_.steps;
    return absl::OkStatus();
  }
  std::vector<std::string> EncoderComponents(const GenerateParams&) const override { return {}; }
  absl::Status Encode(const std::string&, const WeightView&, const GenerateParams&,
                      const std::vector<std::shared_ptr<const TextEmbedding>>&,
                      Conditioning&) const override {
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<TokenCount>> CountTokens(const GenerateParams&) const override {
    return std::vector<TokenCount>();
  }
  std::string EncodeKey(const std::string&, const GenerateParams&) const override { return ""; }
  int64_t ConditioningBytes(const std::string&, const GenerateParams&) const override { return 0; }
  absl::StatusOr<at::Tensor> EncodeImage(const WeightView&, const GenerateParams&,
                                         const PhaseOptions&) const override {
    return absl::UnimplementedError("no pictures here");
  }
  std::string denoiser_component() const override { return "network"; }
  absl::StatusOr<std::unique_ptr<Denoiser>> Begin(const GenerateParams& params, Conditioning,
                                                  at::Tensor) const override {
    return std::make_unique<NoopDenoiser>(*params.steps);
  }
  std::string vae_component() const override { return "network"; }
  int64_t SmallerTile(const GenerateParams&, int64_t) const override { return 0; }
  absl::StatusOr<at::Tensor> Decode(const WeightView&, const at::Tensor&,
                                    const PhaseOptions&) const override {
    return at::zeros({8, 8, 3}, at::kByte);
  }
  at::Tensor Preview(const at::Tensor&) const override { return {}; }
  int64_t WorkingBytes(const std::string&, const GenerateParams&, const PhaseOptions&, bool) const override {
    return 0;
  }
  std::string ShapeKey(const std::string&, const GenerateParams&) const override { return ""; }

 private:
  std::vector<Component> components_;
  ModelDefaults defaults_;
};

}  // namespace

void ServeNoop(const std::string& address, const std::string& weights) {
  SetUpLogging("error", "text");
  Config config;
  config.listen = {address};
  config.devices = {"cpu"};
  config.threads_per_device = 1;
  const auto daemon = OrDie(Daemon::Start(config));
  daemon->core().catalog->AddModel(OpenModel::Make(kNoopModel, std::string(kNoopModel) + "@0", "",
                                                   std::make_unique<NoopPipeline>(weights)));
  std::cout << "ready" << std::endl;
  std::cin.get();
}

}  // namespace latentd::bench
