#include "families/tokenizers/added_tokens.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/text_file.h"
#include "families/config/json_config.h"
#include "families/tokenizers/unicode.h"

namespace latentd {
namespace {

constexpr int64_t kMaxTokenizerBytes = 64 << 20;
constexpr int64_t kMaxId = 1 << 24;
constexpr size_t kMaxTokens = 10'000;
constexpr absl::string_view kNames[] = {"bos_token", "eos_token", "pad_token", "unk_token"};

bool Exists(const std::string& path) {
  std::error_code ec;
  return std::filesystem::exists(path, ec);
}

// {"content": "<s>", "lstrip": false, …}
AddedToken ReadToken(JsonConfig& json, bool normalized) {
  AddedToken token{.text = json.String("content", "")};
  token.takes_left = json.Bool("lstrip", false);
  token.takes_right = json.Bool("rstrip", false);
  token.whole_word = json.Bool("single_word", false);
  token.normalized = json.Bool("normalized", normalized);
  return token;
}

class Reader {
 public:
  explicit Reader(const std::string& folder) : folder_(folder) {}

  absl::StatusOr<TokenizerSettings> Read() {
    RETURN_IF_ERROR(ReadConfig());
    if (!has_decoder_) {
      RETURN_IF_ERROR(ReadMap());
      RETURN_IF_ERROR(ReadAdded());
      RETURN_IF_ERROR(ReadTokenizer());
    }
    if (by_id_.size() > kMaxTokens) return Corrupt(absl::StrCat("has ", by_id_.size(), " added tokens"));
    for (auto& [id, token] : by_id_) {
      if (id < 0 || id >= kMaxId) return Corrupt(absl::StrCat("token id ", id, " is out of range"));
      token.id = id;
      for (auto& [name, named] : settings_.named) {
        if (named.text == token.text) named = token;
      }
      if (!token.text.empty()) settings_.added.push_back(std::move(token));
    }
    return std::move(settings_);
  }

 private:
  absl::Status Corrupt(absl::string_view what) const {
    return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE",
                     absl::StrCat(ShortPath(folder_), ": ", what), {{"file", ShortPath(folder_)}});
  }

  // A name's value is a text, or a token.
  absl::Status ReadNames(JsonConfig& json) {
    for (const absl::string_view name : kNames) {
      if (!json.Has(name)) continue;
      AddedToken token{.text = json.Token(name, "")};
      if (json.IsObject(name)) {
        JsonConfig object = json.Object(name);
        token = ReadToken(object, /*normalized=*/false);
        token.normalized =
            false;  // transformers looks for named tokens in the text as it is, whatever this says
        RETURN_IF_ERROR(object.status());
      }
      if (!token.text.empty()) settings_.named[std::string(name)] = std::move(token);
    }
    return json.status();
  }

  absl::Status ReadConfig() {
    const std::string path = folder_ + "/tokenizer_config.json";
    if (!Exists(path)) return absl::OkStatus();
    ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path));
    RETURN_IF_ERROR(ReadNames(json));
    settings_.model_max_length = json.Double("model_max_length", 0, 0, 1e308);
    settings_.extra_ids = json.Int("extra_ids", -1, -1, 1000);
    has_decoder_ = json.Has("added_tokens_decoder");
    for (auto& [key, object] : json.Objects("added_tokens_decoder")) {
      int64_t id = 0;
      if (!absl::SimpleAtoi(key, &id)) return Corrupt("added_tokens_decoder has a key that is no number");
      by_id_[id] = ReadToken(object, /*normalized=*/false);
      RETURN_IF_ERROR(object.status());
    }
    return json.status();
  }

  absl::Status ReadMap() {
    const std::string path = folder_ + "/special_tokens_map.json";
    if (!Exists(path)) return absl::OkStatus();
    ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path));
    return ReadNames(json);
  }

  absl::Status ReadAdded() {
    const std::string path = folder_ + "/added_tokens.json";
    if (!Exists(path)) return absl::OkStatus();
    ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path));
    for (const auto& [text, id] : json.IntMap("")) {
      const bool special =
          std::any_of(settings_.named.begin(), settings_.named.end(),
                      [&, &wanted = text](const auto& named) { return named.second.text == wanted; });
      by_id_[id] = {.text = text, .normalized = !special};
    }
    return json.status();
  }

  absl::Status ReadTokenizer() {
    const std::string path = folder_ + "/tokenizer.json";
    if (!Exists(path)) return absl::OkStatus();
    ASSIGN_OR_RETURN(JsonConfig json, JsonConfig::Load(path, kMaxTokenizerBytes));
    for (auto& [key, object] : json.Objects("added_tokens")) {
      const int64_t id = object.Int("id", -1, -1, kMaxId);
      by_id_[id] = ReadToken(object, /*normalized=*/false);
      RETURN_IF_ERROR(object.status());
    }
    return json.status();
  }

  const std::string folder_;
  TokenizerSettings settings_;
  std::map<int64_t, AddedToken> by_id_;
  bool has_decoder_ = false;
};

}  // namespace

absl::StatusOr<TokenizerSettings> TokenizerSettings::Load(const std::string& folder) {
  return Reader(folder).Read();
}

AddedToken TokenizerSettings::Named(const std::string& name, const std::string& otherwise) const {
  const auto found = named.find(name);
  if (found != named.end()) return found->second;
  const auto same =
      std::find_if(added.begin(), added.end(), [&](const AddedToken& t) { return t.text == otherwise; });
  return same != added.end() ? *same : AddedToken{.text = otherwise};
}

std::vector<TextPiece> SplitAtTokens(absl::string_view text, const std::vector<AddedToken>& tokens) {
  std::array<std::vector<int>, 256> by_first;  // byte
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!tokens[i].text.empty())
      by_first[static_cast<unsigned char>(tokens[i].text[0])].push_back(static_cast<int>(i));
  }
  std::vector<TextPiece> pieces;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    int found = -1;
    size_t size = 0;
    for (const int i : by_first[static_cast<unsigned char>(text[at])]) {
      const std::string& token = tokens[static_cast<size_t>(i)].text;
      if (token.size() > size && absl::StartsWith(text.substr(at), token)) found = i, size = token.size();
    }
    if (found < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens[static_cast<size_t>(found)];
    const size_t end = at + size;
    if (token.whole_word && (WordEndsBefore(text, at) || WordGoesOn(text, end))) {
      at = end;
      continue;
    }
    const absl::string_view before = text.substr(begin, at - begin), behind = text.substr(end);
    const size_t left = token.takes_left ? TrailingWhitespace(before) : 0;
    const size_t right = token.takes_right ? LeadingWhitespace(behind) : 0;
    if (before.size() > left) pieces.push_back({before.substr(0, before.size() - left), -1});
    pieces.push_back({text.substr(at - left, left + size + right), found});
    at = begin = end + right;
  }
  if (begin < text.size()) pieces.push_back({text.substr(begin), -1});
  return pieces;
}

void AddedTokens::Read(absl::string_view given, const std::function<std::string(absl::string_view)>& clean,
                       const std::function<void(int64_t)>& token,
                       const std::function<void(absl::string_view)>& text) const {
  for (const TextPiece& piece : SplitAtTokens(given, plain)) {
    if (piece.token >= 0) {
      token(plain[static_cast<size_t>(piece.token)].id);
      continue;
    }
    const std::string cleaned = clean(piece.text);
    for (const TextPiece& part : SplitAtTokens(cleaned, normalized)) {
      if (part.token >= 0) {
        token(normalized[static_cast<size_t>(part.token)].id);
      } else {
        text(part.text);
      }
    }
  }
}

}  // namespace latentd
