#include "families/prompt/prompt_windows.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/prompt/embedding_triggers.h"

namespace latentd {
namespace {

struct Token {
  int64_t id = 0;
  bool continues = false;  // an embedding whose first row is before it
  double weight = 1;
  size_t fragment = 0;
};

class Builder {
 public:
  Builder(const ClipTokenizer& tokenizer, LongPrompts mode, size_t fragments)
      : tokenizer_(tokenizer), mode_(mode) {
    windows_.size = tokenizer.model_max_length();
    windows_.spans.resize(fragments);
  }

  size_t room() const { return static_cast<size_t>(windows_.size - 2); }

  void AddWindow(const Token* begin, const Token* end) {
    Put(tokenizer_.begin_id(), 1);
    for (const Token* token = begin; token != end; ++token) {
      std::optional<PromptWindows::Span>& span = windows_.spans[token->fragment];
      const auto at = static_cast<int64_t>(windows_.ids.size());
      if (!span) span = PromptWindows::Span{at, at};
      span->last = at;
      Put(token->id, token->weight);
    }
    Put(tokenizer_.end_id(), 1);
    while (windows_.ids.size() % static_cast<size_t>(windows_.size) != 0) Put(tokenizer_.pad_id(), 1);
  }

  // As many windows as it takes; one for no tokens.
  void AddAll(const std::vector<Token>& tokens) {
    size_t at = 0;
    do {
      const size_t count = Cut(tokens, at);
      AddWindow(tokens.data() + at, tokens.data() + at + count);
      at += count;
    } while (at < tokens.size());
  }

  PromptWindows& windows() { return windows_; }

 private:
  void Put(int64_t id, double weight) {
    windows_.ids.push_back(id);
    windows_.weights.push_back(weight);
  }

  // How many of the tokens from `at` on belong in one window.
  size_t Cut(const std::vector<Token>& tokens, size_t at) const {
    if (tokens.size() - at <= room()) return tokens.size() - at;
    auto last = [&](const auto& matches) -> size_t {
      for (size_t n = room(); n > 0; --n) {
        if (matches(tokens[at + n - 1].id)) return n;
      }
      return 0;
    };
    size_t count = 0;
    if (mode_ == LongPrompts::kCommas) {
      constexpr size_t kBacktrack = 20;
      const Token& next = tokens[at + room()];
      count = next.continues || tokenizer_.IsOneOf(next.id, ",")
                  ? 0
                  : last([&](int64_t id) { return tokenizer_.IsOneOf(id, ","); });
      return count > 0 && count + kBacktrack > room() ? count : WholeEmbeddings(tokens, at);
    }
    count = last([&](int64_t id) { return tokenizer_.IsOneOf(id, "."); });
    if (count == 0) count = last([&](int64_t id) { return tokenizer_.IsOneOf(id, ".,;:"); });
    if (count == 0) count = last([&](int64_t id) { return id < kFirstRowId && tokenizer_.EndsWord(id); });
    if (count != 0) return count;
    return WholeEmbeddings(tokens, at);  // no word ends there
  }

  // As many tokens as there is room for, but for the beginning of an embedding that goes on after them.
  size_t WholeEmbeddings(const std::vector<Token>& tokens, size_t at) const {
    size_t count = room();
    while (count > 0 && tokens[at + count].continues) --count;
    return count == 0 ? room() : count;
  }

  const ClipTokenizer& tokenizer_;
  const LongPrompts mode_;
  PromptWindows windows_;
};

}  // namespace

absl::StatusOr<PromptWindows> MakePromptWindows(const ClipTokenizer& tokenizer, const PromptText& text,
                                                LongPrompts mode, absl::string_view field) {
  Builder builder(tokenizer, mode, text.size());
  std::vector<Token> tokens;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i].begins_window && mode != LongPrompts::kTruncate) {
      builder.AddAll(tokens);
      tokens.clear();
    }
    for (const PromptToken& token : TokenizeMarked(tokenizer, text[i].text)) {
      tokens.push_back({token.id, token.continues, text[i].weight, i});
    }
  }
  if (mode != LongPrompts::kTruncate) {
    builder.AddAll(tokens);
  } else {
    builder.AddWindow(tokens.data(), tokens.data() + std::min(tokens.size(), builder.room()));
    if (tokens.size() > builder.room()) {
      // A fragment that is cut reaches the end token in compel, unless it is the first.
      const size_t cut = tokens[builder.room()].fragment;
      std::optional<PromptWindows::Span>& span = builder.windows().spans[cut];
      if (span && span->first > 1) ++span->last;
    }
  }
  if (builder.windows().count() > kMaxPromptWindows) {
    return FieldError(
        field, absl::StrCat("takes ", builder.windows().count(), " windows of ", tokenizer.model_max_length(),
                            " tokens; at most ", kMaxPromptWindows, " are encoded"));
  }
  return std::move(builder.windows());
}

PromptWindows EmptyPromptWindow(const ClipTokenizer& tokenizer) {
  Builder builder(tokenizer, LongPrompts::kTruncate, 0);
  builder.AddWindow(nullptr, nullptr);
  return std::move(builder.windows());
}

}  // namespace latentd
