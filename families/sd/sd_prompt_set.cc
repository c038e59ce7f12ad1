#include "families/sd/sd_prompt_set.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/prompt/embedding_triggers.h"
#include "families/request_checks.h"

namespace latentd {
namespace {

bool IsGuided(const SdPipeline& pipeline, const GenerateParams& params) {
  if (pipeline.parts().unet->config().guidance_dim > 0)
    return false;  // the network is told, and guides itself
  const auto guides = [](double scale) { return scale > 1; };
  if (params.guidance_list.empty()) return guides(*params.guidance);
  return std::any_of(params.guidance_list.begin(), params.guidance_list.end(), guides);
}

// What an encoder is given, with marks in place of embeddings' names.
SdText TextOf(const GenerateParams& params, bool second, bool negative) {
  SdText text;
  text.text = negative ? params.negative_prompt.value_or("") : params.prompt;
  text.field = negative ? "params.negative_prompt" : "params.prompt";
  // An empty second prompt is none, as in diffusers.
  const auto& own = negative ? params.negative_prompt_2 : params.prompt_2;
  if (second && own && !own->empty()) {
    text.text = *own;
    text.field = negative ? "params.negative_prompt_2" : "params.prompt_2";
  }
  std::map<std::string, EmbeddingRows, std::less<>> rows;
  for (const auto& [name, index] : params.embedding_names) {
    EmbeddingRows& its = rows[name];
    for (size_t i = 0; i < index; ++i) its.first += params.embeddings[i].tokens;
    its.count = params.embeddings[index].tokens;
  }
  text.text = MarkEmbeddings(text.text, rows);
  if (params.prompt_syntax)
    text.syntax = ParsePromptSyntax(*params.prompt_syntax).value_or(PromptSyntax::kPlain);
  return text;
}

absl::StatusOr<PromptSchedule> ScheduleOf(const SdPipeline& pipeline, const GenerateParams& params,
                                          const SdText& text, bool negative) {
  if (text.syntax != PromptSyntax::kA1111) return UnchangingPrompt(text.text);
  ASSIGN_OR_RETURN(const std::unique_ptr<Sampler> sampler, pipeline.NewSampler(params, nullptr));
  const std::vector<SamplerInfo>& all = AllSamplers();
  const bool twice = std::any_of(all.begin(), all.end(), [&](const SamplerInfo& info) {
    return info.name == *params.sampler && info.second_order;
  });
  return ScheduleA1111Prompt(text.text, {*params.steps, sampler->step_count(), twice ? 2 : 1},
                             /*joins=*/!negative, text.field);
}

}  // namespace

std::string SdOutputName(bool negative, size_t text, absl::string_view what) {
  return absl::StrCat(negative ? "neg." : "", text == 0 ? "" : absl::StrCat(text, "."), what);
}

absl::StatusOr<SdPromptSet> SdPromptSet::Make(const SdPipeline& pipeline, const GenerateParams& params) {
  SdPromptSet set;
  set.guided_ = IsGuided(pipeline, params);
  set.encodes_negative_ = set.guided_ && (params.negative_prompt || !pipeline.parts().zeros_without_negative);
  for (const SdEncoder& encoder : pipeline.parts().encoders) {
    if (set.encodes_negative_) RETURN_IF_ERROR(set.Add(pipeline, params, encoder, /*negative=*/true));
    RETURN_IF_ERROR(set.Add(pipeline, params, encoder, /*negative=*/false));
    const int64_t layers = encoder.model->config().layers - 1 - pipeline.usual_skip();
    RETURN_IF_ERROR(CheckRange("params.clip_skip", static_cast<double>(params.clip_skip.value_or(0)), 0,
                               static_cast<double>(layers)));
  }
  for (SdEncoderPrompt& prompt : set.prompts_) {
    prompt.tap = pipeline.Tap(*prompt.encoder, prompt.negative ? 0 : params.clip_skip.value_or(0));
    for (EncodableText& text : prompt.texts) RETURN_IF_ERROR(text.Plan(set.tokens_, prompt.tap.pooled));
  }
  return set;
}

absl::Status SdPromptSet::Add(const SdPipeline& pipeline, const GenerateParams& params,
                              const SdEncoder& encoder, bool negative) {
  const bool second = &encoder != &pipeline.parts().encoders.front();
  SdText text = TextOf(params, second, negative);
  SdEncoderPrompt prompt;
  prompt.encoder = &encoder;
  prompt.negative = negative;
  prompt.field = text.field;
  ASSIGN_OR_RETURN(prompt.schedule, ScheduleOf(pipeline, params, text, negative));
  for (const std::string& one : prompt.schedule.texts) {
    text.text = one;
    ASSIGN_OR_RETURN(EncodableText encodable, EncodableText::Make(encoder, text));
    tokens_ = std::max(tokens_, encodable.tokens());
    prompt.texts.push_back(std::move(encodable));
  }
  if (!negative) RETURN_IF_ERROR(CheckJoined(pipeline, prompt));
  prompts_.push_back(std::move(prompt));
  return absl::OkStatus();
}

absl::Status SdPromptSet::CheckJoined(const SdPipeline& pipeline, const SdEncoderPrompt& prompt) const {
  const size_t joined = prompt.schedule.at(0).size();
  if (joined > 1 && !guided_) {
    if (pipeline.parts().unet->config().guidance_dim > 0) {
      return FieldError(prompt.field,
                        "joins prompts with AND, which models that embed the guidance cannot weigh");
    }
    return FieldError("params.guidance",
                      "must be above 1 where prompts are joined with AND: without guidance there is "
                      "nothing that they could be weighed against");
  }
  const auto first =
      std::find_if(prompts_.begin(), prompts_.end(), [](const SdEncoderPrompt& p) { return !p.negative; });
  if (first == prompts_.end()) return absl::OkStatus();
  const size_t parts = first->schedule.at(0).size();
  if (joined == parts) return absl::OkStatus();
  return FieldError(prompt.field, absl::StrCat("joins ", joined, " prompts with AND, params.prompt ", parts,
                                               "; they go together one by one"));
}

std::vector<const SdEncoderPrompt*> SdPromptSet::PromptsOf(absl::string_view component) const {
  std::vector<const SdEncoderPrompt*> prompts;
  for (const SdEncoderPrompt& prompt : prompts_) {
    if (prompt.encoder->component == component) prompts.push_back(&prompt);
  }
  return prompts;
}

size_t SdPromptSet::WindowsOf(absl::string_view component) const {
  size_t most = 0;
  for (const SdEncoderPrompt* prompt : PromptsOf(component)) {
    for (const EncodableText& text : prompt->texts) most = std::max(most, text.windows().size());
  }
  return most;
}

std::vector<TokenCount> SdPromptSet::Counts() const {
  std::vector<TokenCount> counts;
  for (const bool negative : {false, true}) {
    for (const SdEncoderPrompt& prompt : prompts_) {
      if (prompt.negative != negative) continue;
      TokenCount count{std::string(prompt.field), prompt.encoder->component};
      for (const EncodableText& text : prompt.texts) {
        if (text.count().total <= count.total) continue;
        count.total = text.count().total;
        count.read = text.count().read;
      }
      counts.push_back(std::move(count));
    }
  }
  return counts;
}

}  // namespace latentd
