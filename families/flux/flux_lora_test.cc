// LoRA files of every known format against the full-size FLUX.1, by names and shapes alone.
//
// The formats' rules are generated here. With LATENTD_LORA_FILES naming a folder of key lists of published
// files (NAME.json with "tensors": {name: shape}, and expected.json), those are matched as well.
#include "families/flux/flux_lora.h"

#include <cstdlib>
#include <fstream>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "cache/error.h"
#include "families/flux/flux_keys.h"
#include "families/flux/flux_transformer.h"
#include "families/text/clip_text_model.h"
#include "families/text/t5_encoder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "patcher/layer_patcher.h"
#include "patcher/layer_resolver.h"

namespace latentd {
namespace {

using Tensors = std::map<std::string, at::Tensor>;
using Counts = std::map<std::string, int64_t>;

// A tensor without values; scalars have one.
at::Tensor OfShape(const std::vector<int64_t>& shape) {
  return shape.empty() ? at::ones({}) : at::empty(shape, at::TensorOptions().device(at::kMeta));
}

const std::vector<PatchTarget>& Targets() {
  static const auto* targets = [] {
    FluxConfig flux;
    flux.guidance_embeds = true;
    ClipTextConfig clip;
    clip.dim = 768;
    clip.hidden = 3072;
    clip.heads = 12;
    T5Config t5;
    t5.dim = 4096;
    t5.heads = 64;
    t5.hidden = 10240;
    t5.layers = 24;
    t5.gated = true;
    return new std::vector<PatchTarget>{FluxTransformerTarget(FluxTransformer(flux).layout()),
                                        FluxClipTarget(ClipTextModel(clip).layout()),
                                        FluxT5Target(T5Encoder(t5).layout())};
  }();
  return *targets;
}

const ComponentLayout& Transformer() { return *Targets()[0].layout; }

// What a file is to the full-size model.
struct Outcome {
  int64_t layers = 0;
  Counts matched, tensors;  // by component: layers, and weights that they mean
  Counts types, ranks;
  int64_t with_alpha = 0, ignored = 0;
  Counts grown;
};

Outcome MatchAll(const Tensors& file) {
  Outcome outcome;
  const auto patch = ModelPatch::FromTensors(file);
  EXPECT_TRUE(patch.ok()) << patch.status();
  if (!patch.ok()) return outcome;
  const auto report = LayerPatcher::Match(**patch, "lora", 1, Targets());
  EXPECT_TRUE(report.ok()) << report.status();
  if (!report.ok()) return outcome;
  EXPECT_EQ(report->unmatched_count, 0) << testing::PrintToString(report->unmatched);
  outcome.layers = report->layers_in_file;
  outcome.matched = report->matched;
  outcome.grown = report->grown;
  outcome.ignored = (*patch)->ignored();
  std::vector<LayerResolver> resolvers;
  resolvers.reserve(Targets().size());
  for (const PatchTarget& target : Targets()) resolvers.emplace_back(target);
  for (const PatchLayer& layer : (*patch)->layers()) {
    ++outcome.types[layer.type];
    if (layer.rank() > 0) ++outcome.ranks[absl::StrCat(layer.rank())];
    outcome.with_alpha += layer.has_alpha ? 1 : 0;
    if (layer.type == "set scale") continue;  // a vector, whole in every layout
    for (size_t t = 0; t < resolvers.size(); ++t) {
      const size_t parts = resolvers[t].Resolve(layer.name).size();
      if (parts > 0) outcome.tensors[Targets()[t].component] += static_cast<int64_t>(parts);
    }
  }
  return outcome;
}

// ------------------------------------------------------------------------------------------ rules of formats

// A module that a file may name, and the size of its matrix.
struct Module {
  std::string name;
  int64_t rows, columns;
};

std::vector<Module> Native() {
  std::vector<Module> modules;
  for (const std::string& name : FluxNativeKeys()->NativeModules(Transformer())) {
    const auto parts = FluxNativeKeys()->Resolve(name, Transformer());
    const auto& shape = Transformer()[Transformer().Find(parts[0].canonical + ".weight")].shape;
    if (shape.size() == 2) modules.push_back({name, parts.back().row_begin + parts.back().rows, shape[1]});
  }
  return modules;
}

std::vector<Module> Canonical(const PatchTarget& target) {
  std::vector<Module> modules;
  for (const TensorDecl& tensor : target.layout->tensors()) {
    if (tensor.shape.size() != 2 || absl::StrContains(tensor.name, "embedding.") ||
        absl::StrContains(tensor.name, "relative_attention_bias") ||
        absl::StartsWith(tensor.name, "shared")) {
      continue;
    }
    modules.push_back({tensor.name.substr(0, tensor.name.rfind('.')), tensor.shape[0], tensor.shape[1]});
  }
  return modules;
}

std::vector<Module> InBlocks(std::vector<Module> modules) {
  std::erase_if(modules, [](const Module& m) { return !absl::StrContains(m.name, "blocks."); });
  return modules;
}

std::string Flat(const std::string& name) { return absl::StrReplaceAll(name, {{".", "_"}}); }

void AddPair(Tensors& file, const std::string& down, const std::string& up, const Module& m,
             int64_t rank = 16) {
  file[down] = OfShape({rank, m.columns});
  file[up] = OfShape({m.rows, rank});
}

void AddKohya(Tensors& file, const std::string& name, const Module& m) {
  AddPair(file, name + ".lora_down.weight", name + ".lora_up.weight", m);
  file[name + ".alpha"] = OfShape({});
}

Tensors Peft(const std::string& prefix, const std::vector<Module>& modules, const std::string& adapter = "") {
  Tensors file;
  for (const Module& m : modules) {
    AddPair(file, absl::StrCat(prefix, m.name, ".lora_A.", adapter, "weight"),
            absl::StrCat(prefix, m.name, ".lora_B.", adapter, "weight"), m);
  }
  return file;
}

TEST(FluxLoraFormats, KohyaWithBothTextEncoders) {
  for (const char* t5 : {"lora_te3_", "lora_te2_"}) {
    Tensors file;
    for (const Module& m : InBlocks(Native())) AddKohya(file, "lora_unet_" + Flat(m.name), m);
    for (const Module& m : Canonical(Targets()[1])) AddKohya(file, "lora_te1_text_model_" + Flat(m.name), m);
    for (const Module& m : Canonical(Targets()[2])) AddKohya(file, t5 + Flat(m.name), m);
    const Outcome outcome = MatchAll(file);
    EXPECT_EQ(outcome.layers, 304 + 72 + 168);
    EXPECT_EQ(outcome.matched, (Counts{{"transformer", 304}, {"text_encoder", 72}, {"text_encoder_2", 168}}));
    EXPECT_EQ(outcome.tensors, (Counts{{"transformer", 494}, {"text_encoder", 72}, {"text_encoder_2", 168}}));
    EXPECT_EQ(outcome.with_alpha, outcome.layers);
  }
}

TEST(FluxLoraFormats, PeftUnderEveryPrefix) {
  for (const char* prefix : {"transformer.", "base_model.model.", "base_model.model.transformer.", ""}) {
    const Outcome outcome = MatchAll(Peft(prefix, Canonical(Targets()[0])));
    EXPECT_EQ(outcome.matched, (Counts{{"transformer", 504}})) << prefix;
    EXPECT_EQ(outcome.tensors, outcome.matched);
    EXPECT_EQ(outcome.with_alpha, 0);
  }
}

TEST(FluxLoraFormats, PeftWithTheNameOfAnAdapter) {
  EXPECT_EQ(MatchAll(Peft("transformer.", Canonical(Targets()[0]), "default.")).matched,
            (Counts{{"transformer", 504}}));
}

TEST(FluxLoraFormats, NativeNamesWithPeftSuffixes) {
  const Outcome outcome = MatchAll(Peft("diffusion_model.", InBlocks(Native())));
  EXPECT_EQ(outcome.matched, (Counts{{"transformer", 304}}));
  EXPECT_EQ(outcome.tensors, (Counts{{"transformer", 494}}));
}

TEST(FluxLoraFormats, PartsOfFusedLayersByNumber) {
  Tensors file;
  for (const Module& m : InBlocks(Native())) {
    const auto parts = FluxNativeKeys()->Resolve(m.name, Transformer());
    for (size_t i = 0; i < parts.size(); ++i) {
      AddKohya(file, absl::StrCat("transformer.", m.name, parts.size() > 1 ? absl::StrCat(".", i) : ""),
               {m.name, parts[i].rows, m.columns});
    }
  }
  const Outcome outcome = MatchAll(file);
  EXPECT_EQ(outcome.matched, (Counts{{"transformer", 494}}));
  EXPECT_EQ(outcome.tensors, outcome.matched);
}

// OneTrainer's OMI: the native names with numbered parts, encoders by what they are.
TEST(FluxLoraFormats, Omi) {
  Tensors file;
  for (const Module& m : Native()) {
    const auto parts = FluxNativeKeys()->Resolve(m.name, Transformer());
    for (size_t i = 0; i < parts.size(); ++i) {
      const std::string name = m.name == "img_in" ? "img_in.proj" : m.name;
      AddKohya(file, absl::StrCat("transformer.", name, parts.size() > 1 ? absl::StrCat(".", i) : ""),
               {m.name, parts[i].rows, m.columns});
    }
  }
  for (const Module& m : Canonical(Targets()[1])) AddKohya(file, "clip_l.text_model." + m.name, m);
  for (const Module& m : Canonical(Targets()[2])) AddKohya(file, "t5." + m.name, m);
  file["bundle_emb.token.clip_l"] = OfShape({4, 768});
  const Outcome outcome = MatchAll(file);
  EXPECT_EQ(outcome.matched, (Counts{{"transformer", 504}, {"text_encoder", 72}, {"text_encoder_2", 168}}));
  EXPECT_EQ(outcome.ignored, 1);
}

TEST(FluxLoraFormats, XlabsProcessors) {
  Tensors file;
  for (int block = 0; block < 19; ++block) {
    for (const char* layer : {"qkv_lora1", "qkv_lora2", "proj_lora1", "proj_lora2"}) {
      const std::string name = absl::StrCat("double_blocks.", block, ".processor.", layer);
      AddPair(file, name + ".down.weight", name + ".up.weight", {name, layer[0] == 'q' ? 9216 : 3072, 3072});
    }
  }
  const Outcome outcome = MatchAll(file);
  EXPECT_EQ(outcome.matched, (Counts{{"transformer", 76}}));
  EXPECT_EQ(outcome.tensors, (Counts{{"transformer", 152}}));
}

TEST(FluxLoraFormats, KohyaOftWithBlocksPerPart) {
  Tensors file;
  for (const Module& m : InBlocks(Native())) {
    const std::string name = "oft_unet_" + Flat(m.name);
    const auto parts = FluxNativeKeys()->Resolve(m.name, Transformer());
    for (size_t i = 0; i < parts.size(); ++i) {
      file[absl::StrCat(name, ".oft_blocks.", i)] = OfShape({4, parts[i].rows / 4, parts[i].rows / 4});
    }
    file[name + ".alpha"] = OfShape({});
  }
  const Outcome outcome = MatchAll(file);
  EXPECT_EQ(outcome.types, (Counts{{"OFT", 304}}));
  EXPECT_EQ(outcome.tensors, (Counts{{"transformer", 494}}));
}

TEST(FluxLoraFormats, LycorisPrefixWithKroneckerFactors) {
  Tensors file;
  for (const Module& m : InBlocks(Canonical(Targets()[0]))) {
    const std::string name = "lycoris_" + Flat(m.name);
    file[name + ".lokr_w1"] = OfShape({16, 16});
    file[name + ".lokr_w2"] = OfShape({m.rows / 16, m.columns / 16});
    file[name + ".alpha"] = OfShape({});
  }
  const Outcome outcome = MatchAll(file);
  EXPECT_EQ(outcome.types, (Counts{{"LoKr", 494}}));
  EXPECT_EQ(outcome.matched, (Counts{{"transformer", 494}}));
}

TEST(FluxLoraFormats, BothSpellingsOfDora) {
  for (const bool onetrainer : {true, false}) {
    Tensors file;
    for (const Module& m : InBlocks(Canonical(Targets()[0]))) {
      if (onetrainer) {
        AddKohya(file, "lora_transformer_" + Flat(m.name), m);
        file["lora_transformer_" + Flat(m.name) + ".dora_scale"] = OfShape({1, m.columns});
      } else {
        const std::string name = "transformer." + m.name;
        AddPair(file, name + ".lora_A.weight", name + ".lora_B.weight", m);
        file[name + ".lora_magnitude_vector"] = OfShape({m.rows});
      }
    }
    file["bundle_emb.token.clip_l"] = OfShape({4, 768});
    const Outcome outcome = MatchAll(file);
    EXPECT_EQ(outcome.types, (Counts{{"LoRA+DoRA", 494}}));
    EXPECT_EQ(outcome.matched, (Counts{{"transformer", 494}}));
    EXPECT_EQ(outcome.ignored, 1);
  }
}

TEST(FluxLoraFormats, AShapeThatDoesNotFitNamesTheLayer) {
  Tensors file = Peft("transformer.", Canonical(Targets()[0]));
  AddPair(file, "transformer.proj_out.lora_A.weight", "transformer.proj_out.lora_B.weight", {"", 65, 3072});
  const auto report = LayerPatcher::Match(**ModelPatch::FromTensors(file), "lora", 1, Targets());
  EXPECT_EQ(report.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(report.status().message()), testing::HasSubstr("transformer.proj_out"));
}

TEST(FluxLoraFormats, ControlLorasGrowTheInputAndSetNorms) {
  Tensors file;
  for (Module m : Native()) {
    if (m.name == "img_in") m.columns *= 2;
    AddPair(file, m.name + ".lora_A.weight", m.name + ".lora_B.weight", m);
    file[m.name + ".lora_B.bias"] = OfShape({m.rows});
  }
  for (const std::string& name : FluxNativeKeys()->NativeModules(Transformer())) {
    if (absl::EndsWith(name, "_norm")) file[name + ".scale"] = OfShape({128});
  }
  const Outcome outcome = MatchAll(file);
  EXPECT_EQ(outcome.types, (Counts{{"LoRA+bias", 314}, {"set scale", 152}}));
  EXPECT_EQ(outcome.grown, (Counts{{"transformer.x_embedder.weight", 128}}));
}

// ------------------------------------------------------------------------------------------ published files

nlohmann::json ReadJson(const std::string& path) {
  std::ifstream in(path);
  return nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
}

TEST(FluxLoraFiles, EveryPublishedKeyListMatchesInFull) {
  const char* folder = std::getenv("LATENTD_LORA_FILES");
  if (folder == nullptr) GTEST_SKIP() << "LATENTD_LORA_FILES names no folder of key lists";
  const nlohmann::json all = ReadJson(absl::StrCat(folder, "/expected.json"));
  ASSERT_TRUE(all.is_object());
  int files = 0;
  for (const auto& [name, expected] : all.items()) {
    if (!absl::StartsWith(name, "flux1_")) continue;
    SCOPED_TRACE(name);
    ++files;
    Tensors file;
    const nlohmann::json listed = ReadJson(absl::StrCat(folder, "/", name, ".json"));
    for (const auto& [key, shape] : listed["tensors"].items()) {
      file[key] = OfShape(shape.get<std::vector<int64_t>>());
    }
    auto component = [](const std::string& of) {
      return of == "unet" ? "transformer" : of == "te1" ? "text_encoder" : "text_encoder_2";
    };
    Counts components, tensors;
    for (const auto& [of, count] : expected["components"].items()) components[component(of)] = count;
    for (const auto& [of, count] : expected["split_layers"].items()) tensors[component(of)] = count;
    const Outcome outcome = MatchAll(file);
    EXPECT_EQ(outcome.layers, expected["layers_in_file"].get<int64_t>());
    EXPECT_EQ(outcome.matched, components);
    EXPECT_EQ(outcome.tensors, tensors);
    EXPECT_EQ(outcome.types, expected["layer_types"].get<Counts>());
    EXPECT_EQ(outcome.ranks, expected["ranks"].get<Counts>());
    EXPECT_EQ(outcome.with_alpha, expected["layers_with_alpha"].get<int64_t>());
    EXPECT_EQ(outcome.ignored, expected["ignored_entries"].get<int64_t>());
  }
  EXPECT_GT(files, 0);
}

}  // namespace
}  // namespace latentd
