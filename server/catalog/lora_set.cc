#include "server/catalog/lora_set.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "server/rpc/request_bounds.h"
#include "server/server_core.h"

namespace latentd {
namespace {

constexpr double kMaxWeight = 1000;
constexpr int kMaxBlocks = 1024, kMaxOnly = 16;

absl::Status CheckWeight(absl::string_view field, absl::string_view of, double weight) {
  if (std::abs(weight) <= kMaxWeight) return absl::OkStatus();
  return FieldError(field,
                    absl::StrCat("of ", of, std::isfinite(weight) ? " is beyond ±1000" : " is not finite"));
}

}  // namespace

absl::StatusOr<std::vector<LoraChoice>> ResolveLoras(const std::vector<v1::LoraRef>& refs,
                                                     const Catalog& catalog) {
  if (refs.size() > static_cast<size_t>(kMaxLoras))
    return FieldError("loras", absl::StrCat("at most ", kMaxLoras, " at once"));
  std::vector<LoraChoice> choices;
  std::set<std::string> names;
  for (const v1::LoraRef& ref : refs) {
    LoraChoice choice;
    choice.name = ref.name();
    choice.weight = ref.has_weight() ? ref.weight() : 1.0;
    RETURN_IF_ERROR(CheckWeight("loras.weight", ref.name(), choice.weight));
    if (ref.block_weights_size() > kMaxBlocks) {
      return FieldError("loras.block_weights", absl::StrCat("of ", ref.name(), ": at most ", kMaxBlocks));
    }
    for (const auto& [path, factor] : ref.block_weights()) {
      RETURN_IF_ERROR(CheckWeight("loras.block_weights", absl::StrCat(ref.name(), ", ", path), factor));
      choice.blocks[path] = factor;
    }
    if (ref.only_size() > kMaxOnly)
      return FieldError("loras.only", absl::StrCat("of ", ref.name(), ": at most ", kMaxOnly));
    choice.only.assign(ref.only().begin(), ref.only().end());
    if (ref.has_start()) choice.start = ref.start();
    if (ref.has_end()) choice.end = ref.end();
    if (!(choice.start >= 0 && choice.start < choice.end && choice.end <= 1)) {  // NaN fails too
      return FieldError("loras.start",
                        absl::StrCat("and end of ", ref.name(), " must be 0 ≤ start < end ≤ 1; they are ",
                                     choice.start, " and ", choice.end));
    }
    if (!names.insert(ref.name()).second) {
      return FieldError("loras.name", absl::StrCat("'", ref.name(), "' is given twice; add the weights"));
    }
    ASSIGN_OR_RETURN(choice.file, catalog.Lora(ref.name()));
    ASSIGN_OR_RETURN(choice.request, choice.file.Request());
    choices.push_back(std::move(choice));
  }
  return choices;
}

int64_t GrownInputs(const PatchReport& report) {
  int64_t inputs = 0;
  if (report.weight == 0) return inputs;
  for (const auto& [weight, columns] : report.grown) inputs = std::max(inputs, columns);
  return inputs;
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
