#include "server/lora_set.h"

#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "server/server_core.h"

namespace latentd {
namespace {

constexpr size_t kMaxLoras = 64;
constexpr double kMaxWeight = 1000;

}  // namespace

absl::StatusOr<std::vector<LoraChoice>> ResolveLoras(const std::vector<v1::LoraRef>& refs,
                                                     const Catalog& catalog) {
  if (refs.size() > kMaxLoras) return FieldError("loras", absl::StrCat("at most ", kMaxLoras, " at once"));
  std::vector<LoraChoice> choices;
  std::set<std::string> names;
  for (const v1::LoraRef& ref : refs) {
    const double weight = ref.has_weight() ? ref.weight() : 1.0;
    if (!std::isfinite(weight))
      return FieldError("loras.weight", absl::StrCat("of ", ref.name(), " is not finite"));
    if (std::abs(weight) > kMaxWeight) {
      return FieldError("loras.weight", absl::StrCat("of ", ref.name(), " is beyond ±", kMaxWeight));
    }
    if (!names.insert(ref.name()).second) {
      return FieldError("loras.name", absl::StrCat("'", ref.name(), "' is given twice; add the weights"));
    }
    LoraChoice choice{ref.name(), weight, {}, {}};
    ASSIGN_OR_RETURN(choice.file, catalog.Lora(ref.name()));
    ASSIGN_OR_RETURN(choice.request, choice.file.Request());
    choices.push_back(std::move(choice));
  }
  return choices;
}

absl::StatusOr<PatchMode> PatchModeFromProto(v1::PatchMode mode, const Config& config) {
  switch (mode) {
    case v1::PATCH_MODE_UNSPECIFIED:
      return DefaultPatchMode(config);
    case v1::PATCH_MODE_AUTO:
      return PatchMode::kAuto;
    case v1::PATCH_MODE_DIRECT:
      return PatchMode::kDirect;
    case v1::PATCH_MODE_SIDECAR:
      return PatchMode::kSidecar;
    default:
      return FieldError("patch_mode", absl::StrCat("unknown value ", static_cast<int>(mode)));
  }
}

}  // namespace latentd
