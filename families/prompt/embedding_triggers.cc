#include "families/prompt/embedding_triggers.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "families/tokenizers/unicode.h"

namespace latentd {
namespace {

constexpr absl::string_view kWord = "embedding:";
constexpr size_t kMaxName = 512;  // no catalog has a longer one

bool IsAlnum(char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)); }
bool IsNameSign(char c) { return c == '.' || c == '_' || c == '-' || c == '/'; }
bool IsInsideOfCharacter(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Behind "embedding:", where nothing shows the end of a name: letters and numbers of any script, and few
// signs.
absl::string_view WordAt(absl::string_view text, size_t begin) {
  size_t end = begin;
  while (end < text.size() && (IsNameSign(text[end]) || WordGoesOn(text, end))) {
    do ++end;
    while (end < text.size() && IsInsideOfCharacter(text[end]));
  }
  return text.substr(begin, end - begin);
}

// Between brackets a name may have whatever names have, but for these.
absl::string_view BracketedAt(absl::string_view text, size_t begin) {
  const absl::string_view rest = text.substr(begin, kMaxName + 1);
  const size_t end = rest.find_first_of("<>");
  return end == absl::string_view::npos || rest[end] == '<' ? absl::string_view() : rest.substr(0, end);
}

bool IsNumber(absl::string_view name) {
  return std::all_of(name.begin(), name.end(),
                     [](char c) { return absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '.'; });
}

// What of `name` is the name. `next` is the character behind it, for compel's ".attend(".
absl::string_view WithoutSigns(absl::string_view name, char next,
                               absl::FunctionRef<bool(absl::string_view)> known) {
  constexpr absl::string_view kAttend = ".attend";
  absl::string_view rest = name;
  if (next == '(' && absl::EndsWith(rest, kAttend) && !known(rest)) rest.remove_suffix(kAttend.size());
  while (!known(rest) && !rest.empty() && (rest.back() == '-' || rest.back() == '.')) rest.remove_suffix(1);
  return rest;
}

// A mark is this byte, which UTF-8 has no use for, and numbers as bytes that no syntax knows: the first row
// in three, and the count in two, of 6 bits each.
constexpr char kMark = '\xff';
constexpr size_t kFirstDigits = 3, kCountDigits = 2, kMarkSize = 1 + kFirstDigits + kCountDigits;
constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD, which the tokenizer sees in bad bytes

void PutNumber(int64_t value, size_t digits, std::string& out) {
  for (size_t i = digits; i-- > 0;) out += static_cast<char>(0x80 | ((value >> (6 * i)) & 0x3F));
}

int64_t NumberOf(absl::string_view digits) {
  int64_t value = 0;
  for (const char c : digits) value = value << 6 | (static_cast<unsigned char>(c) & 0x3F);
  return value;
}

}  // namespace

std::vector<EmbeddingTrigger> FindEmbeddingTriggers(absl::string_view prompt,
                                                    absl::FunctionRef<bool(absl::string_view)> is_known) {
  auto known = [&](absl::string_view name) { return name.size() <= kMaxName && is_known(name); };
  std::vector<EmbeddingTrigger> found;
  for (size_t at = 0; at < prompt.size();) {
    EmbeddingTrigger trigger{.begin = at, .size = 0, .name = {}, .known = false};
    if (prompt[at] == '<') {
      const absl::string_view name = BracketedAt(prompt, at + 1);
      if (!name.empty() && known(name)) {
        trigger.size = name.size() + 2;
        trigger.name = std::string(name);
        trigger.known = true;
      }
    } else if (prompt[at] == 'e' && absl::StartsWith(prompt.substr(at), kWord) &&
               (at == 0 || (!IsAlnum(prompt[at - 1]) && prompt[at - 1] != '_'))) {
      const absl::string_view all = WordAt(prompt, at + kWord.size());
      const size_t end = at + kWord.size() + all.size();
      const absl::string_view name = WithoutSigns(all, end < prompt.size() ? prompt[end] : ' ', known);
      trigger.known = !name.empty() && known(name);
      // "(embedding:1.2)" is a word with a weight, and "embedding: x" two words.
      if (trigger.known || (!name.empty() && !IsNumber(name))) {
        trigger.size = kWord.size() + name.size();
        trigger.name = std::string(name);
      }
    }
    at += std::max<size_t>(trigger.size, 1);
    if (trigger.size > 0) found.push_back(std::move(trigger));
  }
  return found;
}

std::string MarkEmbeddings(absl::string_view prompt,
                           const std::map<std::string, EmbeddingRows, std::less<>>& rows) {
  std::string marked;
  size_t at = 0;
  auto copy_until = [&](size_t end) {
    for (; at < end; ++at) {
      if (prompt[at] == kMark) {
        absl::StrAppend(&marked, kReplacement);
      } else {
        marked += prompt[at];
      }
    }
  };
  const auto known = [&](absl::string_view name) { return rows.find(name) != rows.end(); };
  for (const EmbeddingTrigger& trigger : FindEmbeddingTriggers(prompt, known)) {
    if (!trigger.known) continue;
    copy_until(trigger.begin);
    const EmbeddingRows& its = rows.find(trigger.name)->second;
    marked += kMark;
    PutNumber(its.first, kFirstDigits, marked);
    PutNumber(its.count, kCountDigits, marked);
    at += trigger.size;
  }
  copy_until(prompt.size());
  return marked;
}

std::vector<PromptToken> TokenizeMarked(const ClipTokenizer& tokenizer, absl::string_view text) {
  std::vector<PromptToken> tokens;
  while (true) {
    const size_t mark = text.find(kMark);
    for (const int64_t id : tokenizer.Tokenize(text.substr(0, mark))) tokens.push_back({id, false});
    if (mark == absl::string_view::npos || text.size() - mark < kMarkSize) return tokens;
    const int64_t first = NumberOf(text.substr(mark + 1, kFirstDigits));
    const int64_t count = NumberOf(text.substr(mark + 1 + kFirstDigits, kCountDigits));
    for (int64_t i = 0; i < count; ++i) tokens.push_back({kFirstRowId + first + i, i > 0});
    text.remove_prefix(mark + kMarkSize);
  }
}

}  // namespace latentd
