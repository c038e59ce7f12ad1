#include "families/tokenizers/sentencepiece_check.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/tokenizers/sentencepiece_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::HasSubstr;

// --------------------------------------------------------------------------------- models made by hand

std::string Varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
std::string Number(int field, uint64_t value) {
  return Varint(static_cast<uint64_t>(field) << 3) + Varint(value);
}
std::string Text(int field, const std::string& text) {
  return Varint(static_cast<uint64_t>(field) << 3 | 2) + Varint(text.size()) + text;
}
std::string Float(int field, float value) {
  std::string bytes(4, '\0');
  std::memcpy(bytes.data(), &value, 4);
  return Varint(static_cast<uint64_t>(field) << 3 | 5) + bytes;
}
std::string Piece(const std::string& text, int kind = 1, float score = -1) {
  return Text(1, Text(1, text) + Float(2, score) + Number(3, static_cast<uint64_t>(kind)));
}
const std::string& Pieces() {
  static const std::string pieces =
      Piece("<unk>", 2, 0) + Piece("</s>", 3, 0) + Piece("a") + Piece("b") + Piece("\u2581");
  return pieces;
}

// A double array whose states have 256 units each: simple, and valid.
std::vector<uint32_t> Trie(const std::map<std::string, uint32_t>& rules) {
  std::map<std::string, uint32_t> states;  // of beginnings of rules
  for (const auto& [rule, value] : rules) {
    for (size_t size = 0; size <= rule.size(); ++size) states.insert({rule.substr(0, size), 0});
  }
  uint32_t next = 1;  // the first 256 hold the root's unit
  for (auto& [beginning, state] : states) state = 256 * next++;
  std::vector<uint32_t> units(256 * next, 1u << 31);
  units[0] = states[""] << 10;
  for (const auto& [beginning, state] : states) {
    if (beginning.empty()) continue;
    const auto byte = static_cast<unsigned char>(beginning.back());
    const uint32_t at = states[beginning.substr(0, beginning.size() - 1)] ^ byte;
    const bool leaf = rules.count(beginning) != 0;
    units[at] = byte | (leaf ? 1u << 8 : 0) | (at ^ state) << 10;
    if (leaf) units[state] = 1u << 31 | rules.at(beginning);
  }
  return units;
}

std::string Charsmap(const std::vector<uint32_t>& units, const std::string& texts) {
  std::string blob(4 + 4 * units.size(), '\0');
  const auto size = static_cast<uint32_t>(4 * units.size());
  std::memcpy(blob.data(), &size, 4);
  std::memcpy(blob.data() + 4, units.data(), size);
  return blob + texts;
}
std::string WithCharsmap(const std::string& blob) { return Pieces() + Text(3, Text(2, blob)); }

std::string Problem(const std::string& model) {
  const absl::Status status = CheckSentencePieceModel(model);
  if (status.ok()) return "";
  EXPECT_EQ(ErrorReason(status),
            status.code() == absl::StatusCode::kDataLoss ? "CORRUPT_FILE" : "UNSUPPORTED_MODEL");
  return std::string(status.message());
}

const std::string kTexts("x\0yy\0", 5);

TEST(SentencePieceCheck, WhatTheLibraryCanUsePassesAndIsUsed) {
  EXPECT_EQ(Problem(Pieces()), "");
  const std::string model = WithCharsmap(Charsmap(Trie({{"c", 0}, {"cd", 2}}), std::string("a\0bb\0", 5)));
  EXPECT_EQ(Problem(model), "");
  auto loaded = SentencePieceModel::Load(model);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ((*loaded)->Encode("acbcd"), (std::vector<int>{4, 2, 2, 3, 3, 3}));
}

TEST(SentencePieceCheck, PiecesAreChecked) {
  EXPECT_THAT(Problem(""), HasSubstr("no piece"));
  EXPECT_THAT(Problem(Piece("a")), HasSubstr("unknown"));
  EXPECT_THAT(Problem(Pieces() + Piece("<u>", 2)), HasSubstr("unknown"));
  EXPECT_THAT(Problem(Pieces() + Piece("a")), HasSubstr("the same"));
  EXPECT_THAT(Problem(Pieces() + Piece("")), HasSubstr("empty"));
  EXPECT_THAT(Problem(Pieces() + Piece(std::string("c\0d", 3))), HasSubstr("NUL"));
  EXPECT_THAT(Problem(Pieces() + Piece("\xff")), HasSubstr("UTF-8"));
  EXPECT_EQ(Problem(Pieces() + Piece(std::string(512, 'x'))), "");
  EXPECT_THAT(Problem(Pieces() + Piece(std::string(513, 'x'))), HasSubstr("too long"));
  EXPECT_EQ(Problem(Pieces() + Piece(std::string(64, 'x'), 4)), "");
  EXPECT_THAT(Problem(Pieces() + Piece(std::string(65, 'x'), 4)), HasSubstr("too long"));
  EXPECT_THAT(Problem(Pieces() + Piece("c", 0)), HasSubstr("kind"));
  EXPECT_THAT(Problem(Pieces() + Piece("c", 7)), HasSubstr("kind"));
  for (const float score : {std::nanf(""), std::numeric_limits<float>::infinity(), -2e6f}) {
    EXPECT_THAT(Problem(Pieces() + Piece("c", 1, score)), HasSubstr("score"));
  }
  EXPECT_THAT(Problem(Pieces() + Text(1, Number(1, 3))), HasSubstr("type"));
}

TEST(SentencePieceCheck, TheMessageIsChecked) {
  EXPECT_THAT(Problem(Pieces() + "\x0a\x7f"), HasSubstr("cut short"));
  EXPECT_THAT(Problem(Pieces() + "\x03"), HasSubstr("tag"));
  EXPECT_THAT(Problem(Pieces() + "\x0b"), HasSubstr("cut short"));  // a group
  EXPECT_THAT(Problem(Pieces() + std::string(11, '\xff')), HasSubstr("tag"));
  EXPECT_THAT(Problem(Pieces() + Number(2, 1)), HasSubstr("type"));
  EXPECT_EQ(Problem(Pieces() + Number(200, 1) + Text(201, "x") + Float(202, 1)), "");  // of a later version
  EXPECT_EQ(Problem(Pieces() + Text(2, Number(3, 1))), "");
  EXPECT_THAT(Problem(Pieces() + Text(2, Number(3, 2))), HasSubstr("unigram"));
  EXPECT_THAT(Problem(Pieces() + Text(4, std::string(2 << 20, 'x'))), HasSubstr("self test"));
}

TEST(SentencePieceCheck, TheNormalisationsHaveAForm) {
  const std::vector<uint32_t> good = Trie({{"c", 0}, {"cd", 2}});
  EXPECT_EQ(Problem(WithCharsmap(Charsmap(good, kTexts))), "");
  EXPECT_EQ(Problem(WithCharsmap("")), "");  // none
  for (const std::string& blob :
       {std::string("x"), std::string(4, '\0'), std::string(8, '\0'), std::string(8, '\xff')}) {
    EXPECT_THAT(Problem(WithCharsmap(blob)), HasSubstr("size"));
  }
  EXPECT_THAT(Problem(WithCharsmap(Charsmap(good, ""))), HasSubstr("size"));
  EXPECT_THAT(Problem(WithCharsmap(Charsmap(good, "x"))), HasSubstr("no end"));
  EXPECT_THAT(Problem(WithCharsmap(Charsmap({0}, kTexts))), HasSubstr("out of itself"));
  // Of the text that goes back from pieces, too.
  EXPECT_THAT(Problem(Pieces() + Text(5, Text(2, Charsmap({0}, kTexts)))), HasSubstr("out of itself"));
  EXPECT_THAT(Problem(Pieces() + Text(3, Number(2, 1))), HasSubstr("type"));
}

TEST(SentencePieceCheck, NoTextLeadsOutOfTheNormalisations) {
  std::vector<uint32_t> units = Trie({{"c", 0}, {"cd", 2}});
  for (uint32_t& unit : units) {
    if ((unit & 0x800000FF) != 'd') continue;
    unit = 'd' | 1u << 8 | 1u << 9 | 0x1FFFFFu << 10;  // the largest offset there is
  }
  EXPECT_THAT(Problem(WithCharsmap(Charsmap(units, kTexts))), HasSubstr("out of itself"));
  EXPECT_EQ(Problem(WithCharsmap(Charsmap(Trie({{"c", 4}}), kTexts))), "");
  EXPECT_THAT(Problem(WithCharsmap(Charsmap(Trie({{"c", 5}}), kTexts))), HasSubstr("outside"));
  EXPECT_THAT(Problem(WithCharsmap(Charsmap(Trie({{"c", 0x7FFFFFFF}}), kTexts))), HasSubstr("outside"));
  EXPECT_EQ(Problem(WithCharsmap(Charsmap(Trie({{"c", 0}}), std::string(256, 'x') + '\0'))), "");
  EXPECT_THAT(Problem(WithCharsmap(Charsmap(Trie({{"c", 0}}), std::string(257, 'x') + '\0'))),
              HasSubstr("too long"));
  EXPECT_THAT(Problem(WithCharsmap(Charsmap(Trie({{"c", 0}}), std::string("\xc3\0", 2)))),
              HasSubstr("UTF-8"));
}

TEST(SentencePieceCheck, NoTextGoesRoundInACircle) {
  std::vector<uint32_t> units = Trie({{"c", 0}});
  const uint32_t root = units[0] >> 10;
  units[root ^ 'c'] = 'c' | 1u << 8 | static_cast<uint32_t>('c') << 10;  // from the root to the root
  EXPECT_THAT(Problem(WithCharsmap(Charsmap(units, kTexts))), HasSubstr("circle"));
}

TEST(SentencePieceCheck, NoMoreRulesBeginAlikeThanTheLibraryHasRoomFor) {
  std::map<std::string, uint32_t> rules;
  for (size_t i = 1; i <= 32; ++i) rules[std::string(i, 'c')] = 0;
  EXPECT_EQ(Problem(WithCharsmap(Charsmap(Trie(rules), kTexts))), "");
  rules[std::string(33, 'c')] = 0;
  EXPECT_THAT(Problem(WithCharsmap(Charsmap(Trie(rules), kTexts))), HasSubstr("begin alike"));
  EXPECT_EQ(Problem(WithCharsmap(Charsmap(Trie({{std::string(128, 'c'), 0}}), kTexts))), "");
  EXPECT_THAT(Problem(WithCharsmap(Charsmap(Trie({{std::string(129, 'c'), 0}}), kTexts))),
              HasSubstr("too long"));
}

// ------------------------------------------------------------------------------- models that were trained

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::string> Trained() {
  std::vector<std::string> models;
  for (const char* name : {"rules", "user_defined", "identity", "bytes"}) {
    models.push_back(ReadAll(absl::StrCat("tests/fuzz/corpus/spiece/", name, ".model")));
    EXPECT_FALSE(models.back().empty()) << "run from the repository's root";
  }
  models.push_back(ReadAll("deploy/demo/models/shapes-flux/tokenizer_2/spiece.model"));
  return models;
}

TEST(SentencePieceCheck, TrainedModelsPass) {
  for (const std::string& model : Trained()) EXPECT_EQ(Problem(model), "");
  EXPECT_THAT(Problem(ReadAll("tests/fuzz/corpus/spiece/bpe.model")), HasSubstr("unigram"));
}

// What passes the check is loaded, and reads texts of all kinds: a crash is the failure.
TEST(SentencePieceCheck, RandomlyDamagedModelsEndInAnErrorOrWork) {
  std::mt19937 random(3);
  std::string noise;
  for (int i = 0; i < 2000; ++i) noise += static_cast<char>(random());
  int refused = 0, taken = 0;
  for (const std::string& good : Trained()) {
    for (int round = 0; round < 600; ++round) {
      std::string bad = good;
      const int changes = 1 + static_cast<int>(random() % 8);
      for (int i = 0; i < changes; ++i) bad[random() % bad.size()] = static_cast<char>(random());
      if (random() % 8 == 0) bad.resize(random() % bad.size());
      auto model = SentencePieceModel::Load(bad);
      if (!model.ok()) {
        EXPECT_THAT(ErrorReason(model.status()), testing::AnyOf("CORRUPT_FILE", "UNSUPPORTED_MODEL"));
        ++refused;
        continue;
      }
      ++taken;
      for (const std::string& text :
           {std::string("a photo of \uff41\uff42\u2460 \ufb01 e\u0301\u0323 \ufdfa<x><y><z>"),
            std::string(500, 'a'), std::string("\0\xff\xc3", 3), noise}) {
        (*model)->Encode(text);
      }
    }
  }
  EXPECT_GT(refused, 300);
  EXPECT_GT(taken, 300);
}

}  // namespace
}  // namespace latentd
