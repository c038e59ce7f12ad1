// What needs no oracle: broken files, and clean-up of text. Ids are compared in tests/goldens.
#include <utf8proc.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/tokenizers/added_tokens.h"
#include "families/tokenizers/clip_tokenizer.h"
#include "families/tokenizers/t5_tokenizer.h"
#include "families/tokenizers/unicode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

class TokenizerTest : public testing::Test {
 protected:
  TokenizerTest() {
    folder_ = absl::StrCat(testing::TempDir(), "/tokenizer_test.", getpid());
    std::filesystem::create_directories(folder_);
  }
  ~TokenizerTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ + "/" + name) << text;
  }

  std::string folder_;
};

// A vocabulary of a few letters: enough to see merges.
constexpr char kVocabulary[] =
    R"({"a": 0, "b": 1, "a</w>": 2, "b</w>": 3, "ab</w>": 4, "aa": 5, "<|startoftext|>": 6, "<|endoftext|>": 7, "!": 8})";
constexpr char kMerges[] = "#version: 0.2\na b</w>\na a\n";

TEST_F(TokenizerTest, ClipMergesByRankAndPadsToTheLength) {
  Write("vocab.json", kVocabulary);
  Write("merges.txt", kMerges);
  auto tokenizer = ClipTokenizer::Load(folder_);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT((*tokenizer)->Encode("AB aab", 9), ElementsAre(6, 4, 0, 4, 7, 7, 7, 7, 7));
  EXPECT_THAT((*tokenizer)->Encode("aaaa", 6), ElementsAre(6, 5, 0, 2, 7, 7));
  EXPECT_THAT((*tokenizer)->Encode("ab ab ab ab", 4), ElementsAre(6, 4, 4, 7));
  EXPECT_THAT((*tokenizer)->Encode("", 3), ElementsAre(6, 7, 7));
  EXPECT_EQ((*tokenizer)->model_max_length(), 77);
}

TEST_F(TokenizerTest, ClipReadsTokenizerJsonAndTheConfigsPadToken) {
  Write("tokenizer.json",
        absl::StrCat(R"({"model": {"vocab": )", kVocabulary, R"(, "merges": ["a b</w>", ["a", "a"]]}})"));
  Write("tokenizer_config.json",
        R"({"pad_token": {"content": "!"}, "model_max_length": 1000000000000000019884624838656})");
  auto tokenizer = ClipTokenizer::Load(folder_);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT((*tokenizer)->Encode("ab", 5), ElementsAre(6, 4, 7, 8, 8));
  EXPECT_EQ((*tokenizer)->model_max_length(), 77);
}

TEST_F(TokenizerTest, ClipTakesWhatIsNotInTheVocabularyAsUnknown) {
  Write("vocab.json", kVocabulary);
  Write("merges.txt", kMerges);
  auto tokenizer = ClipTokenizer::Load(folder_);
  EXPECT_THAT((*tokenizer)->Encode("\xff\xfe zz", 20), SizeIs(20));
}

TEST_F(TokenizerTest, ClipRefusesBrokenFiles) {
  EXPECT_EQ(ErrorReason(ClipTokenizer::Load(folder_).status()), "MISSING_FILE");
  Write("vocab.json", kVocabulary);
  EXPECT_EQ(ErrorReason(ClipTokenizer::Load(folder_).status()), "MISSING_FILE");
  for (const char* merges : {"a b c\n", "a\n", "x y\n", "a b\n"}) {
    Write("merges.txt", merges);
    EXPECT_EQ(ErrorReason(ClipTokenizer::Load(folder_).status()), "CORRUPT_FILE") << merges;
  }
  Write("merges.txt", kMerges);
  for (const char* vocabulary :
       {"", "[]", "{\"a\": \"b\"}", "{\"a\": -1}", "{\"a\": 0}", "{\"a\": 99999999999}"}) {
    Write("vocab.json", vocabulary);
    EXPECT_EQ(ErrorReason(ClipTokenizer::Load(folder_).status()), "CORRUPT_FILE") << vocabulary;
  }
}

TEST_F(TokenizerTest, T5RefusesBrokenFiles) {
  EXPECT_EQ(ErrorReason(T5Tokenizer::Load(folder_, 100).status()), "MISSING_FILE");
  for (const std::string& bytes : {std::string(), std::string("not a model"), std::string(1000, '\xff')}) {
    Write("spiece.model", bytes);
    EXPECT_EQ(ErrorReason(T5Tokenizer::Load(folder_, 100).status()), "CORRUPT_FILE");
  }
}

TEST(UnicodeTest, CleansUpAsTokenizersAsk) {
  EXPECT_EQ(Nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(LowerCase("\u00c5\u0130\u03a3X"), "\u00e5i\u0307\u03c3x");
  EXPECT_EQ(CollapseWhitespace(" a\t\n\u3000b\u00a0"), " a b ");
}

// Whatever order marks are in: the whole of utf8proc says what the form is.
TEST(UnicodeTest, TheComposedFormIsThatOfTheLibrary) {
  std::vector<utf8proc_int32_t> codes = {'a',    'e',    'o',    'q',    0x1100, 0x1161,
                                         0x11A8, 0xAC00, 0x0915, 0x093C, 0x1E69, 0x2126};
  for (utf8proc_int32_t code = 0x300; code < 0x370; ++code) codes.push_back(code);
  for (utf8proc_int32_t code = 0x340; code < 0xFB50; code += 7) {
    if (code < 0xD800 || code > 0xDFFF) codes.push_back(code);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    std::string text;
    for (size_t n = random() % 12; n > 0; --n) {
      utf8proc_uint8_t bytes[4];
      // Marks as often as all else.
      const utf8proc_int32_t code = codes[random() % 2 == 0 ? random() % 124 : random() % codes.size()];
      text.append(reinterpret_cast<const char*>(bytes),
                  static_cast<size_t>(utf8proc_encode_char(code, bytes)));
    }
    utf8proc_uint8_t* mapped = nullptr;
    const auto size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                   static_cast<utf8proc_ssize_t>(text.size()), &mapped,
                                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    ASSERT_GE(size, 0);
    EXPECT_EQ(Nfc(text), absl::string_view(reinterpret_cast<const char*>(mapped), static_cast<size_t>(size)));
    std::free(mapped);
  }
}

// Where marks are sorted by moving each one place at a time, this takes hours.
TEST(UnicodeTest, ManyMarksTakeNoLongerThanOtherText) {
  std::string text = "a", below, above;
  for (int i = 0; i < 1'000'000; ++i) {
    absl::StrAppend(&text, "\u0335\u0317", i % 2 == 0 ? "\u0334" : "");
    below += i % 2 == 0 ? "\u0335\u0334" : "\u0335";
    above += "\u0317";
  }
  EXPECT_EQ(Nfc(text), absl::StrCat("a", below, above));
}

std::vector<std::string> Split(absl::string_view text, const std::vector<AddedToken>& tokens) {
  std::vector<std::string> pieces;
  for (const TextPiece& piece : SplitAtTokens(text, tokens)) {
    pieces.push_back(absl::StrCat(piece.token < 0 ? "" : absl::StrCat(piece.token, "="), piece.text));
  }
  return pieces;
}

// What tokenizers.Tokenizer does with such added tokens.
TEST(AddedTokens, TheLongestCountsAndSpaceGoesAsTheySay) {
  EXPECT_THAT(Split("x<a>y<a>>", {{.text = "<a>"}, {.text = "<a>>"}}),
              ElementsAre("x", "0=<a>", "y", "1=<a>>"));
  EXPECT_THAT(Split("x <a>  y", {{.text = "<a>", .takes_left = true}}), ElementsAre("x", "0= <a>", "  y"));
  EXPECT_THAT(Split("x <a>  y", {{.text = "<a>", .takes_right = true}}), ElementsAre("x ", "0=<a>  ", "y"));
  EXPECT_THAT(Split("cat cats cat", {{.text = "cat", .whole_word = true}}),
              ElementsAre("0=cat", " cats ", "0=cat"));
  EXPECT_THAT(Split("abc", {{.text = ""}}), ElementsAre("abc"));
}

TEST_F(TokenizerTest, AddedTokensComeFromWhateverFileSaysThem) {
  const auto ids = [&](absl::string_view text) {
    const auto tokenizer = ClipTokenizer::Load(folder_);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return tokenizer.ok() ? (*tokenizer)->Tokenize(text) : std::vector<int64_t>();
  };
  Write("vocab.json", kVocabulary);
  Write("merges.txt", kMerges);
  EXPECT_THAT(ids("a<cat>"), SizeIs(testing::Gt(2)));
  Write("added_tokens.json", R"({"<cat>": 9, "<Dog>": 10})");
  EXPECT_THAT(ids("a<cat>a <dog>"), ElementsAre(2, 9, 2, 10));  // they are looked for after clean-up
  Write("special_tokens_map.json",
        R"({"pad_token": "!", "eos_token": {"content": "<|endoftext|>", "rstrip": true}})");
  auto tokenizer = ClipTokenizer::Load(folder_);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->pad_id(), 8);
  EXPECT_EQ((*tokenizer)->vocabulary_size(), 11);
  Write("tokenizer_config.json", R"({"added_tokens_decoder": {"11": {"content": "<x>", "special": true}}})");
  EXPECT_THAT(ids("<x>a"), ElementsAre(11, 2));
  EXPECT_EQ((*ClipTokenizer::Load(folder_))->pad_id(), 7);  // the decoder's presence makes the map old
  for (const char* broken :
       {R"({"added_tokens_decoder": {"x": {}}})", R"({"added_tokens_decoder": {"1": 2}})",
        R"({"added_tokens_decoder": {"-1": {"content": "y"}}})"}) {
    Write("tokenizer_config.json", broken);
    EXPECT_EQ(ErrorReason(ClipTokenizer::Load(folder_).status()), "CORRUPT_FILE") << broken;
  }
}

}  // namespace
}  // namespace latentd
