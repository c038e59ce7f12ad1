// What the golden tests share: the cases that generate.py wrote, models to run them on, and the comparison.
#ifndef LATENTD_TESTS_GOLDENS_GOLDEN_H_
#define LATENTD_TESTS_GOLDENS_GOLDEN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "cache/weights/weight_files.h"
#include "families/family.h"
#include "patcher/layer_patcher.h"
#include "patcher/overlay.h"

namespace latentd {

// Largest difference of a block, and of a whole run, as a share of the oracle's largest value.
inline constexpr double kBlockTolerance = 1e-4;
inline constexpr double kRunTolerance = 1e-3;

// The folder of the goldens; `below` is appended.
std::string GoldenPath(const std::string& below);

// One case. Whatever is missing is an exception, which fails the test that asks: the generator and the tests
// belong together.
class Golden {
 public:
  // False for cases that are there only sometimes (the demo model's).
  static bool Exists(const std::string& name);
  explicit Golden(const std::string& name);

  at::Tensor operator[](const std::string& name) const;
  bool Has(const std::string& name) const { return files_->tensors().count(name) != 0; }
  std::string Text(const std::string& name) const;
  std::vector<int64_t> Ints(const std::string& name) const;
  bool HasSetting(const std::string& key) const { return files_->metadata().count(key) != 0; }
  std::string Setting(const std::string& key) const;
  int64_t Int(const std::string& key) const { return std::stoll(Setting(key)); }
  double Double(const std::string& key) const { return std::stod(Setting(key)); }

 private:
  std::string name_;
  std::shared_ptr<const WeightFiles> files_;
};

// max |a − b| / max |b|; infinite where the shapes differ or `a` is not finite.
double RelativeError(const at::Tensor& a, const at::Tensor& b);

// Prints the error, so that a log shows how far from the tolerance it is, and returns it.
double Report(const std::string& what, double error);

// All weights of a component.
std::shared_ptr<const WeightSet> Load(const Component& component);
std::shared_ptr<const WeightSet> Load(const std::string& path, std::shared_ptr<const ComponentLayout> layout,
                                      const KeyMap* key_map = nullptr, const std::string& prefix = "");

// Detects the family and opens the model.
std::unique_ptr<Pipeline> OpenModel(const ModelFiles& files);

// Working memory by component, of the phase that takes the most. REQUIRES: the request is one for the model.
std::map<std::string, int64_t> WorkingBytesOf(const Pipeline& pipeline, const GenerateParams& params);

struct RunResult {
  std::vector<at::Tensor> latents;  // after each step, [N, C, h, w]
  std::vector<at::Tensor> pixels;   // uint8 [H, W, 3] of each picture
  Conditioning conditioning;
};
// By component; those without one have no patches.
using Overlays = std::map<std::string, std::shared_ptr<const Overlay>>;
// Of one LoRA file, for all components.
Overlays ApplyLora(const Pipeline& pipeline, const std::string& path, double weight, PatchMode mode);
// A whole generation, phase by phase, as the server runs it, with weights and overlays on the device that
// LATENTD_GOLDEN_DEVICE names ("cuda:0", "sim:0=1GiB"), in host memory without it. Results are in host
// memory.
RunResult Generate(const Pipeline& pipeline, GenerateParams params, const Overlays& overlays = {},
                   std::vector<std::shared_ptr<const TextEmbedding>> embeddings = {},
                   at::ScalarType compute = at::kFloat);

}  // namespace latentd

#endif  // LATENTD_TESTS_GOLDENS_GOLDEN_H_
