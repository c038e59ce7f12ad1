// Weights by brackets. Scanned from left to right; a closing bracket weighs all since its opening one.
//
// As in the program, BREAK is a piece of the list that is weighed like others: with a weight of its own, in
// brackets that weigh, it breaks nothing and is a word.
#include <algorithm>
#include <cctype>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/prompt/prompt.h"
#include "families/tokenizers/unicode.h"

namespace latentd {
namespace {

constexpr double kStep = 1.1;
constexpr absl::string_view kBreak = "BREAK";
constexpr double kBreakWeight = -1;

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
        open.push_back(pieces_.size());
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
    return SinglePrompt(Fragments());
  }

 private:
  struct Piece {
    std::string text;
    double weight = 1;

    bool breaks() const { return text == kBreak && weight == kBreakWeight; }
  };

  // A backslash before what it does not escape goes.
  void Escape() {
    static constexpr absl::string_view kEscaped = "()[]\\";
    ++at_;
    if (at_ < text_.size() && kEscaped.find(text_[at_]) != absl::string_view::npos) pending_ += text_[at_++];
  }

  void Flush() {
    if (!pending_.empty()) pieces_.push_back({std::exchange(pending_, ""), 1});
  }

  void Multiply(size_t begin, double factor) {
    for (size_t i = begin; i < pieces_.size(); ++i) pieces_[i].weight *= factor;
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
    begin += LeadingWhitespace(text_.substr(begin));
    size_t end = begin;
    if (end < text_.size() && (text_[end] == '+' || text_[end] == '-')) ++end;
    while (end < text_.size() &&
           (std::isdigit(static_cast<unsigned char>(text_[end])) != 0 || text_[end] == '.'))
      ++end;
    const size_t close = end + LeadingWhitespace(text_.substr(end));
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
    if (text_.substr(at_, kBreak.size()) != kBreak || WordEndsBefore(text_, at_) ||
        WordGoesOn(text_, at_ + kBreak.size())) {
      return false;
    }
    pending_.resize(pending_.size() - TrailingWhitespace(pending_));
    Flush();
    pieces_.push_back({std::string(kBreak), kBreakWeight});
    at_ += kBreak.size();
    at_ += LeadingWhitespace(text_.substr(at_));
    return true;
  }

  // Neighbours of one weight are one text. A window begins behind each BREAK, but behind the last one only if
  // something follows it.
  PromptText Fragments() const {
    std::vector<Piece> fused;
    for (const Piece& piece : pieces_) {
      if (!fused.empty() && fused.back().weight == piece.weight && !piece.breaks()) {
        fused.back().text += piece.text;
      } else {
        fused.push_back(piece);
      }
    }
    PromptText fragments;
    bool begins_window = false;
    for (size_t i = 0; i < fused.size(); ++i) {
      if (!fused[i].breaks()) {
        fragments.push_back({fused[i].text, fused[i].weight, std::exchange(begins_window, false)});
        continue;
      }
      // Nothing stands before it, or since the last one: a window of nothing.
      if (fragments.empty() || begins_window) fragments.push_back({"", 1, begins_window});
      begins_window = true;
    }
    return fragments;
  }

  absl::string_view text_, field_;
  size_t at_ = 0;
  std::string pending_;
  std::vector<Piece> pieces_;
  std::vector<size_t> round_, square_;  // the piece after each open bracket
};

}  // namespace

absl::StatusOr<ParsedPrompt> ParseA1111Prompt(absl::string_view prompt, absl::string_view field) {
  return Scanner(prompt, field).Run();
}

}  // namespace latentd
