// Tokenizers against transformers: every layout of a folder, and every character.
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "families/tokenizers/clip_tokenizer.h"
#include "families/tokenizers/t5_tokenizer.h"
#include "families/tokenizers/unicode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace latentd {
namespace {

std::string GoldenPath(const std::string& file) {
  const char* folder = std::getenv("LATENTD_GOLDENS");
  return absl::StrCat(folder == nullptr ? "build/goldens" : folder, "/", file);
}

nlohmann::json Case(const std::string& name) {
  return nlohmann::json::parse(std::ifstream(GoldenPath(absl::StrCat("cases/", name, ".json"))));
}

template <typename Load>
void Compare(const std::string& name, const Load& load) {
  const nlohmann::json golden = Case(name);
  const auto texts = golden.at("texts").get<std::vector<std::string>>();
  ASSERT_FALSE(golden.at("folders").empty());
  for (const nlohmann::json& one : golden.at("folders")) {
    const auto folder = one.at("folder").get<std::string>();
    const auto tokenizer = load(GoldenPath(folder));
    ASSERT_TRUE(tokenizer.ok()) << folder << ": " << tokenizer.status();
    const auto ids = one.at("ids").get<std::vector<std::vector<int64_t>>>();
    for (size_t i = 0; i < texts.size(); ++i) {
      EXPECT_EQ((*tokenizer)->Encode(texts[i], golden.at("length")), ids[i])
          << folder << " " << i << ": " << texts[i];
    }
  }
}

TEST(TokenizerLayouts, ClipGivesTheIdsOfTransformersWhateverWroteItsFolder) {
  Compare("tokenizer-layouts-clip", [](const std::string& folder) { return ClipTokenizer::Load(folder); });
}

TEST(TokenizerLayouts, T5GivesTheIdsOfTransformersWhateverWroteItsFolder) {
  Compare("tokenizer-layouts-t5", [](const std::string& folder) { return T5Tokenizer::Load(folder, 1000); });
}

std::string Utf8(int64_t code) {
  std::string out;
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  const int tail = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  out += static_cast<char>((0xFF00 >> (tail + 1)) | (code >> (6 * tail)));
  for (int i = tail - 1; i >= 0; --i) out += static_cast<char>(0x80 | ((code >> (6 * i)) & 0x3F));
  return out;
}

// "aXXa" has as many words as letters, numbers and other signs make of it.
TEST(Tokenizers, EveryCharacterIsOfTheClassThatItHasInTransformers) {
  const nlohmann::json golden = Case("unicode");
  const auto starts = golden.at("starts").get<std::vector<int64_t>>();
  const auto kinds = golden.at("kinds").get<std::string>();
  std::vector<std::string> wrong;
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t end = i + 1 < starts.size() ? starts[i + 1] : 0x110000;
    for (int64_t code = starts[i]; code < end; ++code) {
      if (code >= 0xD800 && code < 0xE000) continue;
      const std::string one = Utf8(code);
      const size_t words = ClipWords(absl::StrCat("a", one, one, "a")).size();
      const char kind = words == 1 ? 'L' : words == 2 ? 'W' : words == 4 ? 'N' : 'O';
      if (kind != kinds[i] && wrong.size() < 20)
        wrong.push_back(absl::StrCat(absl::Hex(code), " is ", std::string(1, kind)));
    }
  }
  EXPECT_THAT(wrong, testing::IsEmpty());
}

TEST(Tokenizers, EveryCapitalBecomesWhatItBecomesInTransformers) {
  const nlohmann::json golden = Case("unicode");
  const auto capitals = golden.at("capitals").get<std::vector<int64_t>>();
  const auto smalls = golden.at("smalls").get<std::vector<std::string>>();
  ASSERT_EQ(capitals.size(), smalls.size());
  for (size_t i = 0; i < capitals.size(); ++i) {
    EXPECT_EQ(LowerCase(Nfc(Utf8(capitals[i]))), smalls[i]) << absl::StrCat(absl::Hex(capitals[i]));
  }
}

}  // namespace
}  // namespace latentd
