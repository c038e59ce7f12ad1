#include "tests/bench/bench_model.h"

#include <utility>

#include "ATen/ATen.h"
#include "cache/weights/host_tensor.h"
#include "patcher/model_patch.h"

namespace latentd::bench {

LoadContext PlainLoad() {
  return LoadContext([] { return false; }, [](int64_t, int64_t) {});
}

std::unique_ptr<Pipeline> OpenPipeline(const std::string& folder) {
  ModelFiles files;
  files.name = folder;
  files.folder = folder;
  for (const Family* family : AllFamilies()) {
    if (family->Detect(files)) return OrDie(family->Open(files));
  }
  return OrDie<std::unique_ptr<Pipeline>>(absl::NotFoundError("no family knows " + folder));
}

BenchModel::BenchModel(BenchHost* host, const std::string& folder, const std::string& inputs)
    : host_(host), pipeline_(OpenPipeline(folder)) {
  for (const Component& c : pipeline_->components()) {
    if (!c.patch_target) continue;
    targets_.push_back(*c.patch_target);
    weights_[c.name] = OrDie(LoadWeights(c.files, c.layout, c.key_map, c.prefix, PlainLoad()));
  }
  const auto files = OrDie(WeightFiles::Open(inputs));
  for (const auto& [name, entry] : files->tensors()) inputs_[name] = OrDie(files->Read(name));
  DropLoras();
}

void BenchModel::Begin(int64_t side, int64_t steps) {
  GenerateParams params;
  params.width = side;
  params.height = side;
  params.steps = steps;
  params.seeds = {0};
  params.noise = inputs_.at("noise");
  params.guidance = 3.5;
  params.max_sequence_length = inputs_.at("t5").size(1);
  run_ = OrDie(pipeline_->Prepare(std::move(params)));
  state_.conditioning = {{"t5", inputs_.at("t5")}, {"pooled", inputs_.at("pooled")}};
  size_t phase = 0;
  while (run_->phases()[phase].kind != PhaseKind::kDenoise) ++phase;
  work_ = OrDie(run_->Begin(phase, state_));
}

Elapsed BenchModel::Step() {
  const WeightView& view = *views_.at(pipeline_->denoiser_component());
  const WeightViews views(pipeline_->denoiser_component(), view);
  const Stopwatch watch;
  OrDie(work_->Slice(views, {}));
  return watch.elapsed();
}

std::vector<float> BenchModel::Latents() const {
  const at::Tensor flat = work_->latents().to(at::kFloat).contiguous();
  const float* data = flat.const_data_ptr<float>();
  return {data, data + flat.numel()};
}

LockRequest BenchModel::RequestFor(const std::string& file) {
  if (const auto it = loras_.find(file); it != loras_.end()) return it->second;
  const auto files = OrDie(WeightFiles::Open(file));
  LockRequest request{
      {file, ""},
      {"lora", files->tensor_bytes(),
       [files](const LoadContext& context) -> absl::StatusOr<std::shared_ptr<const Resource>> {
         auto patch = ModelPatch::Load(files, context);
         if (!patch.ok()) return patch.status();
         return *patch;
       }}};
  resident_.push_back(OrDie(host_->cache.Lock(request.key, request.loader, {.owner = "bench"})));
  return loras_.emplace(file, std::move(request)).first->second;
}

Elapsed BenchModel::SwitchLoras(const std::vector<std::string>& files, PatchMode mode, bool keep_merged) {
  std::vector<LockRequest> requests;
  for (const std::string& file : files) requests.push_back(RequestFor(file));
  const Stopwatch watch;
  std::vector<LockHandle> handles = OrDie(host_->cache.LockAll(requests, {.owner = "session"}));
  std::vector<PatchReport> reports;
  for (size_t i = 0; i < files.size(); ++i)
    reports.push_back(OrDie(LayerPatcher::Match(handles[i].As<ModelPatch>(), files[i], 1, targets_)));
  for (const PatchTarget& target : targets_) {
    const WeightSet& weights = *weights_.at(target.component);
    std::vector<PatchSpec> specs(files.size());
    for (size_t i = 0; i < files.size(); ++i) {
      specs[i].name = files[i];
      specs[i].match = reports[i].match;
      specs[i].handle = handles[i].Share();
      specs[i].patch = std::static_pointer_cast<const ModelPatch>(specs[i].handle.resource());
    }
    ApplyOptions options{.mode = mode, .device = &host_->device, .owner = "session"};
    if (keep_merged) {
      options.cache = &host_->cache;
      options.component = {"model", target.component};
    }
    auto overlay = OrDie(LayerPatcher::Apply(weights, target, std::move(specs), options));
    views_[target.component] = std::make_unique<WeightView>(weights, overlay.get());
    overlays_[target.component] = std::move(overlay);
  }
  session_ = std::move(handles);
  return watch.elapsed();
}

Elapsed BenchModel::CopyWeights() const {
  const WeightSet& weights = *weights_.at(pipeline_->denoiser_component());
  std::vector<at::Tensor> copies;
  const Stopwatch watch;
  for (size_t i = 0; i < weights.layout().tensors().size(); ++i) {
    const at::Tensor& weight = weights[Slot{static_cast<int32_t>(i)}].data;
    if (weight.dim() != 2) continue;
    copies.push_back(EmptyHostTensor(weight.sizes(), weight.options()));
    copies.back().copy_(weight);
  }
  return watch.elapsed();
}

void BenchModel::DropLoras() {
  for (const auto& [name, weights] : weights_) views_[name] = std::make_unique<WeightView>(*weights, nullptr);
  overlays_.clear();
  session_.clear();
  host_->cache.Drop({"model", ""});
}

int64_t BenchModel::MoveToDevice(bool stream, double bandwidth) {
  DropLoras();
  const std::string& name = pipeline_->denoiser_component();
  const WeightSet& host = *weights_.at(name);
  const std::vector<ResourceBlock> blocks = host.device_blocks();
  const ResidencyPlan plan = PlanResidency(blocks, stream ? 0 : MemoryBudget::kUnlimited, 2);
  views_.erase(name);
  stream_ = nullptr;
  on_sim_ = nullptr;
  sim_ = std::make_unique<SimDevice>(
      SimDevice::Options{.memory_bytes = MemoryBudget::kUnlimited, .bandwidth = stream ? bandwidth : 0});
  on_sim_ = OrDie(host.CopyTo(*sim_, plan.resident, nullptr, {}));
  int64_t streamed = 0;
  for (size_t i = 0; i < blocks.size(); ++i) streamed += plan.resident[i] ? 0 : blocks[i].bytes;
  if (plan.streams()) {
    auto source = [&host](Slot slot) -> const at::Tensor& { return host[slot].data; };
    stream_ = OrDie(WeightStream::Create(host, source, plan, *sim_));
  }
  views_[name] = std::make_unique<WeightView>(static_cast<const WeightSet&>(*on_sim_), nullptr, at::kFloat,
                                              stream_.get());
  return streamed;
}

}  // namespace latentd::bench
