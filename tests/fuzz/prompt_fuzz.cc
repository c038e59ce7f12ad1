// Prompts in every syntax, as a request takes them: embeddings, schedule, weights, windows of tokens.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "families/prompt/embedding_triggers.h"
#include "families/prompt/prompt.h"
#include "families/prompt/prompt_schedule.h"
#include "families/prompt/prompt_windows.h"
#include "families/tokenizers/clip_tokenizer.h"

namespace {

using latentd::PromptSyntax;

const latentd::ClipTokenizer& Tokenizer() {
  static const auto tokenizer = latentd::ClipTokenizer::Load("deploy/demo/models/shapes-flux/tokenizer");
  if (!tokenizer.ok()) std::abort();  // run from the repository's root
  return **tokenizer;
}

// What the input's size chooses, so that a run is short and each is tried by as many inputs.
struct Choice {
  latentd::LongPrompts mode;
  bool joins;
};

Choice ChoiceBy(size_t size) {
  constexpr latentd::LongPrompts kModes[] = {latentd::LongPrompts::kTruncate, latentd::LongPrompts::kWindows,
                                             latentd::LongPrompts::kCommas};
  return {kModes[size % 3], size % 2 == 0};
}

void Tokenize(const latentd::PromptText& text, latentd::LongPrompts mode) {
  if (text.empty()) std::abort();
  const auto windows = latentd::MakePromptWindows(Tokenizer(), text, mode, "prompt");
  if (!windows.ok()) return;
  if (windows->ids.size() != windows->weights.size() || windows->count() < 1) std::abort();
  for (const double weight : windows->weights) {
    if (!(std::abs(weight) <= latentd::kMaxPromptWeight)) std::abort();
  }
}

void Parse(absl::string_view text, PromptSyntax syntax, const Choice& choice) {
  const auto parsed = latentd::ParsePrompt(text, syntax, "prompt");
  if (!parsed.ok()) return;
  for (const latentd::PromptPart& part : parsed->parts) {
    if (part.texts.empty() || part.blend.size() != part.texts.size()) std::abort();
    for (const latentd::PromptText& one : part.texts) Tokenize(one, choice.mode);
  }
}

void Schedule(absl::string_view text, const Choice& choice) {
  constexpr latentd::ScheduledSteps kSteps = {.asked = 7, .run = 5, .evaluations = 2};
  const auto schedule = latentd::ScheduleA1111Prompt(text, kSteps, choice.joins, "prompt");
  if (!schedule.ok()) return;
  for (size_t step = 0; step < 8; ++step) {
    for (const auto& part : schedule->at(step)) {
      if (part.text >= schedule->texts.size() || !std::isfinite(part.weight)) std::abort();
    }
  }
  for (const std::string& one : schedule->texts) Parse(one, PromptSyntax::kA1111, choice);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view prompt(reinterpret_cast<const char*>(data), size);
  static const std::map<std::string, latentd::EmbeddingRows, std::less<>>& rows =
      *new std::map<std::string, latentd::EmbeddingRows, std::less<>>{{"cat", {0, 2}}, {"a/dog", {2, 75}}};
  for (const auto& trigger : latentd::FindEmbeddingTriggers(
           prompt, [&](absl::string_view name) { return rows.find(name) != rows.end(); })) {
    if (trigger.begin + trigger.size > prompt.size()) std::abort();
  }
  const std::string marked = latentd::MarkEmbeddings(prompt, rows);
  const Choice choice = ChoiceBy(size);
  Parse(marked, PromptSyntax::kPlain, choice);
  Parse(marked, PromptSyntax::kCompel, choice);
  Schedule(marked, choice);
  return 0;
}
