// Prompts against compel: how they are read, and what embeddings come out of them.
#include <algorithm>
#include <map>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "families/encoders/clip_text_model.h"
#include "families/prompt/prompt.h"
#include "families/prompt/prompt_conditioning.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/goldens/golden.h"

namespace latentd {
namespace {

// Written with a 0 at the end, since an empty tensor cannot be.
std::string PromptOf(const Golden& golden, const std::string& name) {
  std::string prompt = golden.Text(name);
  prompt.pop_back();
  return prompt;
}

std::string Described(const ParsedPrompt& prompt) {
  std::vector<std::string> lines;
  for (const PromptPart& part : prompt.parts) {
    lines.push_back(absl::StrFormat("part %.6g %d", part.weight, part.normalize ? 1 : 0));
    for (size_t i = 0; i < part.texts.size(); ++i) {
      lines.push_back(absl::StrFormat("text %.6g", part.blend[i]));
      for (const PromptFragment& fragment : part.texts[i]) {
        lines.push_back(absl::StrFormat("%.6g %s", fragment.weight, fragment.text));
      }
    }
  }
  return absl::StrJoin(lines, "\n");
}

TEST(PromptGolden, PromptsAreReadAsByCompel) {
  const Golden golden("prompts-parsed");
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    const std::string prompt = PromptOf(golden, absl::StrCat("prompt.", i));
    auto parsed = ParsePrompt(prompt, PromptSyntax::kCompel, "params.prompt");
    ASSERT_TRUE(parsed.ok()) << prompt << ": " << parsed.status();
    EXPECT_EQ(Described(*parsed), golden.Text(absl::StrCat("parsed.", i))) << prompt;
  }
}

// What the oracle's encoder gave for a window and its mask. Others it was never asked for.
class RecordedEncoder {
 public:
  explicit RecordedEncoder(const Golden& golden) : hidden_(golden["call_hidden"]) {
    const at::Tensor keys = golden["call_keys"].to(at::kLong).contiguous();
    const int64_t* row = keys.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < keys.size(0); ++i, row += keys.size(1)) {
      calls_[std::vector<int64_t>(row, row + keys.size(1))] = i;
    }
  }

  absl::StatusOr<at::Tensor> operator()(const std::vector<int64_t>& ids,
                                        const std::vector<int64_t>& mask) const {
    std::vector<int64_t> key = ids;
    key.insert(key.end(), mask.begin(), mask.end());
    if (mask.empty()) key.resize(2 * ids.size(), 1);
    const auto call = calls_.find(key);
    if (call == calls_.end()) return absl::NotFoundError(absl::StrJoin(key, " "));
    return hidden_.slice(0, call->second, call->second + 1);
  }

 private:
  at::Tensor hidden_;
  std::map<std::vector<int64_t>, int64_t> calls_;
};

class PromptEmbeddingGolden : public testing::TestWithParam<const char*> {};

TEST_P(PromptEmbeddingGolden, EmbeddingsAreThoseOfCompel) {
  const c10::InferenceMode inference;
  const Golden golden(absl::StrCat("prompts-", GetParam()));
  const LongPrompts mode =
      std::string(GetParam()) == "windows" ? LongPrompts::kWindows : LongPrompts::kTruncate;
  auto tokenizer = ClipTokenizer::Load(GoldenPath("tiny-dev/tokenizer"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const RecordedEncoder encoder(golden);
  auto encode = [&](const std::string& prompt) {
    auto parsed = ParsePrompt(prompt, PromptSyntax::kCompel, "params.prompt");
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return EncodePrompt(**tokenizer, *parsed, mode, PromptWeights::kAgainstEmpty, encoder, "params.prompt");
  };
  double worst = 0;
  const std::vector<std::string> names = absl::StrSplit(golden.Setting("names"), ',');
  for (const std::string& name : names) {
    const std::string prompt = PromptOf(golden, "prompt." + name);
    const auto embedding = encode(prompt);
    ASSERT_TRUE(embedding.ok()) << name << ": " << embedding.status();
    const double error = RelativeError(*embedding, golden["embedding." + name]);
    EXPECT_LE(error, 1e-5) << name;
    worst = std::max(worst, error);
    EXPECT_EQ(OneWindowOfIds(**tokenizer, prompt), golden.Ints("pooled." + name)) << name;
  }
  Report(absl::StrCat("prompts, ", GetParam()), worst);

  std::vector<at::Tensor> pair = {*encode(PromptOf(golden, "prompt.plain")),
                                  *encode(PromptOf(golden, "prompt.long"))};
  PadToSameLength(pair, *encode(""));
  EXPECT_LE(RelativeError(pair[0], golden["padded.0"]), 1e-6);
  EXPECT_LE(RelativeError(pair[1], golden["padded.1"]), 1e-6);
}
INSTANTIATE_TEST_SUITE_P(Modes, PromptEmbeddingGolden, testing::Values("windows", "truncated"));

TEST(PromptGolden, A1111sEmbeddings) {
  const c10::InferenceMode inference;
  const Golden golden("prompts-a1111");
  auto tokenizer = ClipTokenizer::Load(GoldenPath("tiny-dev/tokenizer"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const RecordedEncoder encoder(golden);
  double worst = 0;
  for (int64_t i = 0; i < golden.Int("count"); ++i) {
    const std::string prompt = PromptOf(golden, absl::StrCat("prompt.", i));
    auto parsed = ParsePrompt(prompt, PromptSyntax::kA1111, "params.prompt");
    ASSERT_TRUE(parsed.ok()) << prompt << ": " << parsed.status();
    const auto embedding = EncodePrompt(**tokenizer, *parsed, LongPrompts::kCommas, PromptWeights::kKeepMean,
                                        encoder, "params.prompt");
    ASSERT_TRUE(embedding.ok()) << prompt << ": " << embedding.status();
    const double error = RelativeError(*embedding, golden[absl::StrCat("embedding.", i)]);
    EXPECT_LE(error, 1e-6) << prompt;
    worst = std::max(worst, error);
  }
  Report("prompts, A1111", worst);
}

TEST(PromptEncoderGolden, MaskedTokensAreNotSeen) {
  const c10::InferenceMode inference;
  const Golden golden("prompts-windows");
  const std::string folder = GoldenPath("tiny-dev/text_encoder");
  auto config = ClipTextConfig::Load(folder + "/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const ClipTextModel model(*config);
  const auto weights = Load(folder, model.layout(), nullptr, "text_model.");
  const WeightView view(*weights, nullptr);
  const at::Tensor keys = golden["call_keys"].to(at::kLong).contiguous();
  double error = 0;
  int64_t masked = 0;
  for (int64_t i = 0; i < keys.size(0); ++i) {
    const int64_t* row = keys[i].const_data_ptr<int64_t>();
    const int64_t tokens = keys.size(1) / 2;
    const std::vector<int64_t> ids(row, row + tokens), mask(row + tokens, row + 2 * tokens);
    masked += std::count(mask.begin(), mask.end(), 0) > 0 ? 1 : 0;
    error = std::max(
        error, RelativeError(model(view, ids, {}, mask).hidden, golden["call_hidden"].slice(0, i, i + 1)));
  }
  EXPECT_GE(masked, 5);
  EXPECT_LE(Report("clip with masks", error), kBlockTolerance);
}

}  // namespace
}  // namespace latentd
