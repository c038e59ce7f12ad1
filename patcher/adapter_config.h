// What the header of a LoRA file says of the strength of its layers, where diffusers wrote it.
//
// peft keeps alpha in a config, not in a tensor. Since 0.34 diffusers writes that config into the header, as
// JSON under "lora_adapter_metadata": {"transformer.r": 8, "transformer.lora_alpha": 2, …}, a prefix for each
// component, or none where the file is of one component and names its layers without a prefix. A layer's
// strength is alpha / r, or alpha / √r with use_rslora, where rank_pattern and alpha_pattern may give it
// another r or alpha: regular expressions of Python, to match the end of the module's path from a dot on; the
// first that does, in the order of the file (peft, get_pattern_key in peft/utils/other.py).
//
// Where the two disagree: an alpha among a layer's tensors goes before the header, of a component that the
// header does not name nothing is known, and a rank that is not that of the tensors is refused, as by peft.
#ifndef LATENTD_PATCHER_ADAPTER_CONFIG_H_
#define LATENTD_PATCHER_ADAPTER_CONFIG_H_

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "patcher/layers/patch_layer.h"

namespace latentd {

// Immutable; any thread.
class AdapterConfig {
 public:
  // `metadata` is a file's. A file without a config has one that says nothing. Errors: INVALID_ARGUMENT
  // INVALID_LORA for what is no such JSON, a number that is none, a pattern that is no regular expression.
  static absl::StatusOr<AdapterConfig> Parse(const std::map<std::string, std::string>& metadata);

  AdapterConfig();
  ~AdapterConfig();
  AdapterConfig(AdapterConfig&&) noexcept;
  AdapterConfig& operator=(AdapterConfig&&) noexcept;

  // Sets the strength of a layer that has no alpha of its own. Errors: INVALID_ARGUMENT INVALID_LORA, naming
  // the layer, for another rank than that of its tensors, and for a pattern that takes too long to match.
  absl::Status SetScale(PatchLayer& layer) const;

 private:
  struct Component;
  // By the prefix of layers' names: "transformer."; "" for all others.
  std::map<std::string, std::unique_ptr<const Component>, std::greater<>> components_;
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_ADAPTER_CONFIG_H_
