#include "families/prompt/prompt_conditioning.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "families/prompt/embedding_triggers.h"

namespace latentd {
namespace {

// One encoding of one prompt.
class Encoding {
 public:
  Encoding(const ClipTokenizer& tokenizer, LongPrompts mode, PromptWeights weights,
           const EncodeWindow& encode, absl::string_view field)
      : tokenizer_(tokenizer), mode_(mode), weights_(weights), encode_(encode), field_(field) {}

  absl::StatusOr<at::Tensor> Prompt(const ParsedPrompt& prompt) {
    std::vector<at::Tensor> parts;
    for (const PromptPart& part : prompt.parts) {
      ASSIGN_OR_RETURN(at::Tensor embedding, Part(part));
      if (part.weight != 1) {
        ASSIGN_OR_RETURN(const at::Tensor empty, Empty());
        const at::Tensor base = empty.repeat({1, embedding.size(1) / empty.size(1), 1});
        embedding = at::add(base, embedding - base, part.weight);
      }
      parts.push_back(std::move(embedding));
    }
    return parts.size() == 1 ? parts[0] : at::cat(parts, 1);
  }

 private:
  absl::StatusOr<at::Tensor> Part(const PromptPart& part) {
    std::vector<at::Tensor> texts;
    for (const PromptText& text : part.texts) {
      ASSIGN_OR_RETURN(texts.emplace_back(), Text(text));
    }
    if (texts.size() == 1 && part.blend[0] == 1) return texts[0];
    const bool even = std::all_of(texts.begin(), texts.end(),
                                  [&](const at::Tensor& t) { return t.size(1) == texts[0].size(1); });
    if (!even) {
      ASSIGN_OR_RETURN(const at::Tensor empty, Empty());
      PadToSameLength(texts, empty);
    }
    return Mix(texts, part.blend, part.normalize);
  }

  static at::Tensor Mix(const std::vector<at::Tensor>& tensors, const std::vector<double>& shares,
                        bool normalize) {
    double sum = 0;
    for (const double share : shares) sum += share;
    at::Tensor mixed = tensors[0] * (normalize ? shares[0] / sum : shares[0]);
    for (size_t i = 1; i < tensors.size(); ++i)
      mixed.add_(tensors[i], normalize ? shares[i] / sum : shares[i]);
    return mixed;
  }

  absl::StatusOr<at::Tensor> Text(const PromptText& text) {
    ASSIGN_OR_RETURN(const PromptWindows windows, MakePromptWindows(tokenizer_, text, mode_, field_));
    const std::vector<int64_t> all(windows.ids.size(), 1);
    std::vector<at::Tensor> versions(1);
    std::vector<double> shares = {1};
    ASSIGN_OR_RETURN(versions[0], Weighted(windows, all));
    if (weights_ == PromptWeights::kKeepMean) return versions[0];
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i].weight >= 1 || !windows.spans[i]) continue;
      ASSIGN_OR_RETURN(versions.emplace_back(), Weighted(windows, Without(windows, *windows.spans[i])));
      // 0 at a weight of 1, as much as the prompt itself at 0.5, all there is at 0.
      constexpr double kLowest = 1e-5;
      shares.push_back(std::tan((1 - std::max(text[i].weight, kLowest)) * M_PI / 2));
    }
    return versions.size() == 1 ? versions[0] : Mix(versions, shares, true);
  }

  // All but one fragment. In several windows, the tokens at their ends are seen nevertheless.
  std::vector<int64_t> Without(const PromptWindows& windows, const PromptWindows::Span& span) const {
    std::vector<int64_t> mask(windows.ids.size(), 1);
    std::fill(mask.begin() + span.first, mask.begin() + span.last + 1, 0);
    if (mode_ == LongPrompts::kTruncate) return mask;
    const auto size = static_cast<size_t>(windows.size);
    for (size_t begin = 0; begin < mask.size(); begin += size) mask[begin] = mask[begin + size - 1] = 1;
    return mask;
  }

  // Every window encoded, and its tokens moved by their weights.
  absl::StatusOr<at::Tensor> Weighted(const PromptWindows& windows, const std::vector<int64_t>& mask) {
    std::vector<at::Tensor> encoded;
    for (int64_t begin = 0; begin < static_cast<int64_t>(windows.ids.size()); begin += windows.size) {
      const int64_t end = begin + windows.size;
      std::vector<int64_t> seen(mask.begin() + begin, mask.begin() + end);
      if (std::count(seen.begin(), seen.end(), 0) == 0) seen.clear();
      ASSIGN_OR_RETURN(at::Tensor hidden,
                       encode_({windows.ids.begin() + begin, windows.ids.begin() + end}, seen));
      if (std::any_of(windows.weights.begin() + begin, windows.weights.begin() + end,
                      [](double weight) { return weight != 1; })) {
        const std::vector<double> values(windows.weights.begin() + begin, windows.weights.begin() + end);
        const at::Tensor weights = at::tensor(values).to(hidden.options()).view({1, windows.size, 1});
        if (weights_ == PromptWeights::kKeepMean) {
          const at::Tensor weighted = hidden * weights;
          hidden = weighted * (hidden.mean() / weighted.mean());
        } else {
          ASSIGN_OR_RETURN(const at::Tensor empty, Empty());
          hidden = at::where(weights == 1, hidden, empty + (hidden - empty) * weights);
        }
      }
      encoded.push_back(std::move(hidden));
    }
    return encoded.size() == 1 ? encoded[0] : at::cat(encoded, 1);
  }

  absl::StatusOr<at::Tensor> Empty() {
    if (!empty_.defined()) {
      ASSIGN_OR_RETURN(empty_, encode_(EmptyPromptWindow(tokenizer_).ids, {}));
    }
    return empty_;
  }

  const ClipTokenizer& tokenizer_;
  const LongPrompts mode_;
  const PromptWeights weights_;
  const EncodeWindow& encode_;
  const absl::string_view field_;
  at::Tensor empty_;
};

}  // namespace

absl::StatusOr<at::Tensor> EncodePrompt(const ClipTokenizer& tokenizer, const ParsedPrompt& prompt,
                                        LongPrompts mode, PromptWeights weights, const EncodeWindow& encode,
                                        absl::string_view field) {
  return Encoding(tokenizer, mode, weights, encode, field).Prompt(prompt);
}

void PadToSameLength(std::vector<at::Tensor>& embeddings, const at::Tensor& empty) {
  int64_t longest = 0;
  for (const at::Tensor& embedding : embeddings) longest = std::max(longest, embedding.size(1));
  for (at::Tensor& embedding : embeddings) {
    const int64_t missing = (longest - embedding.size(1)) / empty.size(1);
    if (missing > 0) embedding = at::cat({embedding, empty.repeat({1, missing, 1})}, 1);
  }
}

std::vector<int64_t> OneWindowOfIds(const ClipTokenizer& tokenizer, absl::string_view prompt) {
  const auto length = static_cast<size_t>(tokenizer.model_max_length());
  std::vector<int64_t> ids = {tokenizer.begin_id()};
  for (const PromptToken& token : TokenizeMarked(tokenizer, prompt)) ids.push_back(token.id);
  if (ids.size() > length - 1) ids.resize(length - 1);
  ids.push_back(tokenizer.end_id());
  ids.resize(length, tokenizer.pad_id());
  return ids;
}

}  // namespace latentd
