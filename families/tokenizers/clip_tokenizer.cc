#include "families/tokenizers/clip_tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <queue>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "cache/base/text_file.h"
#include "families/config/json_config.h"
#include "families/tokenizers/unicode.h"
#include "families/tokenizers/unicode_tables.h"

namespace latentd {
namespace {

constexpr int64_t kMaxTokenizerBytes = 64 << 20;
constexpr int64_t kMaxId = 1 << 24;
constexpr char kWordEnd[] = "</w>";

#define LATENTD_WHITE_SPACE \
  R"(\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})"

#define LATENTD_LETTER R"([\p{L})" LATENTD_NEW_LETTERS R"(])"
#define LATENTD_NUMBER R"([\p{N})" LATENTD_NEW_NUMBERS R"(])"

// What becomes a word; everything between the matches is dropped.
const Pattern& WordPattern() {
  static const Pattern* pattern = new Pattern(
      R"(<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|)" LATENTD_LETTER R"(+|)" LATENTD_NUMBER
      R"(|[^\p{L}\p{N})" LATENTD_NEW_LETTERS LATENTD_NEW_NUMBERS LATENTD_WHITE_SPACE R"(]+)");
  return *pattern;
}

// A second cut that the byte-level step makes inside a word. It only matters for the two special tokens
// written in another case, which the first pattern keeps whole.
const Pattern& BytePattern() {
  static const Pattern* pattern =
      new Pattern(R"('s|'t|'re|'ve|'m|'ll|'d|)" LATENTD_LETTER R"(+|)" LATENTD_NUMBER
                  R"(+|[^\p{L}\p{N})" LATENTD_NEW_LETTERS LATENTD_NEW_NUMBERS LATENTD_WHITE_SPACE R"(]+)");
  return *pattern;
}

#undef LATENTD_WHITE_SPACE
#undef LATENTD_LETTER
#undef LATENTD_NUMBER

// The printable stand-in for a byte, in UTF-8: printable Latin-1 characters stand for themselves, all other
// bytes for U+0100 onwards. Source: the byte-level alphabet of GPT-2's encoder.
std::array<std::string, 256> ByteAlphabet() {
  std::array<std::string, 256> alphabet;
  int spare = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || (byte >= 174 && byte <= 255);
    const int code = printable ? byte : spare++;
    std::string& out = alphabet[static_cast<size_t>(byte)];
    if (code < 0x80) {
      out = static_cast<char>(code);
    } else {
      out = {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))};
    }
  }
  return alphabet;
}

std::string CleanUp(absl::string_view text) { return LowerCase(CollapseWhitespace(Nfc(text))); }

absl::Status Corrupt(const std::string& label, absl::string_view what) {
  return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE", absl::StrCat(label, ": ", what),
                   {{"file", label}});
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ReadMerges(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxTokenizerBytes));
  std::vector<std::pair<std::string, std::string>> merges;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    absl::ConsumeSuffix(&line, "\r");
    if (line.empty() || absl::ConsumePrefix(&line, "#version")) continue;
    const std::vector<std::string> parts = absl::StrSplit(line, ' ');
    if (parts.size() != 2) return Corrupt(ShortPath(path), "a line is not a pair of tokens");
    merges.emplace_back(parts[0], parts[1]);
  }
  return merges;
}

}  // namespace

std::vector<absl::string_view> ClipWords(absl::string_view clean) { return WordPattern().FindAll(clean); }

absl::StatusOr<std::unique_ptr<const ClipTokenizer>> ClipTokenizer::Load(const std::string& folder) {
  std::unique_ptr<ClipTokenizer> tokenizer(new ClipTokenizer());
  const std::string vocabulary_path = folder + "/vocab.json";
  const std::string single_path = folder + "/tokenizer.json";
  std::error_code ec;
  if (!std::filesystem::exists(vocabulary_path, ec) && std::filesystem::exists(single_path, ec)) {
    ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(single_path, kMaxTokenizerBytes));
    JsonConfig model = json.Object("model");
    auto vocabulary = model.IntMap("vocab");
    auto merges = model.StringPairs("merges");
    RETURN_IF_ERROR(json.status());
    RETURN_IF_ERROR(model.status());
    RETURN_IF_ERROR(tokenizer->SetVocabulary(vocabulary, merges, json.label()));
  } else {
    ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(vocabulary_path, kMaxTokenizerBytes));
    auto vocabulary = json.IntMap("");
    RETURN_IF_ERROR(json.status());
    ASSIGN_OR_RETURN(auto merges, ReadMerges(folder + "/merges.txt"));
    RETURN_IF_ERROR(tokenizer->SetVocabulary(vocabulary, merges, json.label()));
  }

  ASSIGN_OR_RETURN(const TokenizerSettings settings, TokenizerSettings::Load(folder));
  // A huge number there means "no limit".
  if (settings.model_max_length >= 2 && settings.model_max_length <= 4096) {
    tokenizer->model_max_length_ = static_cast<int64_t>(settings.model_max_length);
  }
  for (const AddedToken& token : settings.added) tokenizer->Add(token);
  const AddedToken eos = settings.Named("eos_token", "<|endoftext|>");
  for (const auto& [token, id] :
       {std::pair(settings.Named("bos_token", "<|startoftext|>"), &tokenizer->bos_),
        std::pair(eos, &tokenizer->eos_), std::pair(settings.Named("pad_token", eos.text), &tokenizer->pad_),
        std::pair(settings.Named("unk_token", eos.text), &tokenizer->unknown_)}) {
    auto it = tokenizer->vocabulary_.find(token.text);
    if (it == tokenizer->vocabulary_.end()) {
      return Corrupt(ShortPath(folder), absl::StrCat("the vocabulary has no token ", token.text));
    }
    *id = it->second;
    tokenizer->Add(token);
  }
  tokenizer->word_ends_.resize(static_cast<size_t>(tokenizer->vocabulary_size_), true);

  const std::array<std::string, 256> alphabet = ByteAlphabet();
  for (size_t byte = 0; byte < 256; ++byte) {
    auto id_of = [&](const std::string& token) {
      auto it = tokenizer->vocabulary_.find(token);
      return it == tokenizer->vocabulary_.end() ? tokenizer->unknown_ : it->second;
    };
    tokenizer->byte_ids_[byte] = id_of(alphabet[byte]);
    tokenizer->last_byte_ids_[byte] = id_of(alphabet[byte] + kWordEnd);
  }
  return std::unique_ptr<const ClipTokenizer>(std::move(tokenizer));
}

void ClipTokenizer::Add(AddedToken token) {
  const auto [it, fresh] = vocabulary_.try_emplace(token.text, static_cast<int32_t>(token.id));
  if (fresh && token.id < 0) return vocabulary_.erase(it), void();
  token.id = it->second;
  vocabulary_size_ = std::max(vocabulary_size_, token.id + 1);
  if (token.normalized) token.text = CleanUp(token.text);
  std::vector<AddedToken>& tokens = token.normalized ? added_.normalized : added_.plain;
  const bool known =
      std::any_of(tokens.begin(), tokens.end(), [&](const AddedToken& t) { return t.text == token.text; });
  if (!known) tokens.push_back(std::move(token));
}

absl::Status ClipTokenizer::SetVocabulary(const std::vector<std::pair<std::string, int64_t>>& pairs,
                                          const std::vector<std::pair<std::string, std::string>>& merges,
                                          const std::string& label) {
  for (const auto& [token, id] : pairs) {
    if (id < 0 || id >= kMaxId) return Corrupt(label, absl::StrCat("token id ", id, " is out of range"));
    vocabulary_[token] = static_cast<int32_t>(id);
    vocabulary_size_ = std::max(vocabulary_size_, id + 1);
  }
  word_ends_.resize(static_cast<size_t>(vocabulary_size_));
  for (const auto& [token, id] : pairs) word_ends_[static_cast<size_t>(id)] = absl::EndsWith(token, kWordEnd);
  int32_t rank = 0;
  for (const auto& [left, right] : merges) {
    const auto a = vocabulary_.find(left), b = vocabulary_.find(right), ab = vocabulary_.find(left + right);
    if (a == vocabulary_.end() || b == vocabulary_.end() || ab == vocabulary_.end()) {
      return Corrupt(label, absl::StrCat("the merge \"", left, " ", right, "\" is not in the vocabulary"));
    }
    merges_[IdPair(a->second, b->second)] = Merge{rank++, ab->second};
  }
  return absl::OkStatus();
}

bool ClipTokenizer::IsOneOf(int64_t id, absl::string_view characters) const {
  return std::any_of(characters.begin(), characters.end(),
                     [&](char c) { return last_byte_ids_[static_cast<uint8_t>(c)] == id; });
}

std::vector<int64_t> ClipTokenizer::Encode(absl::string_view text, int64_t length) const {
  std::vector<int64_t> ids = Tokenize(text);
  const auto limit = static_cast<size_t>(length);
  ids.insert(ids.begin(), bos_);
  if (ids.size() > limit - 1) ids.resize(limit - 1);
  ids.push_back(eos_);
  ids.resize(limit, pad_);
  return ids;
}

std::vector<int64_t> ClipTokenizer::Tokenize(absl::string_view text) const {
  std::vector<int64_t> ids;
  const std::string valid = ValidUtf8(text);
  added_.Read(
      valid, CleanUp, [&](int64_t id) { ids.push_back(id); },
      [&](absl::string_view clean) {
        for (absl::string_view word : ClipWords(clean)) {
          for (absl::string_view part : BytePattern().FindAll(word)) EncodeWord(part, ids);
        }
      });
  return ids;
}

// The invariant: `queue` holds every pair of neighbours that a merge exists for, and perhaps pairs that are
// no longer neighbours, which are recognised when they come up. The merge of lowest rank goes first, of
// equal ones the leftmost.
void ClipTokenizer::EncodeWord(absl::string_view word, std::vector<int64_t>& ids) const {
  struct Symbol {
    int32_t id;
    int prev, next;  // -1 at the ends
    bool gone = false;
  };
  const int n = static_cast<int>(word.size());
  std::vector<Symbol> symbols(word.size());
  for (int i = 0; i < n; ++i) {
    const auto byte = static_cast<uint8_t>(word[static_cast<size_t>(i)]);
    symbols[static_cast<size_t>(i)] = {i + 1 < n ? byte_ids_[byte] : last_byte_ids_[byte], i - 1,
                                       i + 1 < n ? i + 1 : -1};
  }
  using Candidate = std::tuple<int32_t, int, int32_t>;  // rank, left symbol, merged id
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<Candidate>> queue;
  auto propose = [&](int left) {
    const Symbol& a = symbols[static_cast<size_t>(left)];
    if (a.next < 0) return;
    auto it = merges_.find(IdPair(a.id, symbols[static_cast<size_t>(a.next)].id));
    if (it != merges_.end()) queue.emplace(it->second.rank, left, it->second.id);
  };
  for (int i = 0; i < n; ++i) propose(i);
  while (!queue.empty()) {
    const auto [rank, left, id] = queue.top();
    queue.pop();
    Symbol& a = symbols[static_cast<size_t>(left)];
    if (a.gone || a.next < 0) continue;
    Symbol& b = symbols[static_cast<size_t>(a.next)];
    auto it = merges_.find(IdPair(a.id, b.id));
    if (it == merges_.end() || it->second.id != id) continue;
    a.id = id;
    b.gone = true;
    a.next = b.next;
    if (a.next >= 0) symbols[static_cast<size_t>(a.next)].prev = left;
    if (a.prev >= 0) propose(a.prev);
    propose(left);
  }
  for (const Symbol& symbol : symbols) {
    if (!symbol.gone) ids.push_back(symbol.id);
  }
}

}  // namespace latentd
