#include "tests/goldens/golden.h"

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <limits>
#include <stdexcept>

#include "ATen/ATen.h"
#include "cache/device.h"
#include "families/compute_type.h"

namespace latentd {
namespace {

[[noreturn]] void Die(const std::string& what) { throw std::runtime_error(what); }

template <typename T>
T OrDie(absl::StatusOr<T> value, const std::string& what) {
  if (!value.ok()) Die(what + ": " + value.status().ToString());
  return *std::move(value);
}

std::string CasePath(const std::string& name) { return GoldenPath("cases/" + name + ".safetensors"); }

// Where runs compute; null for the host.
Device* RunDevice() {
  static Device* const device = []() -> Device* {
    const char* spec = std::getenv("LATENTD_GOLDEN_DEVICE");
    if (spec == nullptr) return nullptr;
    static auto* const ram = new RamBudget(MemoryBudget::kUnlimited);
    Device* const made = OrDie(MakeDevice(spec, ram), spec).release();
    SetTorchForGpus();
    made->BindThread();
    return made;
  }();
  return device;
}

// What `resource` is where runs compute.
template <typename T>
std::shared_ptr<const T> Placed(std::shared_ptr<const T> resource, const std::string& name) {
  if (RunDevice() == nullptr) return resource;
  return std::dynamic_pointer_cast<const T>(OrDie(resource->CopyTo(*RunDevice(), {}, nullptr, {}), name));
}

}  // namespace

std::string GoldenPath(const std::string& below) {
  const char* folder = std::getenv("LATENTD_GOLDENS");
  if (folder == nullptr) Die("LATENTD_GOLDENS does not name the folder of the goldens");
  return std::string(folder) + "/" + below;
}

bool Golden::Exists(const std::string& name) { return std::filesystem::exists(CasePath(name)); }

Golden::Golden(const std::string& name)
    : name_(name), files_(OrDie(WeightFiles::Open(CasePath(name)), name)) {}

at::Tensor Golden::operator[](const std::string& name) const {
  if (!Has(name)) Die(name_ + " has no tensor " + name);
  return OrDie(files_->Read(name), name);
}

std::string Golden::Text(const std::string& name) const {
  const at::Tensor bytes = (*this)[name].contiguous();
  return std::string(static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel()));
}

std::vector<int64_t> Golden::Ints(const std::string& name) const {
  const at::Tensor ids = (*this)[name].to(at::kLong).contiguous();
  const int64_t* data = ids.const_data_ptr<int64_t>();
  return {data, data + ids.numel()};
}

std::string Golden::Setting(const std::string& key) const {
  auto it = files_->metadata().find(key);
  if (it == files_->metadata().end()) Die(name_ + " has no setting " + key);
  return it->second;
}

double RelativeError(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return std::numeric_limits<double>::infinity();
  const at::Tensor difference = (a.to(at::kDouble) - b.to(at::kDouble)).abs().max();
  const double error = difference.item<double>() / b.to(at::kDouble).abs().max().item<double>();
  return error >= 0 ? error : std::numeric_limits<double>::infinity();
}

double Report(const std::string& what, double error) {
  std::printf("  %-44s %.1e\n", what.c_str(), error);
  return error;
}

std::shared_ptr<const WeightSet> Load(const std::string& path, std::shared_ptr<const ComponentLayout> layout,
                                      const KeyMap* key_map, const std::string& prefix) {
  Component component;
  component.name = path;
  component.layout = std::move(layout);
  component.files = OrDie(WeightFiles::Open(path), path);
  component.key_map = key_map;
  component.prefix = prefix;
  return Load(component);
}

std::shared_ptr<const WeightSet> Load(const Component& component) {
  const LoadContext context([] { return false; }, [](int64_t, int64_t) {});
  return OrDie(LoadWeights(component.files, component.layout, component.key_map, component.prefix, context),
               component.name);
}

std::unique_ptr<Pipeline> OpenModel(const ModelFiles& files) {
  for (const Family* family : AllFamilies()) {
    if (family->Detect(files)) return OrDie(family->Open(files), files.name);
  }
  Die("no family knows " + files.name);
}

Overlays ApplyLora(const Pipeline& pipeline, const std::string& path, double weight, PatchMode mode) {
  const LoadContext context([] { return false; }, [](int64_t, int64_t) {});
  const auto patch = OrDie(ModelPatch::Load(OrDie(WeightFiles::Open(path), path), context), path);
  Overlays overlays;
  for (const Component& component : pipeline.components()) {
    if (!component.patch_target) continue;
    std::vector<PatchSpec> specs;
    specs.emplace_back();
    specs.back().name = path;
    specs.back().patch = Placed(patch, path);
    specs.back().weight = weight;
    overlays[component.name] =
        OrDie(LayerPatcher::Apply(*Load(component), *component.patch_target, std::move(specs),
                                  {.mode = mode, .device = RunDevice()}),
              path);
  }
  return overlays;
}

std::map<std::string, int64_t> WorkingBytesOf(const Pipeline& pipeline, const GenerateParams& params) {
  const auto run = pipeline.Prepare(params);
  if (!run.ok()) return {};
  std::map<std::string, int64_t> bytes;
  for (size_t phase = 0; phase < (*run)->phases().size(); ++phase) {
    for (const std::string& component : (*run)->phases()[phase].components) {
      int64_t& most = bytes[component];
      most = std::max(most, (*run)->WorkingBytes(phase, component, {}));
    }
  }
  return bytes;
}

RunResult Generate(const Pipeline& pipeline, GenerateParams params, const Overlays& overlays,
                   std::vector<std::shared_ptr<const TextEmbedding>> embeddings, at::ScalarType compute) {
  std::map<std::string, std::shared_ptr<const WeightSet>> weights;
  std::set<std::string> leaves_fp16;
  for (const Component& component : pipeline.components()) {
    weights[component.name] = Placed(Load(component), component.name);
    if (component.leaves_fp16) leaves_fp16.insert(component.name);
  }
  const auto overlay = [&](const std::string& name) {
    const auto it = overlays.find(name);
    return it == overlays.end() ? nullptr : it->second.get();
  };

  const auto run = OrDie(pipeline.Prepare(std::move(params)), "Prepare");
  RunState state;
  state.embeddings = std::move(embeddings);
  RunResult result;
  for (size_t i = 0; i < run->phases().size(); ++i) {
    if (run->phases()[i].kind == PhaseKind::kDenoise) result.conditioning = state.conditioning;
    const auto work = OrDie(run->Begin(i, state), "Begin");
    for (bool over = false; !over;) {
      std::deque<WeightView> held;
      WeightViews views;
      for (const std::string& name : work->reads()) {
        const at::ScalarType type =
            compute == at::kHalf && leaves_fp16.count(name) != 0 ? at::kFloat : compute;
        views.Add(name, held.emplace_back(*weights.at(name), overlay(name), type));
      }
      const SliceReport report = OrDie(work->Slice(views, {}), "Slice");
      if (report.step) result.latents.push_back(work->latents().to(at::kCPU));
      over = report.phase_over;
    }
  }
  result.pixels = state.pictures;
  return result;
}

}  // namespace latentd
