#include "patcher/magnitude_names.h"

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"

namespace latentd {
namespace {

struct Prefix {
  absl::string_view text;
  absl::string_view meaning;
};
// What exporters put before a module's path, its dots turned. Longer ones before those that begin them.
constexpr Prefix kPrefixes[] = {
    {"base_model_model_", ""},
    {"model_diffusion_model_", ""},
    {"diffusion_model_", ""},
    {"lora_transformer_", ""},
    {"lora_unet_", ""},
    {"lycoris_", ""},
    {"unet_", ""},
    {"transformer_", ""},
    {"lora_te1_", "te1_"},
    {"lora_te2_", "te2_"},
    {"lora_te_", "te1_"},
    {"text_encoder_2_", "te2_"},
    {"text_encoder_", "te1_"},
};

// What the layers may be called, whoever wrote their names.
std::set<std::string> Spellings(const std::string& name) {
  const std::string flat = absl::StrReplaceAll(name, {{".", "_"}});
  std::set<std::string> spellings = {flat};
  for (const Prefix& p : kPrefixes) {
    if (!absl::StartsWith(flat, p.text)) continue;
    spellings.insert(absl::StrCat(p.meaning, flat.substr(p.text.size())));
    break;
  }
  return spellings;
}

bool IsMagnitude(PatchKey kind) { return kind == PatchKey::kMagnitude || kind == PatchKey::kDoraScale; }

bool IsMagnitudeAlone(const LayerKeys& keys) {
  return keys.by_kind.size() == 1 && IsMagnitude(keys.by_kind.begin()->first) && keys.numbered_blocks.empty();
}

}  // namespace

void JoinMagnitudes(std::map<std::string, LayerKeys>& layers) {
  std::set<std::string> alone;
  for (const auto& [name, keys] : layers) {
    if (IsMagnitudeAlone(keys)) alone.insert(name);
  }
  if (alone.empty()) return;
  std::map<std::string, std::set<std::string>> by_spelling;  // → layers that lack a magnitude
  for (const auto& [name, keys] : layers) {
    if (keys.has(PatchKey::kMagnitude) || keys.has(PatchKey::kDoraScale)) continue;
    for (const std::string& spelling : Spellings(name)) by_spelling[spelling].insert(name);
  }
  std::map<std::string, std::set<std::string>> takers;  // layer → magnitudes that may be its own
  for (const std::string& name : alone) {
    std::set<std::string> meant;
    for (const std::string& spelling : Spellings(name)) {
      if (const auto found = by_spelling.find(spelling); found != by_spelling.end()) {
        meant.insert(found->second.begin(), found->second.end());
      }
    }
    if (meant.size() == 1) takers[*meant.begin()].insert(name);
  }
  for (const auto& [layer, magnitudes] : takers) {
    if (magnitudes.size() != 1) continue;
    layers.at(layer).by_kind.insert(*layers.at(*magnitudes.begin()).by_kind.begin());
    layers.erase(*magnitudes.begin());
  }
}

}  // namespace latentd
