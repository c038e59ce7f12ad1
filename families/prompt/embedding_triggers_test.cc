#include "families/prompt/embedding_triggers.h"

#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "families/prompt/prompt.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// "<cat>", "?dog" for one that is named and not there.
std::vector<std::string> Found(absl::string_view prompt, const std::set<std::string>& there) {
  std::vector<std::string> found;
  const auto known = [&](absl::string_view name) { return there.count(std::string(name)) != 0; };
  for (const EmbeddingTrigger& trigger : FindEmbeddingTriggers(prompt, known)) {
    EXPECT_THAT(std::string(prompt.substr(trigger.begin, trigger.size)), HasSubstr(trigger.name));
    found.push_back(absl::StrCat(trigger.known ? "" : "?", trigger.name, "|", trigger.size));
  }
  return found;
}

const std::set<std::string>& Names() {
  static const auto& names = *new std::set<std::string>{"cat", "pets/cat", "a.b-c", "7"};
  return names;
}

TEST(EmbeddingTriggers, BracketsNameWhatThereIs) {
  EXPECT_THAT(Found("a <cat>, <pets/cat><a.b-c>", Names()), ElementsAre("cat|5", "pets/cat|10", "a.b-c|7"));
  EXPECT_THAT(Found("x<cat>y", Names()), ElementsAre("cat|5"));
  EXPECT_THAT(Found("<<cat>>", Names()), ElementsAre("cat|5"));
  for (const char* text :
       {"<lora:cat:1>", "<dog>", "< cat>", "<cat", "<>", "<3", "a < b > c", "<Cat>", "<cat >"}) {
    EXPECT_THAT(Found(text, Names()), IsEmpty()) << text;
  }
}

TEST(EmbeddingTriggers, NamesMayHaveWhateverFilesMay) {
  const std::set<std::string> names = {"my style (v2), [soft]", "猫/ねこ", "über", "a:b|c"};
  EXPECT_THAT(Found("a <my style (v2), [soft]> b", names), ElementsAre("my style (v2), [soft]|23"));
  EXPECT_THAT(Found("<猫/ねこ> embedding:über, <a:b|c>", names),
              ElementsAre("猫/ねこ|12", "über|15", "a:b|c|7"));
  EXPECT_THAT(Found("embedding:猫/ねこ、x", names), ElementsAre("猫/ねこ|20"));
  EXPECT_THAT(Found("a < my style (v2), [soft]", names), IsEmpty());
}

TEST(EmbeddingTriggers, TheWordNamesOneWhetherItIsThereOrNot) {
  EXPECT_THAT(Found("embedding:cat", Names()), ElementsAre("cat|13"));
  EXPECT_THAT(Found("a embedding:pets/cat, (embedding:a.b-c:1.2)", Names()),
              ElementsAre("pets/cat|18", "a.b-c|15"));
  EXPECT_THAT(Found("embedding:dog embedding:cat", Names()), ElementsAre("?dog|13", "cat|13"));
  EXPECT_THAT(Found("embedding:../cat", Names()), ElementsAre("?../cat|16"));
  for (const char* text : {"embedding: cat", "embedding:", "embedding", "my_embedding:cat", "xembedding:cat",
                           "Embedding:cat", "(embedding:1.2)", "embedding:(cat)"}) {
    EXPECT_THAT(Found(text, Names()), IsEmpty()) << text;
  }
  EXPECT_THAT(Found("embedding:7", Names()), ElementsAre("7|11"));
}

TEST(EmbeddingTriggers, SignsOfWeightAreNoPartOfAName) {
  EXPECT_THAT(Found("embedding:cat++ embedding:cat-- (embedding:cat).", Names()),
              ElementsAre("cat|13", "cat|13", "cat|13"));
  EXPECT_THAT(Found("a embedding:cat. b embedding:cat... c embedding:cat.attend(1.2)", Names()),
              ElementsAre("cat|13", "cat|13", "cat|13"));
  EXPECT_THAT(Found("embedding:cat--", {"cat", "cat--"}), ElementsAre("cat--|15"));
  EXPECT_THAT(Found("embedding:dog--", Names()), ElementsAre("?dog|13"));
  EXPECT_THAT(Found("embedding:cat-dog", Names()), ElementsAre("?cat-dog|17"));
}

TEST(EmbeddingTriggers, LongNamesAreNobodys) {
  const std::string name(513, 'x');
  EXPECT_THAT(Found(absl::StrCat("<", name, ">"), {name}), IsEmpty());
  EXPECT_EQ(Found(absl::StrCat("embedding:", std::string(60000, '-')), Names()).size(), 0u);
}

std::string Marked(absl::string_view prompt) {
  return MarkEmbeddings(prompt,
                        {{"cat", {.first = 4, .count = 2}}, {"pets/cat", {.first = 4799, .count = 75}}});
}

TEST(EmbeddingMarks, AreLettersToEverySyntax) {
  const std::string cat = Marked("<cat>"), far = Marked("embedding:pets/cat");
  EXPECT_EQ(cat.size(), 6u);
  EXPECT_NE(cat, far);
  EXPECT_EQ(Marked("a <cat>b <dog> <lora:cat:1>"), absl::StrCat("a ", cat, "b <dog> <lora:cat:1>"));
  EXPECT_EQ(Marked("x\xffy"), "x\xEF\xBF\xBDy") << "a mark that the prompt brought along";

  auto weights = [](const std::string& prompt, PromptSyntax syntax) {
    std::vector<std::pair<std::string, double>> all;
    const ParsedPrompt parsed = ParsePrompt(Marked(prompt), syntax, "params.prompt").value();
    for (const PromptFragment& f : parsed.parts[0].texts[0]) all.emplace_back(f.text, f.weight);
    return all;
  };
  EXPECT_THAT(weights("a (<cat>:1.3) (embedding:pets/cat:0.5)", PromptSyntax::kA1111),
              ElementsAre(testing::Pair("a ", 1), testing::Pair(cat, 1.3), testing::Pair(" ", 1),
                          testing::Pair(far, 0.5)));
  EXPECT_THAT(weights("embedding:cat++ (<cat> x)0.5 <pets/cat>-", PromptSyntax::kCompel),
              ElementsAre(testing::Pair(cat, testing::DoubleEq(1.1 * 1.1)),
                          testing::Pair(absl::StrCat(cat, " x"), 0.5), testing::Pair(far, 0.9)));
  EXPECT_THAT(weights("(<cat>)1.3", PromptSyntax::kPlain),
              ElementsAre(testing::Pair(absl::StrCat("(", cat, ")1.3"), 1)));
}

}  // namespace
}  // namespace latentd
