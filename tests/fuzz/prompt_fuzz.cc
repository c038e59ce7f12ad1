// Prompts in every syntax, as a request takes them: schedule, embeddings, weights, windows of tokens.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "families/text/clip_tokenizer.h"
#include "families/text/embedding_triggers.h"
#include "families/text/prompt.h"
#include "families/text/prompt_schedule.h"
#include "families/text/prompt_windows.h"

namespace {

using latentd::PromptSyntax;

const latentd::ClipTokenizer& Tokenizer() {
  static const auto tokenizer = latentd::ClipTokenizer::Load("deploy/demo/models/shapes-flux/tokenizer");
  if (!tokenizer.ok()) std::abort();  // run from the repository's root
  return **tokenizer;
}

void Tokenize(const latentd::ParsedPrompt& prompt) {
  for (const latentd::PromptPart& part : prompt.parts) {
    if (part.texts.empty() || part.blend.size() != part.texts.size()) std::abort();
    for (const latentd::PromptText& text : part.texts) {
      if (text.empty()) std::abort();
      for (const auto mode :
           {latentd::LongPrompts::kTruncate, latentd::LongPrompts::kWindows, latentd::LongPrompts::kCommas}) {
        const auto windows = latentd::MakePromptWindows(Tokenizer(), text, mode, "prompt");
        if (!windows.ok()) continue;
        if (windows->ids.size() != windows->weights.size() || windows->count() < 1) std::abort();
        for (const double weight : windows->weights) {
          if (!(std::abs(weight) <= latentd::kMaxPromptWeight)) std::abort();
        }
      }
    }
  }
}

void Parse(absl::string_view text) {
  for (const PromptSyntax syntax : {PromptSyntax::kPlain, PromptSyntax::kCompel, PromptSyntax::kA1111}) {
    if (const auto parsed = latentd::ParsePrompt(text, syntax, "prompt"); parsed.ok()) Tokenize(*parsed);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view prompt(reinterpret_cast<const char*>(data), size);
  Parse(prompt);
  const std::map<std::string, latentd::EmbeddingRows, std::less<>> rows = {{"cat", {0, 2}},
                                                                           {"a/dog", {2, 75}}};
  for (const auto& trigger : latentd::FindEmbeddingTriggers(
           prompt, [&](absl::string_view name) { return rows.find(name) != rows.end(); })) {
    if (trigger.begin + trigger.size > prompt.size()) std::abort();
  }
  Parse(latentd::MarkEmbeddings(prompt, rows));
  for (const bool joins : {false, true}) {
    const auto schedule = latentd::ScheduleA1111Prompt(prompt, 7, joins, "prompt");
    if (!schedule.ok()) continue;
    for (size_t step = 0; step < 8; ++step) {
      for (const auto& part : schedule->at(step)) {
        if (part.text >= schedule->texts.size() || !std::isfinite(part.weight)) std::abort();
      }
    }
    for (const std::string& text : schedule->texts) Parse(text);
  }
  return 0;
}
