#include "patcher/block_weights.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace latentd {
namespace {

// What is left of `text` behind a leading `path`; false where it does not lead, or ends inside a segment.
bool ConsumePath(absl::string_view* text, absl::string_view path) {
  absl::string_view rest = *text;
  if (!absl::ConsumePrefix(&rest, path)) return false;
  if (!rest.empty() && !absl::ConsumePrefix(&rest, ".")) return false;
  *text = rest;
  return true;
}

}  // namespace

bool LiesBelow(absl::string_view path, absl::string_view component, absl::string_view tensor) {
  if (!ConsumePath(&path, component)) return false;
  return path.empty() || ConsumePath(&tensor, path);
}

double BlockFactor(const BlockWeights& blocks, absl::string_view component, absl::string_view tensor) {
  size_t longest = 0;
  double factor = 1;
  for (const auto& [path, value] : blocks) {
    if (path.size() <= longest || !LiesBelow(path, component, tensor)) continue;
    longest = path.size();
    factor = value;
  }
  return factor;
}

std::string StrengthText(double weight, const BlockWeights& blocks, absl::string_view component) {
  std::string text = absl::StrFormat("%.17g", weight);
  std::string factors;
  for (const auto& [path, value] : blocks) {
    absl::string_view rest = path;
    if (!ConsumePath(&rest, component)) continue;
    absl::StrAppend(&factors, factors.empty() ? "" : ",", path, "=", absl::StrFormat("%.17g", value));
  }
  return factors.empty() ? text : absl::StrCat(text, "[", factors, "]");
}

}  // namespace latentd
