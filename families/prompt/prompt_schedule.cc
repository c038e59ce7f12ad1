// A recursive descent over the grammar of A1111's modules/prompt_parser.py. A bracket that is none of the
// scheduled ones is copied with what is in it, for the weights that it means.
#include "families/prompt/prompt_schedule.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/prompt/prompt.h"
#include "families/tokenizers/unicode.h"

namespace latentd {
namespace {

struct Node;
using Nodes = std::vector<Node>;

// Text, a change at a step, or alternatives by step.
struct Node {
  enum class Kind { kText, kChange, kAlternatives } kind = Kind::kText;
  std::string text;
  std::vector<Nodes> options;  // of a change: before and after
  std::string when;            // of a change, as written
};

void AddText(Nodes& nodes, absl::string_view text) {
  if (nodes.empty() || nodes.back().kind != Node::Kind::kText) nodes.push_back({});
  nodes.back().text.append(text.data(), text.size());
}

void Append(Nodes& nodes, Nodes more) {
  for (Node& node : more) {
    if (node.kind == Node::Kind::kText) {
      AddText(nodes, node.text);
    } else {
      nodes.push_back(std::move(node));
    }
  }
}

// "10", " 0.5 ", ".5", "-1"; not "", "cat".
bool IsNumber(absl::string_view text) {
  double value = 0;
  text = absl::StripAsciiWhitespace(text);
  return !text.empty() && text.find_first_not_of("0123456789.+-eE") == text.npos &&
         absl::SimpleAtod(text, &value) && std::isfinite(value);
}

// The text of nodes that are nothing else.
std::optional<absl::string_view> OnlyText(const Nodes& nodes) {
  if (nodes.empty()) return "";
  if (nodes.size() > 1 || nodes.front().kind != Node::Kind::kText) return std::nullopt;
  return nodes.front().text;
}

class Parser {
 public:
  explicit Parser(absl::string_view text) : text_(text) {}

  Nodes Run() {
    Nodes all;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\\') {
        TakeEscape(all);
      } else if (c == '[' || c == '(') {
        if (auto bracket = TryBracket()) {
          Append(all, *std::move(bracket));
        } else {
          AddText(all, text_.substr(at_++, 1));
        }
      } else {
        AddText(all, text_.substr(at_++, 1));
      }
    }
    return all;
  }

  bool too_deep() const { return too_deep_; }

 private:
  // A whole bracket, bars in it being alternatives, or text where it cannot be read otherwise.
  std::optional<Nodes> TryBracket() {
    const size_t begin = at_;
    for (const bool bars : {true, false}) {
      at_ = begin;
      bars_ = bars;
      if (auto bracket = Bracket()) return bracket;
      if (too_deep_) break;
    }
    at_ = begin;
    return std::nullopt;
  }

  void TakeEscape(Nodes& nodes) {
    AddText(nodes, text_.substr(at_, 2));
    at_ = std::min(at_ + 2, text_.size());
  }

  bool Take(char c) {
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  // What is between a bracket's own signs.
  std::optional<Nodes> Inside() {
    Nodes nodes;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\\') {
        TakeEscape(nodes);
      } else if (c == '[' || c == '(') {
        auto bracket = Bracket();
        if (!bracket) return std::nullopt;
        Append(nodes, *std::move(bracket));
      } else if (c == ']' || c == ')' || c == ':' || (c == '|' && bars_)) {
        break;
      } else {
        AddText(nodes, text_.substr(at_++, 1));
      }
    }
    return nodes;
  }

  std::optional<Nodes> Bracket() {
    if (++depth_ > kMaxPromptNesting) too_deep_ = true;
    std::optional<Nodes> nodes;
    if (!too_deep_) nodes = text_[at_] == '[' ? Square() : Round();
    --depth_;
    return nodes;
  }

  // (x) and (x:1.2)
  std::optional<Nodes> Round() {
    ++at_;
    auto inside = Inside();
    if (!inside) return std::nullopt;
    Nodes all;
    AddText(all, "(");
    Append(all, *std::move(inside));
    if (Take(':')) {
      auto weight = Inside();
      if (!weight) return std::nullopt;
      AddText(all, ":");
      Append(all, *std::move(weight));
    }
    if (!Take(')')) return std::nullopt;
    AddText(all, ")");
    return all;
  }

  std::optional<Nodes> Square() {
    ++at_;
    std::vector<Nodes> parts;
    char separator = 0;
    do {
      auto inside = Inside();
      if (!inside || at_ == text_.size()) return std::nullopt;
      parts.push_back(*std::move(inside));
      const char next = text_[at_];
      if (next == ')' || (separator != 0 && next != separator && next != ']')) return std::nullopt;
      separator = next == ']' ? separator : next;
    } while (!Take(']') && ++at_ <= text_.size());
    if (parts.size() == 1) {
      Nodes all;
      AddText(all, "[");
      Append(all, std::move(parts[0]));
      AddText(all, "]");
      return all;
    }
    Node node;
    if (separator == '|') {
      node.kind = Node::Kind::kAlternatives;
      node.options = std::move(parts);
    } else {
      const auto when = OnlyText(parts.back());
      if (parts.size() > 3 || !when || !IsNumber(*when)) return std::nullopt;
      node.kind = Node::Kind::kChange;
      node.when = std::string(absl::StripAsciiWhitespace(*when));
      if (parts.size() == 2) node.options.emplace_back();
      parts.pop_back();
      for (Nodes& part : parts) node.options.push_back(std::move(part));
    }
    Nodes one;
    one.push_back(std::move(node));
    return one;
  }

  const absl::string_view text_;
  size_t at_ = 0;
  bool bars_ = true;
  int depth_ = 0;
  bool too_deep_ = false;
};

// The last step at which a change has not come yet.
int64_t LastBefore(const std::string& when, int64_t steps) {
  double value = 0;
  if (!absl::SimpleAtod(when, &value)) return steps;
  if (when.find('.') != when.npos) value *= static_cast<double>(steps);
  return static_cast<int64_t>(std::clamp(value, 0.0, static_cast<double>(steps)));
}

// `step` is one of the table's `steps`, counted from 1.
void TextAt(const Nodes& nodes, int64_t step, int64_t steps, std::string& out) {
  for (const Node& node : nodes) {
    switch (node.kind) {
      case Node::Kind::kText:
        out += node.text;
        break;
      case Node::Kind::kChange:
        TextAt(node.options[step <= LastBefore(node.when, steps) ? 0 : 1], step, steps, out);
        break;
      case Node::Kind::kAlternatives:
        TextAt(node.options[static_cast<size_t>(step - 1) % node.options.size()], step, steps, out);
        break;
    }
  }
}

struct WeightedText {
  absl::string_view text;
  double weight = 1;
};

// A part of several: "a cat :1.2".
WeightedText WithWeight(absl::string_view part) {
  part = absl::StripTrailingAsciiWhitespace(part);
  const size_t colon = part.rfind(':');
  if (colon == part.npos) return {part, 1};
  const absl::string_view number = absl::StripLeadingAsciiWhitespace(part.substr(colon + 1));
  double weight = 0;
  if (!IsNumber(number) || !absl::SimpleAtod(number, &weight)) return {part, 1};
  return {absl::StripTrailingAsciiWhitespace(part.substr(0, colon)), weight};
}

// Split at the word AND.
std::vector<WeightedText> Parts(absl::string_view prompt) {
  static constexpr absl::string_view kAnd = "AND";
  std::vector<WeightedText> parts;
  size_t begin = 0;
  for (size_t at = prompt.find(kAnd); at != prompt.npos; at = prompt.find(kAnd, at + 1)) {
    const size_t end = at + kAnd.size();
    if (WordEndsBefore(prompt, at) || WordGoesOn(prompt, end)) continue;
    parts.push_back(WithWeight(prompt.substr(begin, at - begin)));
    begin = end;
  }
  // Alone, a number at the end is text: "at 16:9".
  if (begin == 0) return {{prompt, 1}};
  parts.push_back(WithWeight(prompt.substr(begin)));
  return parts;
}

}  // namespace

PromptSchedule UnchangingPrompt(absl::string_view text) {
  PromptSchedule schedule;
  schedule.texts.emplace_back(text);
  schedule.steps = {{{0, 1}}};
  return schedule;
}

absl::StatusOr<PromptSchedule> ScheduleA1111Prompt(absl::string_view prompt, const ScheduledSteps& steps,
                                                   bool joins, absl::string_view field) {
  const std::vector<WeightedText> parts = joins ? Parts(prompt) : std::vector<WeightedText>{{prompt, 1}};
  if (parts.size() > kMaxPromptParts) {
    return FieldError(field, absl::StrCat("joins ", parts.size(), " prompts with AND; at most ",
                                          kMaxPromptParts, " are taken"));
  }
  PromptSchedule schedule;
  schedule.steps.resize(static_cast<size_t>(steps.run));
  const int64_t table_steps = steps.asked * steps.evaluations;
  std::map<std::string, size_t> index;
  for (const WeightedText& part : parts) {
    if (std::abs(part.weight) > kMaxPromptWeight) {
      return FieldError(
          field, absl::StrCat("joins a prompt with a weight of ", part.weight, "; such weights are from ",
                              -kMaxPromptWeight, " to ", kMaxPromptWeight));
    }
    Parser parser(part.text);
    const Nodes nodes = parser.Run();
    if (parser.too_deep()) {
      return FieldError(field, absl::StrCat("nests brackets deeper than ", kMaxPromptNesting));
    }
    for (int64_t step = 0; step < steps.run; ++step) {
      std::string text;
      TextAt(nodes, std::max<int64_t>(step * steps.evaluations, 1), table_steps, text);
      const auto [it, added] = index.try_emplace(std::move(text), schedule.texts.size());
      if (added) schedule.texts.push_back(it->first);
      if (schedule.texts.size() > kMaxScheduledTexts) {
        return FieldError(field, absl::StrCat("comes to more than ", kMaxScheduledTexts,
                                              " texts over its steps; use fewer alternatives"));
      }
      schedule.steps[static_cast<size_t>(step)].push_back({it->second, part.weight});
    }
  }
  return schedule;
}

}  // namespace latentd
