// Embeddings on disk, by name, and what prompts make of the names.
#include "server/catalog/embedding_set.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "patcher/model_patch.h"

namespace latentd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

namespace fs = std::filesystem;

// A model that encodes one prompt and its negative, with a CLIP-L of 8 columns.
class FakePipeline : public Pipeline {
 public:
  bool takes_embeddings = true;

  std::vector<PromptField> EmbeddingPrompts(const GenerateParams& params) const override {
    if (!takes_embeddings) return {};
    return {{"params.prompt", params.prompt}, {"params.negative_prompt", *params.negative_prompt}};
  }
  absl::Status CheckEmbedding(const std::string& name, const TextEmbeddingShape& shape) const override {
    if (shape.clip_l == 8 && shape.clip_g == 0) return absl::OkStatus();
    return MakeError(absl::StatusCode::kFailedPrecondition, "EMBEDDING_MISMATCH", "no",
                     {{"embedding", name}});
  }

  absl::string_view family() const override { return "fake"; }
  absl::string_view variant() const override { return ""; }
  const std::vector<Component>& components() const override { return components_; }
  const ModelDefaults& defaults() const override { return defaults_; }
  RequestUses MakeUses() const override { return UsesOf(defaults_, 8, {}); }
  absl::StatusOr<std::shared_ptr<const Run>> Prepare(GenerateParams) const override {
    return absl::UnimplementedError("");
  }
  std::string denoiser_component() const override { return ""; }

 private:
  std::vector<Component> components_;
  ModelDefaults defaults_;
};

class EmbeddingSetTest : public testing::Test {
 protected:
  EmbeddingSetTest() : root_(fs::path(testing::TempDir()) / absl::StrCat("embeddings-", getpid())) {
    fs::create_directories(root_ / "a");
    fs::create_directories(root_ / "b");
  }
  ~EmbeddingSetTest() override { fs::remove_all(root_); }

  // fp32 zeros [tokens, columns], and what more stands in the file.
  void Write(const std::string& name, int64_t tokens = 2, int64_t columns = 8) const {
    WriteTensors(name, {{"emb_params", {tokens, columns}}});
  }
  void WriteTensors(const std::string& name,
                    const std::vector<std::pair<std::string, std::pair<int64_t, int64_t>>>& tensors) const {
    std::string data, header;
    for (const auto& [tensor, shape] : tensors) {
      const size_t begin = data.size();
      data.append(static_cast<size_t>(shape.first * shape.second) * sizeof(float), 0);
      absl::StrAppend(&header, header.empty() ? "{" : ",", "\"", tensor, R"(":{"dtype":"F32","shape":[)",
                      shape.first, ",", shape.second, R"(],"data_offsets":[)", begin, ",", data.size(), "]}");
    }
    header += "}";
    const uint64_t length = header.size();
    std::string file(sizeof length, 0);
    std::memcpy(file.data(), &length, sizeof length);
    const fs::path path = root_ / absl::StrCat(name, ".safetensors");
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << file << header << data;
  }

  absl::StatusOr<std::vector<LockRequest>> Resolve(const std::string& prompt,
                                                   const std::string& negative = "") {
    params_ = {};
    params_.prompt = prompt;
    params_.negative_prompt = negative;
    return ResolveEmbeddings(pipeline_, catalog(), params_, bundled_);
  }
  Catalog catalog() const { return Catalog({}, {}, {(root_ / "a").string(), (root_ / "b").string()}); }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const PromptEmbedding& embedding : params_.embeddings)
      names.push_back(absl::StrCat(embedding.name, "*", embedding.tokens));
    return names;
  }
  void ExpectError(const absl::StatusOr<std::vector<LockRequest>>& result, absl::StatusCode code,
                   const std::string& reason, const std::string& field, const std::string& text) {
    EXPECT_EQ(result.status().code(), code) << result.status();
    EXPECT_EQ(ErrorReason(result.status()), reason);
    EXPECT_EQ(GetErrorDetails(result.status())["field"], field);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(text));
  }

  const fs::path root_;
  FakePipeline pipeline_;
  GenerateParams params_;
  std::vector<EmbeddingFile> bundled_;  // what the request's LoRAs bring
};

TEST_F(EmbeddingSetTest, NamesArePathsBelowTheRootsAndNothingElse) {
  Write("a/cat");
  Write("a/pets/dog", 3);
  Write("b/cat", 5);  // the first root goes first
  Write("outside");
  fs::create_symlink(root_ / "outside.safetensors", root_ / "a/link.safetensors");
  fs::create_symlink(root_ / "a/cat.safetensors", root_ / "a/twin.safetensors");
  std::ofstream(root_ / "a/old.pt") << "x";
  fs::create_directories(root_ / "a/folder.safetensors");
  EXPECT_THAT(catalog().EmbeddingNames(), ElementsAre("cat", "pets/dog", "twin"));
  std::vector<std::string> names;
  for (const EmbeddingFile& file : catalog().Embeddings()) {
    names.push_back(file.name);
    EXPECT_EQ(file.id.substr(0, file.id.size() - 16), absl::StrCat("embedding/", file.name, "@"));
  }
  EXPECT_THAT(names, ElementsAre("cat", "pets/dog", "twin"));
  EXPECT_EQ(catalog().Embedding("cat")->Open()->shape.tokens, 2);
  for (const char* name :
       {"../outside", "link", "/cat", "old", "old.pt", "folder", "cat.safetensors", "", "Cat"}) {
    EXPECT_EQ(ErrorReason(catalog().Embedding(name).status()), "EMBEDDING_NOT_FOUND") << name;
  }
  const std::string before = catalog().Embedding("cat")->id;
  Write("a/cat", 4);
  EXPECT_NE(catalog().Embedding("cat")->id, before);
  EXPECT_EQ(catalog().Embedding("cat")->Open()->shape.tokens, 4) << "looked at on every call";
}

TEST_F(EmbeddingSetTest, PromptsNameThemByWholeNamesAndLastParts) {
  Write("a/cat");
  Write("b/pets/dog", 3);
  const auto requests =
      Resolve("a <dog>, <cat> and <lora:cat:1> <pets/dog> <unknown>", "embedding:cat++ <dog>");
  ASSERT_TRUE(requests.ok()) << requests.status();
  EXPECT_THAT(Names(), ElementsAre("pets/dog*3", "cat*2"));
  EXPECT_THAT(params_.embedding_names, ElementsAre(Pair("cat", 1), Pair("dog", 0), Pair("pets/dog", 0)));
  ASSERT_EQ(requests->size(), 2u);
  EXPECT_EQ((*requests)[0].key.id, params_.embeddings[0].id);
  EXPECT_EQ((*requests)[0].loader.estimated_bytes, 3 * 8 * 4);
  EXPECT_EQ((*requests)[0].loader.kind, "embedding");
}

TEST_F(EmbeddingSetTest, AFileOfSeveralStandsForEachOfThem) {
  WriteTensors("a/zoo/pets",
               {{"<cat>", {2, 8}}, {"<dog>", {1, 8}}, {"<dog>_1", {1, 8}}, {"not//a name", {1, 8}}});
  Write("b/owl");
  const Catalog files = catalog();
  EXPECT_THAT(files.EmbeddingNames(), ElementsAre("owl", "zoo/pets/cat", "zoo/pets/dog"));
  EXPECT_EQ(files.Embedding("zoo/pets/dog")->Open()->shape.tokens, 2);
  EXPECT_EQ(ErrorReason(files.Embedding("zoo/pets/fox").status()), "EMBEDDING_NOT_FOUND");
  ASSERT_TRUE(Resolve("a <cat> by a <zoo/pets/dog>").ok());
  EXPECT_THAT(Names(), ElementsAre("zoo/pets/cat*2", "zoo/pets/dog*2"));
  EXPECT_NE(params_.embeddings[0].id, params_.embeddings[1].id);
  // The file's own name is none of theirs.
  ExpectError(Resolve("<zoo/pets>"), absl::StatusCode::kInvalidArgument, "INVALID_EMBEDDING", "params.prompt",
              "zoo/pets/cat, zoo/pets/dog");
}

TEST_F(EmbeddingSetTest, WhatALoraBringsIsNamedInItsPrompts) {
  WriteTensors("lora", {{"bundle_emb.sks.string_to_param.*", {3, 8}},
                        {"bundle_emb.far.clip_g", {2, 4}},
                        {"bundle_emb.cat.emb_params", {1, 8}},
                        {"a.lora_down.weight", {2, 8}}});
  const auto lora = WeightFiles::Open((root_ / "lora.safetensors").string());
  ASSERT_TRUE(lora.ok()) << lora.status();
  EXPECT_TRUE(Resolve("a <sks> <far>").ok());
  EXPECT_THAT(Names(), IsEmpty()) << "without the LoRA it is text";
  bundled_ = EmbeddingsOfLora("styles/ink", *lora);
  ASSERT_TRUE(Resolve("a <sks>, <styles/ink/cat>").ok());
  EXPECT_THAT(Names(), ElementsAre("styles/ink/sks*3", "styles/ink/cat*1"));
  Write("a/cat");
  ASSERT_TRUE(Resolve("<cat> <styles/ink/cat>").ok());
  EXPECT_THAT(Names(), ElementsAre("cat*2", "styles/ink/cat*1")) << "a file of its own goes first";
  ExpectError(Resolve("<far>"), absl::StatusCode::kFailedPrecondition, "EMBEDDING_MISMATCH", "params.prompt",
              "");
  for (EmbeddingFile& other : EmbeddingsOfLora("b", *lora)) bundled_.push_back(other);
  ExpectError(Resolve("<sks>"), absl::StatusCode::kInvalidArgument, "EMBEDDING_AMBIGUOUS", "params.prompt",
              "styles/ink/sks, b/sks");
  // The file is the one that the LoRA was loaded from.
  bundled_.resize(3);
  fs::remove(root_ / "lora.safetensors");
  EXPECT_TRUE(Resolve("<sks>").ok());
  EXPECT_EQ((*bundled_[2].Open()).shape.tokens, 3);
}

TEST_F(EmbeddingSetTest, WhatAModelCannotUseOfALoraIsNoted) {
  WriteTensors("lora", {{"bundle_emb.sks.string_to_param.*", {3, 8}},
                        {"bundle_emb.far.clip_g", {2, 4}},
                        {"bundle_emb.odd.t5", {2, 4}},
                        {"a.lora_down.weight", {2, 8}},
                        {"a.lora_up.weight", {8, 2}}});
  const auto lora = WeightFiles::Open((root_ / "lora.safetensors").string());
  ASSERT_TRUE(lora.ok()) << lora.status();
  const auto patch = ModelPatch::Load(*lora, LoadContext([] { return false; }, [](int64_t, int64_t) {}));
  ASSERT_TRUE(patch.ok()) << patch.status();
  PatchReport report;
  report.embeddings = (*patch)->embeddings();
  EXPECT_THAT(report.embeddings, ElementsAre("far", "odd", "sks"));
  NoteUnusedEmbeddings(pipeline_, **patch, report);
  EXPECT_THAT(report.unused_embeddings, ElementsAre("far", "odd"));
  pipeline_.takes_embeddings = false;
  NoteUnusedEmbeddings(pipeline_, **patch, report);
  EXPECT_THAT(report.unused_embeddings, ElementsAre("far", "odd", "sks"));
}

TEST_F(EmbeddingSetTest, ALastPartThatSeveralHaveIsAnErrorThatListsThem) {
  Write("a/pets/cat");
  Write("b/wild/cat");
  for (const char* prompt : {"a <cat>", "embedding:cat"}) {
    ExpectError(Resolve(prompt), absl::StatusCode::kInvalidArgument, "EMBEDDING_AMBIGUOUS", "params.prompt",
                "pets/cat, wild/cat");
  }
  EXPECT_TRUE(Resolve("<wild/cat>").ok());
  Write("a/cat");
  EXPECT_TRUE(Resolve("<cat>").ok()) << "a whole name goes first";
  EXPECT_THAT(Names(), ElementsAre("cat*2"));
}

TEST_F(EmbeddingSetTest, ErrorsNameThePrompt) {
  Write("a/cat");
  Write("a/wide", 2, 9);
  Write("a/many", 76);
  std::ofstream(root_ / "a/pickle.safetensors", std::ios::binary)
      << std::string("\x80\x02}q\x00X\x01\x00\x00\x00*", 12);
  std::ofstream(root_ / "a/torn.safetensors", std::ios::binary) << "torn";
  ExpectError(Resolve("<cat>", "x embedding:dog, y"), absl::StatusCode::kNotFound, "EMBEDDING_NOT_FOUND",
              "params.negative_prompt", "'dog'");
  ExpectError(Resolve("embedding:../outside"), absl::StatusCode::kNotFound, "EMBEDDING_NOT_FOUND",
              "params.prompt", "'../outside'");
  ExpectError(Resolve("", "<wide>"), absl::StatusCode::kFailedPrecondition, "EMBEDDING_MISMATCH",
              "params.negative_prompt", "");
  ExpectError(Resolve("<many>"), absl::StatusCode::kInvalidArgument, "INVALID_EMBEDDING", "params.prompt",
              "embedding many: ");
  ExpectError(Resolve("<pickle>"), absl::StatusCode::kFailedPrecondition, "UNSAFE_FILE", "params.prompt", "");
  ExpectError(Resolve("<torn>"), absl::StatusCode::kDataLoss, "CORRUPT_FILE", "params.prompt",
              "embedding torn: ");
}

TEST_F(EmbeddingSetTest, VectorsAreThoseThatWereFound) {
  Write("a/cat");
  const auto requests = Resolve("<cat>");
  ASSERT_TRUE(requests.ok()) << requests.status();
  RamBudget ram(1 << 20);
  ModelCache cache(&ram, {});
  const auto handles = cache.LockAll(*requests, {.owner = "job"});
  ASSERT_TRUE(handles.ok()) << handles.status();
  const auto vectors = VectorsOf(pipeline_, *handles, params_);
  ASSERT_TRUE(vectors.ok()) << vectors.status();
  EXPECT_EQ((*vectors)[0].get(), (*handles)[0].resource().get());
  params_.embeddings[0].tokens += 1;
  EXPECT_EQ(ErrorReason(VectorsOf(pipeline_, *handles, params_).status()), "EMBEDDING_CHANGED");
}

TEST_F(EmbeddingSetTest, ThereIsALimit) {
  std::string prompt;
  for (int i = 0; i < 65; ++i) {
    Write(absl::StrCat("a/e", i));
    if (i < 64) absl::StrAppend(&prompt, "<e", i, "> embedding:e", i, " ");
  }
  EXPECT_TRUE(Resolve(prompt).ok());
  ExpectError(Resolve(prompt, "<e64>"), absl::StatusCode::kInvalidArgument, "INVALID_FIELD",
              "params.negative_prompt", "more than 64");
}

TEST_F(EmbeddingSetTest, ModelsThatTakeNoneHaveText) {
  Write("a/wide", 2, 9);
  pipeline_.takes_embeddings = false;
  const auto requests = Resolve("<wide> embedding:dog");
  ASSERT_TRUE(requests.ok()) << requests.status();
  EXPECT_THAT(*requests, IsEmpty());
  EXPECT_THAT(params_.embeddings, IsEmpty());
}

}  // namespace
}  // namespace latentd
