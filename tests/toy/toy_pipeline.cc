#include "tests/toy/toy_pipeline.h"

#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

constexpr int64_t kDim = 4;

class ToyRun;

// What all phases have in common: they count slices, and read one component at a time.
class ToyWork : public PhaseWork {
 public:
  ToyWork(const ToyPipeline& pipeline, const GenerateParams& params, int64_t first_slice, RunState& state)
      : pipeline_(pipeline), params_(params), slice_(first_slice), state_(state) {}

  std::vector<std::string> reads() const override { return {component()}; }

  absl::StatusOr<SliceReport> Slice(const WeightViews& views, const PhaseOptions&) override {
    if (pipeline_.on_slice()) pipeline_.on_slice()(slice_++, component());
    return Do(views[component()]);
  }

 protected:
  virtual std::string component() const = 0;
  virtual absl::StatusOr<SliceReport> Do(const WeightView& view) = 0;

  // [rows, kDim] through the component's matrix; small, whatever it is made of.
  at::Tensor Apply(const WeightView& view, const at::Tensor& x) const {
    return at::tanh(view.Linear(pipeline_.weight(), {}, x.to(view.device(), view.compute_type())))
        .to(at::kCPU, at::kFloat);
  }

  const ToyPipeline& pipeline_;
  const GenerateParams& params_;
  int64_t slice_;
  RunState& state_;
};

// A slice is a reference, of its own size.
class LookWork : public ToyWork {
 public:
  using ToyWork::ToyWork;

 protected:
  std::string component() const override { return "vision"; }
  absl::StatusOr<SliceReport> Do(const WeightView& view) override {
    const at::Tensor& pixels = params_.inputs[seen_].pixels;
    const at::Tensor numbers = pixels.to(at::kFloat).div(255).flatten(0, 1).mean(0);  // [3]
    const double area = static_cast<double>(pixels.size(0) * pixels.size(1)) / 1e4;
    const at::Tensor token = Apply(view, at::cat({numbers, at::full({1}, area)}).unsqueeze(0));
    state_.media_latents = seen_ == 0 ? token : at::cat({state_.media_latents, token});
    return SliceReport{.phase_over = ++seen_ == params_.inputs.size()};
  }

 private:
  size_t seen_ = 0;
};

// A slice is a step; the second expert does the second half of them.
class ExpertsWork : public ToyWork {
 public:
  using ToyWork::ToyWork;
  int64_t step_count() const override { return *params_.steps; }
  at::Tensor latents() const override { return x_; }

 protected:
  std::string component() const override {
    return step_ < (*params_.steps + 1) / 2 ? "expert_high" : "expert_low";
  }
  absl::StatusOr<SliceReport> Do(const WeightView& view) override {
    if (!x_.defined()) {
      x_ = at::full({kToySide, kDim}, static_cast<double>(params_.seeds[0] % 7) / 7);
      if (state_.media_latents.defined()) x_ = x_ + state_.media_latents.sum(0, /*keepdim=*/true);
    }
    x_ = x_ + Apply(view, x_);
    SliceReport report;
    report.step = StepReport{.index = ++step_, .count = *params_.steps, .sigma = 1};
    report.phase_over = step_ == *params_.steps;
    if (report.phase_over) state_.latents = x_.view({1, 1, kToySide, kDim});
    return report;
  }

 private:
  int64_t step_ = 0;
  at::Tensor x_;
};

// A slice is a chunk of rows.
class ChunksWork : public ToyWork {
 public:
  using ToyWork::ToyWork;

 protected:
  std::string component() const override { return "decoder"; }
  absl::StatusOr<SliceReport> Do(const WeightView& view) override {
    const int64_t rows = kToySide / kToyChunks;
    const at::Tensor y = Apply(view, state_.latents.view({kToySide, kDim}).narrow(0, chunk_ * rows, rows));
    chunks_.push_back(
        y.narrow(1, 0, 3).unsqueeze(1).expand({rows, kToySide, 3}).add(1).mul(127).to(at::kByte));
    if (++chunk_ < kToyChunks) return SliceReport{};
    state_.pictures.push_back(at::cat(chunks_).contiguous());
    return SliceReport{.phase_over = true};
  }

 private:
  int64_t chunk_ = 0;
  std::vector<at::Tensor> chunks_;
};

class ToyRun : public Run {
 public:
  ToyRun(const ToyPipeline& pipeline, GenerateParams params) : Run(std::move(params)), pipeline_(pipeline) {
    const auto references = static_cast<int64_t>(params_.inputs.size());
    if (references > 0) {
      phases_.push_back({.kind = PhaseKind::kEncodeMedia, .components = {"vision"}, .units = references});
    }
    phases_.push_back(
        {.kind = PhaseKind::kDenoise, .components = {"expert_high", "expert_low"}, .units = *params_.steps});
    phases_.push_back({.kind = PhaseKind::kDecode, .components = {"decoder"}, .units = kToyChunks});
  }

  std::string OutputKey(size_t) const override { return ""; }
  int64_t OutputBytes(size_t) const override { return 0; }
  int64_t WorkingBytes(size_t, const std::string&, const PhaseOptions&) const override { return 1 << 16; }
  std::string ShapeKey(size_t, const std::string& component) const override { return component; }

  absl::StatusOr<std::unique_ptr<PhaseWork>> Begin(size_t phase, RunState& state) const override {
    int64_t before = 0;
    for (size_t i = 0; i < phase; ++i) before += phases_[i].units;
    switch (phases_[phase].kind) {
      case PhaseKind::kEncodeMedia:
        return std::make_unique<LookWork>(pipeline_, params_, before, state);
      case PhaseKind::kDenoise:
        return std::make_unique<ExpertsWork>(pipeline_, params_, before, state);
      default:
        return std::make_unique<ChunksWork>(pipeline_, params_, before, state);
    }
  }

 private:
  const ToyPipeline& pipeline_;
};

}  // namespace

ToyPipeline::ToyPipeline(const std::string& folder, std::function<void(int64_t, const std::string&)> on_slice)
    : on_slice_(std::move(on_slice)) {
  defaults_.width = defaults_.height = kToySide;
  defaults_.steps = 4;
  for (const char* name : kToyComponents) {
    auto layout = std::make_shared<ComponentLayout>();
    weight_ = layout->Add("proj.weight", {kDim, kDim});
    Component component;
    component.name = name;
    component.layout = layout;
    component.files = *WeightFiles::Open(absl::StrCat(folder, "/", name, ".safetensors"));
    component.patch_target = PatchTarget{
        .component = name,
        .layout = layout,
        .key_maps = {},
        .dotted_prefixes = {absl::StrCat(name, "."), absl::StartsWith(name, "expert") ? "expert." : "-"},
        .flat_prefixes = {}};
    components_.push_back(std::move(component));
  }
}

RequestUses ToyPipeline::MakeUses() const {
  RequestUses uses = UsesOf(defaults_, 8, {});
  uses.media = {{.role = MediaRole::kReference, .most = 3}};
  return uses;
}

absl::StatusOr<std::shared_ptr<const Run>> ToyPipeline::Prepare(GenerateParams params) const {
  RETURN_IF_ERROR(CheckUses(params, uses(), "toy"));
  params.width = params.height = kToySide;
  if (!params.steps) params.steps = defaults_.steps;
  if (params.seeds.empty()) params.seeds = {0};
  return std::make_shared<const ToyRun>(*this, std::move(params));
}

}  // namespace latentd
