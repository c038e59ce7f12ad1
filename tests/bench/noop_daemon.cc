#include "tests/bench/noop_daemon.h"

#include <iostream>
#include <memory>
#include <utility>

#include "ATen/ops/zeros.h"
#include "families/family.h"
#include "server/config.h"
#include "server/daemon.h"
#include "server/logging.h"
#include "tests/bench/bench_model.h"

namespace latentd::bench {
namespace {

// Steps, or a picture, of nothing.
class NoopWork : public PhaseWork {
 public:
  NoopWork(int64_t steps, RunState& state) : steps_(steps), state_(state) {}
  std::vector<std::string> reads() const override { return {"network"}; }
  int64_t step_count() const override { return steps_; }
  at::Tensor latents() const override { return at::zeros({1, 1, 1, 1}); }

  absl::StatusOr<SliceReport> Slice(const WeightViews&, const PhaseOptions&) override {
    if (steps_ == 0) {
      state_.pictures.push_back(at::zeros({8, 8, 3}, at::kByte));
      return SliceReport{.phase_over = true};
    }
    ++index_;
    state_.latents = latents();
    return SliceReport{.phase_over = index_ == steps_,
                       .step = StepReport{.index = index_, .count = steps_, .sigma = 1}};
  }

 private:
  const int64_t steps_;  // 0: decodes
  RunState& state_;
  int64_t index_ = 0;
};

class NoopRun : public latentd::Run {
 public:
  explicit NoopRun(GenerateParams params) : latentd::Run(std::move(params)) {
    phases_ = {{.kind = PhaseKind::kDenoise, .components = {"network"}, .units = *params_.steps},
               {.kind = PhaseKind::kDecode, .components = {"network"}}};
  }
  std::string OutputKey(size_t) const override { return ""; }
  int64_t OutputBytes(size_t) const override { return 0; }
  int64_t WorkingBytes(size_t, const std::string&, const PhaseOptions&) const override { return 0; }
  std::string ShapeKey(size_t, const std::string&) const override { return ""; }
  absl::StatusOr<std::unique_ptr<PhaseWork>> Begin(size_t phase, RunState& state) const override {
    return std::make_unique<NoopWork>(phase == 0 ? *params_.steps : 0, state);
  }
};

class NoopPipeline : public Pipeline {
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
  std::string denoiser_component() const override { return "network"; }
  absl::StatusOr<std::shared_ptr<const latentd::Run>> Prepare(GenerateParams params) const override {
    if (!params.width) params.width = 8;
    if (!params.height) params.height = 8;
    if (!params.steps) params.steps = defaults_.steps;
    return std::make_shared<const NoopRun>(std::move(params));
  }

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
