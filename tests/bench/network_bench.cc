#include "tests/bench/network_bench.h"

#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>

#include "ATen/ATen.h"
#include "cache/weights/weight_set.h"
#include "families/open_model.h"
#include "families/sd/sd_lora.h"
#include "families/sd/unet.h"
#include "families/vae/autoencoder_kl.h"
#include "patcher/layer_patcher.h"
#include "patcher/weight_view.h"

namespace latentd::bench {
namespace {

class Network : public NetworkBench {
 public:
  explicit Network(Component c)
      : component_(std::move(c)),
        weights_(OrDie(LoadWeights(component_.files, component_.layout, component_.key_map, component_.prefix,
                                   PlainLoad()))) {
    SetLora("");
  }

  void SetInputs(const std::string& file) override {
    c10::InferenceMode inference;
    const auto files = OrDie(WeightFiles::Open(file));
    for (const auto& [name, entry] : files->tensors()) inputs_[name] = OrDie(files->Read(name));
    Prepare();
  }

  void SetLora(const std::string& file) override {
    c10::InferenceMode inference;
    overlay_ = nullptr;
    if (!file.empty()) {
      std::vector<PatchSpec> specs(1);
      specs[0].name = file;
      specs[0].patch = OrDie(ModelPatch::Load(OrDie(WeightFiles::Open(file)), PlainLoad()));
      overlay_ = OrDie(LayerPatcher::Apply(*weights_, component_.patch_target.value(), std::move(specs),
                                           {.mode = PatchMode::kSidecar}));
    }
    view_.emplace(*weights_, overlay_.get());
  }

  Elapsed Call() override {
    c10::InferenceMode inference;
    const Stopwatch watch;
    result_ = Forward();
    const Elapsed elapsed = watch.elapsed();
    if (!in_slices_) longest_slice_ = elapsed.wall;
    return elapsed;
  }
  double longest_slice() const override { return longest_slice_; }

  void WriteResult(const std::string& file) const override {
    const at::Tensor flat = result_.to(at::kFloat).contiguous();
    std::ofstream out(file, std::ios::binary);
    out.write(static_cast<const char*>(flat.const_data_ptr()), static_cast<std::streamsize>(flat.nbytes()));
  }

 protected:
  virtual void Prepare() {}
  virtual at::Tensor Forward() = 0;
  const at::Tensor& Input(const std::string& name) const { return inputs_.at(name); }
  const WeightView& view() const { return *view_; }

  double longest_slice_ = 0;
  bool in_slices_ = false;  // Forward measures them

 private:
  const Component component_;
  const std::shared_ptr<const WeightSet> weights_;
  std::shared_ptr<const Overlay> overlay_;
  std::optional<WeightView> view_;
  std::map<std::string, at::Tensor> inputs_;
  at::Tensor result_;
};

class UNetBench : public Network {
 public:
  UNetBench(UNet2DCondition unet, const Component& component) : Network(component), unet_(std::move(unet)) {}

 private:
  // What a run does once.
  void Prepare() override {
    const bool added = unet_.config().added_dim > 0;
    conditioning_ =
        unet_.PrepareConditioning(view(), Input("context"), added ? Input("pooled") : at::Tensor(),
                                  added ? Input("time_ids") : at::Tensor());
    timestep_ = Input("timestep").item<float>();
  }
  at::Tensor Forward() override {
    const at::Tensor time = unet_.TimeEmbedding(view(), timestep_, 1, conditioning_);
    return unet_(view(), Input("latents"), time, conditioning_.context);
  }

  const UNet2DCondition unet_;
  UNetConditioning conditioning_;
  float timestep_ = 0;
};

class VaeBench : public Network {
 public:
  VaeBench(std::shared_ptr<const AutoencoderKl> vae, const Component& component)
      : Network(component), vae_(std::move(vae)) {
    in_slices_ = true;
  }

 private:
  at::Tensor Forward() override {
    AutoencoderKl::Pass pass = vae_->BeginDecode(Input("vae_latents"));
    longest_slice_ = 0;
    for (bool over = false; !over;) {
      const Stopwatch watch;
      over = pass.Slice(view());
      longest_slice_ = std::max(longest_slice_, watch.ms());
    }
    return pass.Take();
  }

  const std::shared_ptr<const AutoencoderKl> vae_;
};

}  // namespace

std::unique_ptr<NetworkBench> OpenUNet(const std::string& folder) {
  UNet2DCondition unet(OrDie(UNetConfig::Load(folder + "/unet/config.json")));
  Component component;
  component.name = "unet";
  component.files = OrDie(WeightFiles::Open(folder + "/unet"));
  component.layout = unet.layout();
  component.patch_target = UNetTarget(unet);
  return std::make_unique<UNetBench>(std::move(unet), component);
}

std::unique_ptr<NetworkBench> OpenVaeDecoder(const std::string& folder) {
  std::shared_ptr<const AutoencoderKl> vae;
  const Component component =
      OrDie(DescribeVae(folder + "/vae", OrDie(WeightFiles::Open(folder + "/vae")), vae));
  return std::make_unique<VaeBench>(std::move(vae), component);
}

int64_t PeakResidentBytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace latentd::bench
