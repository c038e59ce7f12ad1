#include "patcher/adapter_config.h"

#include <cmath>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cache/base/bounded_json.h"
#include "cache/base/error.h"
#include "nlohmann/json.hpp"
#include "patcher/module_pattern.h"
#include "patcher/patch_keys.h"

namespace latentd {
namespace {

using Json = nlohmann::ordered_json;  // patterns are tried in the order of the file

constexpr char kKey[] = "lora_adapter_metadata";
constexpr size_t kMaxText = 16 << 20;
constexpr double kMaxNumber = 1e9;

// peft's, for what a config leaves out.
constexpr double kDefaultRank = 8, kDefaultAlpha = 8;

absl::Status Invalid(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_LORA",
                   absl::StrCat(kKey, " in the file's header ", what));
}

absl::StatusOr<double> Number(absl::string_view field, const Json& value) {
  if (value.is_number()) {
    const auto number = value.get<double>();
    if (std::isfinite(number) && std::abs(number) <= kMaxNumber) return number;
  }
  return Invalid(absl::StrCat("has a ", field, " that is no number"));
}

struct Override {
  ModulePattern pattern;
  double value;
};

absl::StatusOr<std::vector<Override>> Overrides(absl::string_view field, const Json& value) {
  std::vector<Override> overrides;
  if (value.is_null()) return overrides;
  if (!value.is_object()) return Invalid(absl::StrCat("has a ", field, " that is no object"));
  for (const auto& [text, number] : value.items()) {
    auto pattern = ModulePattern::Compile(text);
    if (!pattern.ok()) return Invalid(absl::StrCat("has a ", field, " that ", pattern.status().message()));
    ASSIGN_OR_RETURN(const double is, Number(field, number));
    overrides.push_back({*std::move(pattern), is});
  }
  return overrides;
}

}  // namespace

struct AdapterConfig::Component {
  std::optional<double> rank, alpha;
  bool rank_stabilised = false;
  std::vector<Override> ranks, alphas;

  absl::Status Set(absl::string_view field, const Json& value) {
    if (field == "r") {
      ASSIGN_OR_RETURN(rank, Number(field, value));
    } else if (field == "lora_alpha" || field == "alpha") {  // "alpha": LoKr's and LoHa's
      ASSIGN_OR_RETURN(alpha, Number(field, value));
    } else if (field == "use_rslora") {
      if (!value.is_boolean()) return Invalid("has a use_rslora that is not true or false");
      rank_stabilised = value.get<bool>();
    } else if (field == "rank_pattern") {
      ASSIGN_OR_RETURN(ranks, Overrides(field, value));
    } else if (field == "alpha_pattern") {
      ASSIGN_OR_RETURN(alphas, Overrides(field, value));
    }
    return absl::OkStatus();
  }

  // The first that matches the module, or the config's own.
  static absl::StatusOr<double> Find(const std::vector<Override>& overrides, absl::string_view module,
                                     double otherwise) {
    // Files from before transformers 5 put this before what is in CLIP.
    const absl::string_view bare = absl::StripPrefix(module, "text_model.");
    for (const Override& o : overrides) {
      for (const absl::string_view name : {module, bare}) {
        ASSIGN_OR_RETURN(const bool matches, o.pattern.Matches(name));
        if (matches) return o.value;
        if (bare.size() == module.size()) break;
      }
    }
    return otherwise;
  }
};

AdapterConfig::AdapterConfig() = default;
AdapterConfig::~AdapterConfig() = default;
AdapterConfig::AdapterConfig(AdapterConfig&&) noexcept = default;
AdapterConfig& AdapterConfig::operator=(AdapterConfig&&) noexcept = default;

absl::StatusOr<AdapterConfig> AdapterConfig::Parse(const std::map<std::string, std::string>& metadata) {
  AdapterConfig config;
  const auto text = metadata.find(kKey);
  if (text == metadata.end() || text->second.empty()) return config;
  if (text->second.size() > kMaxText) return Invalid("is longer than 16 MiB");
  const Json json = Json::parse(WithoutPythonsNumbers(text->second), nullptr, /*allow_exceptions=*/false);
  if (json.is_null()) return config;
  if (!json.is_object()) return Invalid("is no JSON object");
  std::map<std::string, std::unique_ptr<Component>> components;
  for (const auto& [key, value] : json.items()) {
    const size_t dot = key.rfind('.');
    const size_t field = dot == std::string::npos ? 0 : dot + 1;
    std::unique_ptr<Component>& component = components[key.substr(0, field)];
    if (component == nullptr) component = std::make_unique<Component>();
    RETURN_IF_ERROR(component->Set(absl::string_view(key).substr(field), value));
  }
  for (auto& [prefix, component] : components) config.components_.emplace(prefix, std::move(component));
  return config;
}

absl::Status AdapterConfig::SetScale(PatchLayer& layer) const {
  if (layer.has_alpha || !layer.has_scale()) return absl::OkStatus();
  for (const auto& [prefix, component] : components_) {  // longer prefixes before those that begin them
    if (!absl::StartsWith(layer.name, prefix)) continue;
    const absl::string_view module = absl::string_view(layer.name).substr(prefix.size());
    const auto rank = Component::Find(component->ranks, module, component->rank.value_or(kDefaultRank));
    if (!rank.ok()) return InvalidLayer(layer.name, rank.status().message());
    const auto alpha = Component::Find(component->alphas, module, component->alpha.value_or(kDefaultAlpha));
    if (!alpha.ok()) return InvalidLayer(layer.name, alpha.status().message());
    // Factors of a Kronecker product are full, or of another rank, where that is smaller.
    if (!layer.is_kronecker() && *rank != static_cast<double>(layer.rank())) {
      return InvalidLayer(layer.name, absl::StrCat("is of rank ", layer.rank(), ", where ", kKey,
                                                   " in the file's header says ", *rank));
    }
    if (*rank <= 0)
      return InvalidLayer(layer.name, absl::StrCat("is of rank ", *rank, " by the file's header"));
    layer.SetScale(*alpha / (component->rank_stabilised ? std::sqrt(*rank) : *rank));
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

}  // namespace latentd
