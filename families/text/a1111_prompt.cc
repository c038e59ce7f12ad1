// Weights by brackets. Scanned from left to right; a closing bracket weighs all since its opening one.
#include <algorithm>
#include <cctype>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "families/text/prompt.h"

namespace latentd {
namespace {

constexpr double kStep = 1.1;

bool IsSpace(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool IsWord(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

class Scanner {
 public:
  Scanner(absl::string_view text, absl::string_view field) : text_(text), field_(field) {}

  absl::StatusOr<ParsedPrompt> Run() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\\') {
        Escape();
      } else if (c == '(' || c == '[') {
        std::vector<size_t>& open = c == '(' ? round_ : square_;
        if (open.size() == kMaxPromptNesting) {
          return FieldError(field_, absl::StrCat("nests brackets deeper than ", kMaxPromptNesting));
        }
        Flush();
        open.push_back(fragments_.size());
        ++at_;
      } else if (c == ')' && !round_.empty()) {
        Close(round_, kStep);
      } else if (c == ']' && !square_.empty()) {
        Close(square_, 1 / kStep);
      } else if (!(c == ':' && !round_.empty() && ExplicitWeight()) && !(c == 'B' && Break())) {
        pending_ += c;
        ++at_;
      }
    }
    Flush();
    for (const size_t begin : round_) Multiply(begin, kStep);
    for (const size_t begin : square_) Multiply(begin, 1 / kStep);
    return SinglePrompt(Fused());
  }

 private:
  void Escape() {
    static constexpr absl::string_view kEscaped = "()[]\\";
    if (at_ + 1 < text_.size() && kEscaped.find(text_[at_ + 1]) != absl::string_view::npos) ++at_;
    pending_ += text_[at_++];
  }

  void Flush() {
    if (pending_.empty() && !break_pending_) return;
    fragments_.push_back({std::exchange(pending_, ""), 1, std::exchange(break_pending_, false)});
  }

  void Multiply(size_t begin, double factor) {
    for (size_t i = begin; i < fragments_.size(); ++i) fragments_[i].weight *= factor;
  }

  void Close(std::vector<size_t>& open, double factor) {
    Flush();
    Multiply(open.back(), factor);
    open.pop_back();
    ++at_;
  }

  // ":1.3)", after which the scan goes on; false leaves the colon to the text.
  bool ExplicitWeight() {
    size_t begin = at_ + 1;
    while (begin < text_.size() && IsSpace(text_[begin])) ++begin;
    size_t end = begin;
    if (end < text_.size() && (text_[end] == '+' || text_[end] == '-')) ++end;
    while (end < text_.size() &&
           (std::isdigit(static_cast<unsigned char>(text_[end])) != 0 || text_[end] == '.'))
      ++end;
    size_t close = end;
    while (close < text_.size() && IsSpace(text_[close])) ++close;
    double weight = 0;
    if (close == text_.size() || text_[close] != ')' ||
        !absl::SimpleAtod(text_.substr(begin, end - begin), &weight)) {
      return false;
    }
    at_ = close;
    Close(round_, weight);
    return true;
  }

  // The word BREAK, with the space around it.
  bool Break() {
    static constexpr absl::string_view kWord = "BREAK";
    if (text_.substr(at_, kWord.size()) != kWord || (at_ > 0 && IsWord(text_[at_ - 1])) ||
        (at_ + kWord.size() < text_.size() && IsWord(text_[at_ + kWord.size()]))) {
      return false;
    }
    while (!pending_.empty() && IsSpace(pending_.back())) pending_.pop_back();
    Flush();
    break_pending_ = true;
    at_ += kWord.size();
    while (at_ < text_.size() && IsSpace(text_[at_])) ++at_;
    return true;
  }

  // Neighbours of one weight are one text.
  PromptText Fused() const {
    PromptText fused;
    for (const PromptFragment& fragment : fragments_) {
      if (!fused.empty() && fused.back().weight == fragment.weight && !fragment.begins_window) {
        fused.back().text += fragment.text;
      } else {
        fused.push_back(fragment);
      }
    }
    return fused;
  }

  absl::string_view text_, field_;
  size_t at_ = 0;
  std::string pending_;
  bool break_pending_ = false;
  PromptText fragments_;
  std::vector<size_t> round_, square_;  // the fragment after each open bracket
};

}  // namespace

absl::StatusOr<ParsedPrompt> ParseA1111Prompt(absl::string_view prompt, absl::string_view field) {
  return Scanner(prompt, field).Run();
}

}  // namespace latentd
