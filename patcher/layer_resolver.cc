#include "patcher/layer_resolver.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

namespace latentd {
namespace {

constexpr absl::string_view kWeight = ".weight";

std::string Flatten(absl::string_view path) { return absl::StrReplaceAll(path, {{".", "_"}}); }

// Longest first: "transformer.diffusion_model." before "transformer.".
std::vector<std::string> LongestFirst(std::vector<std::string> prefixes) {
  std::stable_sort(prefixes.begin(), prefixes.end(),
                   [](const std::string& a, const std::string& b) { return a.size() > b.size(); });
  return prefixes;
}

}  // namespace

LazyResolver::LazyResolver() = default;
LazyResolver::~LazyResolver() = default;

const LayerResolver& LazyResolver::Get(const PatchTarget& target) {
  std::call_once(once_, [&] { resolver_ = std::make_unique<const LayerResolver>(target); });
  return *resolver_;
}

LayerResolver::LayerResolver(const PatchTarget& target)
    : layout_(target.layout),
      key_maps_(target.key_maps),
      dotted_prefixes_(LongestFirst(target.dotted_prefixes)),
      flat_prefixes_(LongestFirst(target.flat_prefixes)) {
  // Native names first: where both layouts flatten to one text, files with underscores mean the native one.
  for (const KeyMap* map : target.key_maps) {
    for (const std::string& module : map->NativeModules(*target.layout))
      flat_.emplace(Flatten(module), module);
  }
  for (const TensorDecl& tensor : target.layout->tensors()) {
    absl::string_view module = tensor.name;
    if (absl::ConsumeSuffix(&module, kWeight)) flat_.emplace(Flatten(module), std::string(module));
  }
}

std::vector<LayerPart> LayerResolver::ResolvePath(absl::string_view path) const {
  const ComponentLayout& layout = *layout_;
  if (Slot slot = layout.Find(std::string(path) + std::string(kWeight))) {
    return {{slot, 0, layout[slot].shape[0], false}};
  }
  for (const KeyMap* map : key_maps_) {
    std::vector<LayerPart> parts;
    for (const KeyPart& part : map->Resolve(path, layout)) {
      if (Slot slot = layout.Find(part.canonical + std::string(kWeight))) {
        parts.push_back({slot, part.row_begin, part.rows, part.transform == KeyTransform::kSwapHalves});
      }
    }
    if (!parts.empty()) return parts;
  }
  return {};
}

std::vector<LayerPart> LayerResolver::Resolve(absl::string_view layer_name) const {
  if (layer_name.find('.') == absl::string_view::npos) {
    for (const std::string& prefix : flat_prefixes_) {
      absl::string_view rest = layer_name;
      if (!absl::ConsumePrefix(&rest, prefix)) continue;
      rest = absl::StripPrefix(rest, "_");  // some exporters write two underscores
      if (auto it = flat_.find(rest); it != flat_.end()) {
        if (auto parts = ResolvePath(it->second); !parts.empty()) return parts;
      }
    }
    // A module at the top level has no dots either ("proj_out" under an empty prefix).
  }
  for (const std::string& prefix : dotted_prefixes_) {
    absl::string_view rest = layer_name;
    if (!absl::ConsumePrefix(&rest, prefix)) continue;
    if (auto parts = ResolvePath(rest); !parts.empty()) return parts;
  }
  return {};
}

}  // namespace latentd
