// A request's prompts as SD's text encoders are given them over the steps of a run. Parsed and tokenised
// once, then immutable; any thread.
#ifndef LATENTD_FAMILIES_SD_SD_PROMPT_SET_H_
#define LATENTD_FAMILIES_SD_SD_PROMPT_SET_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "families/prompt/prompt_schedule.h"
#include "families/run.h"
#include "families/sd/sd_pipeline.h"
#include "families/sd/sd_text.h"

namespace latentd {

// The wanted or the unwanted prompt of one encoder.
struct SdEncoderPrompt {
  const SdEncoder* encoder = nullptr;
  bool negative = false;
  absl::string_view field;           // "params.prompt_2": whose text it is
  ClipTap tap;                       // what is read of the encoder
  PromptSchedule schedule;           // of texts
  std::vector<EncodableText> texts;  // schedule.texts, with marks in place of embeddings' names
};

// The name of what encoders make of a prompt's text with that index, in a Conditioning: `what` is the
// encoder's component, or kSdPooled.
std::string SdOutputName(bool negative, size_t text, absl::string_view what);
inline constexpr char kSdPooled[] = "pooled";

class SdPromptSet {
 public:
  // REQUIRES: the pipeline, which outlives the set, has checked `params` but for the prompts. Errors:
  // INVALID_ARGUMENT INVALID_FIELD naming the prompt, or the field that it needs another value of.
  static absl::StatusOr<SdPromptSet> Make(const SdPipeline& pipeline, const GenerateParams& params);

  // Whether steps go along one prompt, or along it and away from an unwanted one.
  bool guided() const { return guided_; }
  // Whether the unwanted one is encoded; else it is zeros.
  bool encodes_negative() const { return encodes_negative_; }
  // Of the longest of all texts, to which the others are brought.
  int64_t tokens() const { return tokens_; }

  // By encoder, the wanted one behind the unwanted one.
  const std::vector<SdEncoderPrompt>& prompts() const { return prompts_; }
  std::vector<const SdEncoderPrompt*> PromptsOf(absl::string_view component) const;
  // Calls that the text that takes most of them makes of an encoder.
  size_t WindowsOf(absl::string_view component) const;
  std::vector<TokenCount> Counts() const;

 private:
  absl::Status Add(const SdPipeline& pipeline, const GenerateParams& params, const SdEncoder& encoder,
                   bool negative);
  absl::Status CheckJoined(const SdPipeline& pipeline, const SdEncoderPrompt& prompt) const;

  bool guided_ = false, encodes_negative_ = false;
  int64_t tokens_ = 0;
  std::vector<SdEncoderPrompt> prompts_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_PROMPT_SET_H_
