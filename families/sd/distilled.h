// Checkpoints that were distilled to need few steps, told by their names.
//
// A distilled checkpoint has the tensors of the model that it was made from, and a checkpoint in one file
// brings no scheduler that would say it. What says it is the title in the file's header
// ("modelspec.title", of Stability's model spec) and the file's name, which people keep, since they go by it
// themselves.
#ifndef LATENTD_FAMILIES_SD_DISTILLED_H_
#define LATENTD_FAMILIES_SD_DISTILLED_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace latentd {

// What such a checkpoint is drawn with where nobody says otherwise, as its makers' model card has it.
struct Distilled {
  std::string variant;   // "lightning", "turbo", "hyper", "lcm", "dmd2"
  std::string sampler;   // empty: its base's
  int64_t steps = 4;     // "8step" in the name: 8
  bool trailing = true;  // timesteps end at the last one of training, whatever the base's scheduler says
};

// Of a title or a name. Case does not matter; "lcm" and "dmd2" are words of their own.
std::optional<Distilled> DistilledByName(absl::string_view name);

// The header's title first, then the file's name.
std::optional<Distilled> FindDistilled(const std::map<std::string, std::string>& header,
                                       absl::string_view path);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_DISTILLED_H_
