// How strong a patch is in each part of a model: factors on the user's weight, by path.
//
// A path is a component, or a component and the start of a tensor's name, cut at dots: "transformer",
// "text_encoder", "transformer.single_transformer_blocks.7". Of the paths that a tensor lies below the
// longest counts; below none of them the factor is 1.
#ifndef LATENTD_PATCHER_BLOCK_WEIGHTS_H_
#define LATENTD_PATCHER_BLOCK_WEIGHTS_H_

#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace latentd {

using BlockWeights = std::map<std::string, double>;

// True where `tensor` of `component` lies below `path`.
bool LiesBelow(absl::string_view path, absl::string_view component, absl::string_view tensor);

double BlockFactor(const BlockWeights& blocks, absl::string_view component, absl::string_view tensor);

// A weight and the factors that concern a component, "0.5[transformer.proj_out=0]": equal texts, equal
// strengths there. For names of records.
std::string StrengthText(double weight, const BlockWeights& blocks, absl::string_view component);

}  // namespace latentd

#endif  // LATENTD_PATCHER_BLOCK_WEIGHTS_H_
