#include "families/text/prompt.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/error.h"

namespace latentd {
namespace {

bool InRange(double weight) { return weight >= 0 && weight <= kMaxPromptWeight; }

absl::Status CheckWeights(const ParsedPrompt& prompt, absl::string_view field) {
  auto refuse = [&](double weight) {
    return FieldError(field,
                      absl::StrCat("has a weight of ", weight, "; weights are from 0 to ", kMaxPromptWeight));
  };
  for (const PromptPart& part : prompt.parts) {
    if (!InRange(part.weight)) return refuse(part.weight);
    double sum = 0;
    for (const double share : part.blend) {
      if (!InRange(share < 0 ? -share : share)) return refuse(share);  // a blend may go away from a text
      sum += share;
    }
    if (part.normalize && sum == 0) return FieldError(field, "blends with weights that sum to 0");
    for (const PromptText& text : part.texts) {
      for (const PromptFragment& fragment : text) {
        if (!InRange(fragment.weight)) return refuse(fragment.weight);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

ParsedPrompt SinglePrompt(PromptText text) {
  if (text.empty()) text.push_back({});
  PromptPart part;
  part.texts.push_back(std::move(text));
  part.blend = {1};
  return {{std::move(part)}};
}

absl::StatusOr<ParsedPrompt> ParsePrompt(absl::string_view prompt, PromptSyntax syntax,
                                         absl::string_view field) {
  if (syntax == PromptSyntax::kPlain) return SinglePrompt({{std::string(prompt), 1, false}});
  absl::StatusOr<ParsedPrompt> parsed =
      syntax == PromptSyntax::kCompel ? ParseCompelPrompt(prompt, field) : ParseA1111Prompt(prompt, field);
  RETURN_IF_ERROR(parsed.status());
  RETURN_IF_ERROR(CheckWeights(*parsed, field));
  return parsed;
}

}  // namespace latentd
