#include "server/runtime/conditioning_key.h"

#include "absl/strings/str_cat.h"
#include "cache/base/sha256.h"

namespace latentd {

ModelKey ConditioningKey(const OpenModel& model, const std::string& component, const GenerateParams& params,
                         const std::vector<ConditioningSource>& sources, PatchMode mode) {
  std::string all = model.pipeline->EncodeKey(component, params);
  for (const ConditioningSource& source : sources) {
    absl::StrAppend(&all, "\n", source.lora.ToString(), "*", source.strength, "/", static_cast<int>(mode));
  }
  return {model.id, absl::StrCat("conditioning/", component, "/", Sha256Hex(all).substr(0, 32))};
}

}  // namespace latentd
