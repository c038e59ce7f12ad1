// Where a LoRA finds its layers: one component of a model as patches name it.
#ifndef LATENTD_PATCHER_PATCH_TARGET_H_
#define LATENTD_PATCHER_PATCH_TARGET_H_

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cache/weights/component_layout.h"
#include "cache/weights/key_map.h"

namespace latentd {

class LayerResolver;
struct PatchTarget;

// The tables of names of a target, made by the first who asks. Thread-safe.
class LazyResolver {
 public:
  LazyResolver();
  ~LazyResolver();
  const LayerResolver& Get(const PatchTarget& target);

 private:
  std::once_flag once_;
  std::unique_ptr<const LayerResolver> resolver_;
};

// Filled in by the family; data only. Key maps live as long as the program.
struct PatchTarget {
  std::string component;  // "transformer"
  std::shared_ptr<const ComponentLayout> layout;

  // Layouts that LoRA files for this component use besides the canonical one.
  std::vector<const KeyMap*> key_maps;

  // What stands before a module path with dots ("transformer.", "diffusion_model."). "" = bare paths.
  std::vector<std::string> dotted_prefixes;

  // Weights whose input a patch may grow, by tensor name: the new columns begin as zeros. Control LoRAs bring
  // channels of their own to the input layer.
  std::vector<std::string> growable = {};

  // What stands before a module path whose dots became underscores ("lora_unet_", "lora_te1_").
  std::vector<std::string> flat_prefixes;

  // Which tensors a layer's name means. Made once for the target and its copies: from the first call on, the
  // fields above stay as they are.
  const LayerResolver& resolver() const { return lazy_resolver->Get(*this); }

  // Only for resolver().
  std::shared_ptr<LazyResolver> lazy_resolver = std::make_shared<LazyResolver>();
};

}  // namespace latentd

#endif  // LATENTD_PATCHER_PATCH_TARGET_H_
