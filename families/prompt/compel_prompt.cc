// compel's syntax, by recursive descent. Where compel's grammar tries one reading after the other, here each
// bracket is read once and what follows it decides, so that the time is linear in the length.
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "cache/base/error.h"
#include "families/prompt/prompt.h"

namespace latentd {
namespace {

constexpr double kMore = 1.1, kLess = 0.9;
constexpr absl::string_view kSyntax = "()\",.+-=";

bool IsSyntax(char c) { return kSyntax.find(c) != absl::string_view::npos; }
bool IsSpace(char c) { return absl::ascii_isspace(static_cast<unsigned char>(c)); }
bool IsDigit(char c) { return absl::ascii_isdigit(static_cast<unsigned char>(c)); }

// A comma is followed by a space, or it would be part of the next word.
std::string SpaceAfterCommas(absl::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    out += text[i];
    if (text[i] == ',' && i + 1 < text.size() && !IsSpace(text[i + 1])) {
      out += ' ';
      out += text[++i];
    }
  }
  return out;
}

std::string Unescape(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"\\(", "("}, {"\\)", ")"}, {"\\\"", "\""}});
}

// Neighbours of one weight are one text.
PromptText Fused(const PromptText& fragments) {
  PromptText fused;
  for (const PromptFragment& fragment : fragments) {
    if (!fused.empty() && fused.back().weight == fragment.weight) {
      absl::StrAppend(&fused.back().text, " ", fragment.text);
    } else {
      fused.push_back(fragment);
    }
  }
  return fused;
}

// One text, at top level or within quotes. Every Read… either succeeds and moves on, or fails and stays.
class Reader {
 public:
  Reader(absl::string_view text, absl::string_view field, int depth)
      : text_(text), field_(field), depth_(depth) {}

  // All of the text; what has no meaning stands for itself.
  absl::StatusOr<PromptText> ReadAll() {
    PromptText fragments;
    while (SkipSpace(), at_ < text_.size()) {
      if (!ReadTerm(fragments)) {
        RETURN_IF_ERROR(status_);
        size_t end = at_;
        while (end < text_.size() && !IsSpace(text_[end])) ++end;
        fragments.push_back({Unescape(text_.substr(at_, end - at_)), 1, false});
        at_ = end;
      }
    }
    return fragments;
  }

  // "(", parts, ").blend(" or ").and(", arguments, ")". Nothing when it is something else.
  std::optional<ParsedPrompt> ReadCombination() {
    std::vector<PromptText> texts;
    SkipSpace();
    if (!Take("(")) return std::nullopt;
    do {
      PromptText fragments;
      SkipSpace();
      if (!ReadTarget(fragments) && !ReadQuotedPrompt(fragments)) return std::nullopt;
      texts.push_back(Fused(fragments));
      SkipSpace();
    } while (Take(","));
    if (!Take(")")) return std::nullopt;
    SkipSpace();
    const bool blend = Take(".blend");
    if (!blend && !Take(".and") && !Take(".add")) return std::nullopt;
    SkipSpace();
    if (!Take("(")) return std::nullopt;
    Arguments arguments = ReadArguments();
    if (!status_.ok()) return std::nullopt;
    if (arguments.weights.empty()) arguments.weights.assign(texts.size(), 1.0);
    if (arguments.weights.size() != texts.size()) {
      Fail(absl::StrCat("has ", arguments.weights.size(), " weights for ", texts.size(), " prompts"));
    } else if (arguments.no_normalize && !blend) {
      Fail("has no_normalize in .and(), where nothing is normalized");
    } else if (SkipSpace(), at_ < text_.size()) {
      Fail("goes on after .blend() or .and(), which stand for the whole prompt");
    }
    return status_.ok() ? std::optional(Combined(std::move(texts), arguments, blend)) : std::nullopt;
  }

  const absl::Status& status() const { return status_; }

 private:
  struct Arguments {
    std::vector<double> weights;
    bool no_normalize = false;
  };

  static ParsedPrompt Combined(std::vector<PromptText> texts, const Arguments& arguments, bool blend) {
    for (PromptText& text : texts) {
      if (text.empty()) text.push_back({});
    }
    ParsedPrompt prompt;
    if (blend) {
      prompt.parts.push_back({std::move(texts), arguments.weights, !arguments.no_normalize, 1});
      return prompt;
    }
    for (size_t i = 0; i < texts.size(); ++i) {
      prompt.parts.push_back(SinglePrompt(std::move(texts[i])).parts[0]);
      prompt.parts.back().weight = arguments.weights[i];
    }
    return prompt;
  }

  void Fail(absl::string_view what) {
    if (status_.ok()) status_ = FieldError(field_, what);
  }

  bool SkipSpace() {
    while (at_ < text_.size() && IsSpace(text_[at_])) ++at_;
    return true;
  }
  bool At(absl::string_view literal) const { return absl::StartsWith(text_.substr(at_), literal); }
  bool Take(absl::string_view literal) {
    if (!At(literal)) return false;
    at_ += literal.size();
    return true;
  }

  // Anything that an operator can stand behind: quotes, brackets, a word without syntax in it.
  bool ReadTarget(PromptText& fragments) {
    if (At("\"")) return ReadQuoted(fragments);
    if (At("(")) return ReadGroup(fragments);
    return ReadWord(fragments);
  }

  // A target with its weight, or brackets and quotes alone; a word alone only `within` those.
  bool ReadTerm(PromptText& fragments, bool within = false) {
    const size_t begin = at_;
    if (At("withLora(") || At("useLora(")) {
      Fail("has a LoRA in it; name it in the request's LoRAs instead");
      return false;
    }
    const bool word = !At("\"") && !At("(");
    PromptText target;
    if (!ReadTarget(target)) return false;
    const std::optional<double> weight = ReadOperator(word);
    if (!status_.ok() || (!weight && word && !within)) {
      at_ = begin;
      return false;
    }
    for (PromptFragment& fragment : target) {
      fragment.weight *= weight.value_or(1);
      fragments.push_back(std::move(fragment));
    }
    return true;
  }

  std::optional<double> ReadOperator(bool word) {
    const size_t begin = at_;
    SkipSpace();
    if (At(".swap(")) {
      Fail("has .swap(), which is not supported; write the prompt that is wanted");
      return std::nullopt;
    }
    if (Take(".attend(")) {
      SkipSpace();
      const std::optional<double> weight = ReadWeight(true);
      if (SkipSpace(), weight && Take(")")) return weight;
    }
    at_ = begin;
    return ReadWeight(!word);
  }

  // "++", "-" or a number.
  std::optional<double> ReadWeight(bool numbers) {
    if (At("+") || At("-")) {
      const char sign = text_[at_];
      const size_t begin = at_;
      while (at_ < text_.size() && text_[at_] == sign) ++at_;
      return std::pow(sign == '+' ? kMore : kLess, static_cast<double>(at_ - begin));
    }
    return numbers ? ReadNumber() : std::nullopt;
  }

  std::optional<double> ReadNumber() {
    size_t end = at_;
    while (end < text_.size() && IsDigit(text_[end])) ++end;
    if (end < text_.size() && text_[end] == '.' &&
        (end > at_ || (end + 1 < text_.size() && IsDigit(text_[end + 1])))) {
      ++end;
      while (end < text_.size() && IsDigit(text_[end])) ++end;
    }
    double value = 0;
    if (end == at_ || !absl::SimpleAtod(text_.substr(at_, end - at_), &value)) return std::nullopt;
    at_ = end;
    return value;
  }

  bool ReadGroup(PromptText& fragments) {
    const size_t begin = at_;
    if (!Deeper()) return false;
    Take("(");
    PromptText inner;
    ReadMany(inner);
    --depth_;
    if (SkipSpace(), !Take(")")) {
      at_ = begin;
      return false;
    }
    fragments.insert(fragments.end(), inner.begin(), inner.end());
    return true;
  }

  // What brackets and quotes may hold: terms, commas and full stops.
  void ReadMany(PromptText& fragments) {
    while (SkipSpace(), at_ < text_.size() && status_.ok()) {
      if (ReadTerm(fragments, true)) continue;
      if (!At(",") && !At(".")) return;
      fragments.push_back({std::string(1, text_[at_++]), 1, false});
    }
  }

  bool ReadWord(PromptText& fragments) {
    size_t end = at_;
    auto follows = [&](size_t i) { return i < text_.size() ? text_[i] : ' '; };
    while (end < text_.size()) {
      const char c = text_[end];
      if (c == '\\' && end + 1 < text_.size() && IsSyntax(text_[end + 1])) {
        end += 2;
      } else if ((c == '-' || c == '+') && !IsSpace(follows(end + 1)) && !IsSyntax(follows(end + 1))) {
        ++end;
      } else if (!IsSpace(c) && !IsSyntax(c)) {
        ++end;
      } else {
        break;
      }
    }
    if (end == at_) return false;
    fragments.push_back({Unescape(text_.substr(at_, end - at_)), 1, false});
    at_ = end;
    return true;
  }

  // What stands between quotes, with \" for a quote; it stays escaped. Where nothing else closes them, the
  // last escaped quote does. Ends before the second quote.
  std::optional<absl::string_view> Quoted() const {
    std::optional<absl::string_view> inside;
    for (size_t i = at_ + 1; i < text_.size() && text_[i] != '\n' && text_[i] != '\r'; ++i) {
      const bool escaped = text_[i] == '\\' && i + 1 < text_.size() && text_[i + 1] == '"';
      if (escaped) ++i;
      if (text_[i] == '"') inside = text_.substr(at_ + 1, i - at_ - 1);
      if (text_[i] == '"' && !escaped) break;
    }
    return inside;
  }

  bool ReadQuoted(PromptText& fragments) {
    const std::optional<absl::string_view> inside = Quoted();
    if (!inside || !Deeper()) return false;
    Reader reader(*inside, field_, depth_);
    --depth_;
    PromptText inner;
    reader.ReadMany(inner);
    status_.Update(reader.status_);
    if (!status_.ok() || (reader.SkipSpace(), reader.at_ < inside->size())) return false;
    if (inner.empty()) inner.push_back({});
    at_ += inside->size() + 2;
    fragments.insert(fragments.end(), inner.begin(), inner.end());
    return true;
  }

  // Quotes around what only a whole prompt may hold.
  bool ReadQuotedPrompt(PromptText& fragments) {
    if (!At("\"") || !status_.ok()) return false;
    const std::optional<absl::string_view> inside = Quoted();
    if (!inside) return false;
    Reader reader(*inside, field_, depth_);
    absl::StatusOr<PromptText> inner = reader.ReadAll();
    status_.Update(inner.status());
    if (!inner.ok()) return false;
    at_ += inside->size() + 2;
    fragments = *std::move(inner);
    return true;
  }

  Arguments ReadArguments() {
    Arguments arguments;
    SkipSpace();
    if (Take(")")) return arguments;
    do {
      SkipSpace();
      const bool minus = Take("-");
      if (const std::optional<double> number = ReadNumber(); number && !arguments.no_normalize) {
        arguments.weights.push_back(minus ? -*number : *number);
      } else if (!arguments.no_normalize && Take("no_normalize")) {
        arguments.no_normalize = true;
      } else {
        Fail("has something else than numbers, and no_normalize after them, in .blend() or .and()");
        return arguments;
      }
      SkipSpace();
    } while (Take(","));
    if (!Take(")")) Fail("has a .blend() or .and() without its closing bracket");
    return arguments;
  }

  bool Deeper() {
    if (depth_ == kMaxPromptNesting) {
      Fail(absl::StrCat("nests brackets deeper than ", kMaxPromptNesting));
      return false;
    }
    ++depth_;
    return true;
  }

  absl::string_view text_, field_;
  int depth_;
  size_t at_ = 0;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<ParsedPrompt> ParseCompelPrompt(absl::string_view prompt, absl::string_view field) {
  const std::string text = SpaceAfterCommas(prompt);
  Reader combination(text, field, 0);
  std::optional<ParsedPrompt> combined = combination.ReadCombination();
  RETURN_IF_ERROR(combination.status());
  if (combined) return *std::move(combined);
  ASSIGN_OR_RETURN(PromptText fragments, Reader(text, field, 0).ReadAll());
  return SinglePrompt(Fused(fragments));
}

}  // namespace latentd
