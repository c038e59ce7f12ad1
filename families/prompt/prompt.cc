#include "families/prompt/prompt.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

bool InRange(double weight, double lowest = 0) { return weight >= lowest && weight <= kMaxPromptWeight; }

// `lowest`: of a fragment.
absl::Status CheckWeights(const ParsedPrompt& prompt, double lowest, absl::string_view field) {
  auto refuse = [&](double weight) {
    return FieldError(field, absl::StrCat("has a weight of ", weight, "; weights are from ", lowest, " to ",
                                          kMaxPromptWeight));
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
        if (!InRange(fragment.weight, lowest)) return refuse(fragment.weight);
      }
    }
  }
  return absl::OkStatus();
}

// The first "<lora:…>" of a text; empty when there is none.
absl::string_view LoraTag(absl::string_view text) {
  for (const absl::string_view opening : {"<lora:", "<lyco:", "<hypernet:"}) {
    const size_t begin = text.find(opening);
    if (begin == text.npos) continue;
    const size_t end = text.find('>', begin);
    if (end != text.npos) return text.substr(begin, std::min<size_t>(end + 1 - begin, 80));
  }
  return {};
}

absl::StatusOr<ParsedPrompt> ParseA1111(absl::string_view prompt, absl::string_view field) {
  if (const absl::string_view tag = LoraTag(prompt); !tag.empty()) {
    return FieldError(field, absl::StrCat("holds ", tag,
                                          "; LoRAs are given in the session's or the request's `loras`, "
                                          "with their weights, not in the prompt"));
  }
  return ParseA1111Prompt(prompt, field);
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
  const bool compel = syntax == PromptSyntax::kCompel;
  ASSIGN_OR_RETURN(ParsedPrompt parsed,
                   compel ? ParseCompelPrompt(prompt, field) : ParseA1111(prompt, field));
  RETURN_IF_ERROR(CheckWeights(parsed, compel ? 0 : -kMaxPromptWeight, field));
  return parsed;
}

}  // namespace latentd
