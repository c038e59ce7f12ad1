// What needs no oracle. compel's syntax and embeddings are compared with compel in tests/goldens.
#include "families/prompt/prompt.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/prompt/embedding_triggers.h"
#include "families/prompt/prompt_windows.h"
#include "families/tokenizers/clip_tokenizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::DoubleEq;
using testing::ElementsAre;
using testing::Field;
using testing::HasSubstr;

PromptText TextOf(absl::string_view prompt, PromptSyntax syntax) {
  auto parsed = ParsePrompt(prompt, syntax, "params.prompt");
  EXPECT_TRUE(parsed.ok()) << prompt << ": " << parsed.status();
  if (!parsed.ok()) return {};
  EXPECT_EQ(parsed->parts.size(), 1u) << prompt;
  return parsed->parts[0].texts[0];
}

auto Is(absl::string_view text, double weight) {
  return testing::AllOf(Field(&PromptFragment::text, std::string(text)),
                        Field(&PromptFragment::weight, DoubleEq(weight)));
}

void ExpectRefused(absl::string_view prompt, PromptSyntax syntax, const std::string& text) {
  const auto parsed = ParsePrompt(prompt, syntax, "params.prompt");
  ASSERT_FALSE(parsed.ok()) << prompt;
  EXPECT_EQ(ErrorReason(parsed.status()), "INVALID_FIELD");
  EXPECT_EQ(GetErrorDetails(parsed.status())["field"], "params.prompt");
  EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(text)) << prompt;
}

TEST(PromptTest, PlainTextHasNoSyntax) {
  for (const char* prompt : {"", "(a b)1.3 c++", "[x] (y:1.2) BREAK z", "(\"a\", \"b\").blend(1, 2)"}) {
    EXPECT_THAT(TextOf(prompt, PromptSyntax::kPlain), ElementsAre(Is(prompt, 1)));
  }
}

TEST(A1111PromptTest, BracketsWeigh) {
  auto text = [](absl::string_view prompt) { return TextOf(prompt, PromptSyntax::kA1111); };
  EXPECT_THAT(text(""), ElementsAre(Is("", 1)));
  EXPECT_THAT(text("a (red) house"), ElementsAre(Is("a ", 1), Is("red", 1.1), Is(" house", 1)));
  EXPECT_THAT(text("[dim] ((very)) light"),
              ElementsAre(Is("dim", 1 / 1.1), Is(" ", 1), Is("very", 1.1 * 1.1), Is(" light", 1)));
  EXPECT_THAT(text("(red:1.3)(old : 0.5 )(x:.6)"),
              ElementsAre(Is("red", 1.3), Is("old ", 0.5), Is("x", 0.6)));
  EXPECT_THAT(text("(a (b:1.5) c:2)"), ElementsAre(Is("a ", 2), Is("b", 3), Is(" c", 2)));
  EXPECT_THAT(text("(a [b])"), ElementsAre(Is("a ", 1.1), Is("b", 1.1 * (1 / 1.1))));
}

TEST(A1111PromptTest, WhatDoesNotParseIsText) {
  auto text = [](absl::string_view prompt) { return TextOf(prompt, PromptSyntax::kA1111); };
  EXPECT_THAT(text("\\(a\\) \\[b\\] \\\\ \\n\\"), ElementsAre(Is("(a) [b] \\ n", 1)));
  EXPECT_THAT(text("a) b] ratio 3:4)"), ElementsAre(Is("a) b] ratio 3:4)", 1)));
  EXPECT_THAT(text("(ratio 3:4 x)"), ElementsAre(Is("ratio 3:4 x", 1.1)));
  EXPECT_THAT(text("(a:b)"), ElementsAre(Is("a:b", 1.1)));
  EXPECT_THAT(text("a (b [c"), ElementsAre(Is("a ", 1), Is("b ", 1.1), Is("c", 1.1 * (1 / 1.1))));
  EXPECT_THAT(text("<lora:x:0.8 a"), ElementsAre(Is("<lora:x:0.8 a", 1)));
}

TEST(A1111PromptTest, WeightsMayBeNegative) {
  auto text = [](absl::string_view prompt) { return TextOf(prompt, PromptSyntax::kA1111); };
  EXPECT_THAT(text("a (cat:-1)"), ElementsAre(Is("a ", 1), Is("cat", -1)));
  EXPECT_THAT(text("((a:-0.5) b:2)"), ElementsAre(Is("a", -1), Is(" b", 2)));
}

TEST(A1111PromptTest, BreakBeginsAWindow) {
  auto windows = [](absl::string_view prompt) {
    std::string all;
    for (const PromptFragment& fragment : TextOf(prompt, PromptSyntax::kA1111)) {
      absl::StrAppend(&all, fragment.begins_window ? "/" : "", fragment.text);
    }
    return all;
  };
  EXPECT_EQ(windows("a BREAK b"), "a/b");
  EXPECT_EQ(windows("a BREAK"), "a") << "nothing follows, so no window begins";
  EXPECT_EQ(windows("a BREAK BREAK "), "a/");
  EXPECT_EQ(windows("BREAK b"), "/b");
  EXPECT_EQ(windows("BREAK"), "");
  EXPECT_EQ(windows("a　BREAK b"), "a/b") << "any white space goes";
  // Words are words in any script.
  for (const char* text : {"ÉBREAK b", "a BREAK水", "BREAK_", "3BREAK"}) EXPECT_EQ(windows(text), text);
  // In brackets that weigh, the program weighs BREAK, too, and does not know it again.
  EXPECT_THAT(TextOf("(a BREAK b)", PromptSyntax::kA1111),
              ElementsAre(Is("a", 1.1), Is("BREAK", -1.1), Is("b", 1.1)));
  EXPECT_EQ(windows("(a BREAK b:1)"), "a/b");
  EXPECT_EQ(windows("\\BREAK b"), "/b");

  const PromptText text = TextOf("a cat BREAK (a dog:1.2)\nBREAK\nBREAKFAST BREAK", PromptSyntax::kA1111);
  ASSERT_EQ(text.size(), 3u);
  EXPECT_EQ(text[0], (PromptFragment{"a cat", 1, false}));
  EXPECT_EQ(text[1], (PromptFragment{"a dog", 1.2, true}));
  EXPECT_EQ(text[2], (PromptFragment{"BREAKFAST", 1, true}));
}

TEST(CompelPromptTest, WeightsMultiply) {
  auto text = [](absl::string_view prompt) { return TextOf(prompt, PromptSyntax::kCompel); };
  EXPECT_THAT(text("red++ house-"), ElementsAre(Is("red", 1.1 * 1.1), Is("house", 0.9)));
  EXPECT_THAT(text("((a)1.5 b)2 c"), ElementsAre(Is("a", 3), Is("b", 2), Is("c", 1)));
  EXPECT_THAT(text("\\(a\\) \"b c\"0"), ElementsAre(Is("(a)", 1), Is("b c", 0)));
  EXPECT_THAT(text("<lora:x-y:0.8> <trigger> d"), ElementsAre(Is("<lora:x-y:0.8> <trigger> d", 1)));
}

TEST(CompelPromptTest, BlendsAndConjunctions) {
  auto blend =
      ParsePrompt("(\"a+ b\", c).blend(0.7, -0.3, no_normalize)", PromptSyntax::kCompel, "p").value();
  ASSERT_EQ(blend.parts.size(), 1u);
  EXPECT_THAT(blend.parts[0].blend, ElementsAre(0.7, -0.3));
  EXPECT_FALSE(blend.parts[0].normalize);
  EXPECT_THAT(blend.parts[0].texts,
              ElementsAre(ElementsAre(Is("a", 1.1), Is("b", 1)), ElementsAre(Is("c", 1))));
  auto both = ParsePrompt("(\"a\", \"\").and(1, 0.5)", PromptSyntax::kCompel, "p").value();
  ASSERT_EQ(both.parts.size(), 2u);
  EXPECT_EQ(both.parts[1].weight, 0.5);
  EXPECT_THAT(both.parts[1].texts[0], ElementsAre(Is("", 1)));
}

TEST(CompelPromptTest, WhatIsNotSupportedIsRefused) {
  ExpectRefused("a cat.swap(dog) runs", PromptSyntax::kCompel, "swap");
  ExpectRefused("a (big cat).swap(dog)", PromptSyntax::kCompel, "swap");
  ExpectRefused("(\"a cat.swap(dog)\", b).blend(1, 1)", PromptSyntax::kCompel, "swap");
  ExpectRefused("a cat withLora(fur, 0.5)", PromptSyntax::kCompel, "LoRA");
  ExpectRefused("(\"a\", \"b\").blend(1)", PromptSyntax::kCompel, "1 weights for 2");
  ExpectRefused("(\"a\", \"b\").blend(1, x)", PromptSyntax::kCompel, "numbers");
  ExpectRefused("(\"a\", \"b\").blend(1, 1", PromptSyntax::kCompel, "closing");
  ExpectRefused("(\"a\", \"b\").blend(1, -1)", PromptSyntax::kCompel, "sum to 0");
  ExpectRefused("(\"a\", \"b\").and(1, 1, no_normalize)", PromptSyntax::kCompel, "no_normalize");
  ExpectRefused("(\"a\", \"b\").and() and more", PromptSyntax::kCompel, "whole prompt");
  ExpectRefused("(a)101", PromptSyntax::kCompel, "weight of 101");
  ExpectRefused("a" + std::string(100, '+'), PromptSyntax::kCompel, "weight of");
  ExpectRefused("(a:-101)", PromptSyntax::kA1111, "weight of -101");
  ExpectRefused("a <lora:x:0.8> b", PromptSyntax::kA1111, "holds <lora:x:0.8>; LoRAs are given in");
}

TEST(PromptTest, DepthIsBoundedAndLengthCostsNoMoreThanTime) {
  for (const PromptSyntax syntax : {PromptSyntax::kCompel, PromptSyntax::kA1111}) {
    std::string nested;
    for (int i = 0; i < 1000; ++i) nested += "(a ";
    ExpectRefused(nested, syntax, "deeper than 64");
    ExpectRefused(nested + std::string(1000, ')'), syntax, "deeper than 64");
    for (const char* unit : {"(a) ", "(a", "\"", "\" = ", "( = ", ") ", "\\", "a++ ", "(\"a\", ", "BREAK "}) {
      std::string prompt;
      while (prompt.size() < 60000) prompt += unit;
      ParsePrompt(prompt, syntax, "params.prompt")
          .status()
          .IgnoreError();  // ends soon, with or without an error
    }
  }
}

// A window of six ids has room for four.
class PromptWindowsTest : public testing::Test {
 protected:
  PromptWindowsTest() : folder_(absl::StrCat(testing::TempDir(), "/prompt_windows_test.", getpid())) {
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ + "/vocab.json")
        << R"({"a": 0, "b": 1, "a</w>": 2, "b</w>": 3, ".</w>": 4, ",</w>": 5,
        "<|startoftext|>": 6, "<|endoftext|>": 7, "!": 8})";
    std::ofstream(folder_ + "/merges.txt") << "#version: 0.2\n";
    std::ofstream(folder_ + "/tokenizer_config.json") << R"({"pad_token": "!", "model_max_length": 6})";
    tokenizer_ = ClipTokenizer::Load(folder_).value();
  }
  ~PromptWindowsTest() override { std::filesystem::remove_all(folder_); }

  PromptWindows Windows(const PromptText& text, LongPrompts mode = LongPrompts::kWindows) const {
    return MakePromptWindows(*tokenizer_, text, mode, "params.prompt").value();
  }

  std::string folder_;
  std::unique_ptr<const ClipTokenizer> tokenizer_;
};

TEST_F(PromptWindowsTest, WindowsEndWhereSentencesPhrasesOrWordsDo) {
  EXPECT_THAT(Windows({{"", 1}}).ids, ElementsAre(6, 7, 8, 8, 8, 8));
  EXPECT_EQ(EmptyPromptWindow(*tokenizer_).ids, Windows({{"", 1}}).ids);
  EXPECT_THAT(Windows({{"a b a b", 1}}).ids, ElementsAre(6, 2, 3, 2, 3, 7));
  EXPECT_THAT(Windows({{"a. b, a b", 1}}).ids, ElementsAre(6, 2, 4, 7, 8, 8, 6, 3, 5, 2, 3, 7));
  EXPECT_THAT(Windows({{"a, b a b", 1}}).ids, ElementsAre(6, 2, 5, 7, 8, 8, 6, 3, 2, 3, 7, 8));
  EXPECT_THAT(Windows({{"a b aaab", 1}}).ids, ElementsAre(6, 2, 3, 7, 8, 8, 6, 0, 0, 0, 3, 7));
  EXPECT_THAT(Windows({{"aaaaab", 1}}).ids, ElementsAre(6, 0, 0, 0, 0, 7, 6, 0, 3, 7, 8, 8));
}

TEST_F(PromptWindowsTest, WeightsAndSpansFollowTheTokens) {
  const PromptWindows windows = Windows({{"a b a", 1.5}, {"", 0.1}, {"b b", 0.5}});
  EXPECT_THAT(windows.ids, ElementsAre(6, 2, 3, 2, 3, 7, 6, 3, 7, 8, 8, 8));
  EXPECT_THAT(windows.weights, ElementsAre(1, 1.5, 1.5, 1.5, 0.5, 1, 1, 0.5, 1, 1, 1, 1));
  ASSERT_EQ(windows.spans.size(), 3u);
  EXPECT_EQ(windows.spans[0]->last, 3);
  EXPECT_FALSE(windows.spans[1].has_value());
  EXPECT_EQ(windows.spans[2]->first, 4);
  EXPECT_EQ(windows.spans[2]->last, 7);
}

TEST_F(PromptWindowsTest, BreakBeginsAWindow) {
  const PromptText text = {{"a", 1}, {"b", 1, true}};
  EXPECT_THAT(Windows(text).ids, ElementsAre(6, 2, 7, 8, 8, 8, 6, 3, 7, 8, 8, 8));
  EXPECT_THAT(Windows(text, LongPrompts::kTruncate).ids, ElementsAre(6, 2, 3, 7, 8, 8));
  EXPECT_THAT(Windows({{"a", 1, true}}, LongPrompts::kCommas).ids,
              ElementsAre(6, 7, 8, 8, 8, 8, 6, 2, 7, 8, 8, 8))
      << "before it is an empty window";
}

TEST_F(PromptWindowsTest, A1111CutsAfterCommasOrAnywhere) {
  auto ids = [&](const char* text) { return Windows({{text, 1}}, LongPrompts::kCommas).ids; };
  EXPECT_THAT(ids("a, b a b"), ElementsAre(6, 2, 5, 7, 8, 8, 6, 3, 2, 3, 7, 8));
  EXPECT_THAT(ids("a. b a b"), ElementsAre(6, 2, 4, 3, 2, 7, 6, 3, 7, 8, 8, 8)) << "not after full stops";
  EXPECT_THAT(ids("a b aaab"), ElementsAre(6, 2, 3, 0, 0, 7, 6, 0, 3, 7, 8, 8)) << "in the middle of words";
  EXPECT_THAT(ids("a, b a, b"), ElementsAre(6, 2, 5, 3, 2, 7, 6, 5, 3, 7, 8, 8))
      << "a comma goes to the next window";
}

TEST_F(PromptWindowsTest, AnEmbeddingIsNotCutApart) {
  constexpr int64_t kRow = kFirstRowId;
  auto marked = [](const char* text) {
    return MarkEmbeddings(text, {{"two", {.first = 0, .count = 2}}, {"three", {.first = 2, .count = 3}}});
  };
  auto ids = [&](const char* text) { return Windows({{marked(text), 1}}).ids; };
  EXPECT_THAT(ids("a <two> b"), ElementsAre(6, 2, kRow, kRow + 1, 3, 7));
  EXPECT_THAT(ids("a<two>b"), ElementsAre(6, 2, kRow, kRow + 1, 3, 7)) << "it parts words";
  // As compel has it: the window ends with the last word.
  EXPECT_THAT(ids("a b <three>"), ElementsAre(6, 2, 3, 7, 8, 8, 6, kRow + 2, kRow + 3, kRow + 4, 7, 8));
  EXPECT_THAT(ids("a <two> <three>"), ElementsAre(6, 2, 7, 8, 8, 8, 6, kRow, kRow + 1, 7, 8, 8, 6, kRow + 2,
                                                  kRow + 3, kRow + 4, 7, 8));
  // compel would cut the second one after a token.
  EXPECT_THAT(ids("<three><two>"),
              ElementsAre(6, kRow + 2, kRow + 3, kRow + 4, 7, 8, 6, kRow, kRow + 1, 7, 8, 8));
  EXPECT_THAT(Windows({{marked("a b a <two>"), 1}}, LongPrompts::kTruncate).ids,
              ElementsAre(6, 2, 3, 2, kRow, 7))
      << "what is left over is dropped";
  const PromptWindows weighted = Windows({{"a", 1}, {marked("<two>"), 1.5}});
  EXPECT_THAT(weighted.weights, ElementsAre(1, 1, 1.5, 1.5, 1, 1));
  EXPECT_EQ(weighted.spans[1]->first, 2);
  EXPECT_EQ(weighted.spans[1]->last, 3);
}

TEST_F(PromptWindowsTest, LengthIsBounded) {
  std::string text;
  for (int i = 0; i < 4 * kMaxPromptWindows; ++i) text += "a ";
  EXPECT_EQ(Windows({{text, 1}}).count(), kMaxPromptWindows);
  EXPECT_EQ(Windows({{text + "a", 1}}, LongPrompts::kTruncate).count(), 1);
  const auto windows =
      MakePromptWindows(*tokenizer_, {{text + "a", 1}}, LongPrompts::kWindows, "params.prompt");
  EXPECT_EQ(ErrorReason(windows.status()), "INVALID_FIELD");
}

}  // namespace
}  // namespace latentd
