// LoRA files of every known format against the full-size FLUX.1, by names and shapes alone.
//
// The formats' rules are generated here. With LATENTD_LORA_FILES naming a folder of key lists of published
// files (NAME.json with "tensors": {name: shape}, and expected.json), those are matched as well.
#include "families/flux/flux_lora.h"

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "families/encoders/clip_text_model.h"
#include "families/encoders/t5_encoder.h"
#include "families/flux/flux_keys.h"
#include "families/flux/flux_transformer.h"
#include "families/lora_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "patcher/layer_patcher.h"

namespace latentd {
namespace {

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

// ------------------------------------------------------------------------------------------ rules of formats

std::vector<Module> Native() {
  std::vector<Module> modules;
  for (const std::string& name : FluxNativeKeys()->NativeModules(Transformer())) {
    const auto parts = FluxNativeKeys()->Resolve(name, Transformer());
    const auto& shape = Transformer()[Transformer().Find(parts[0].canonical + ".weight")].shape;
    if (shape.size() == 2) modules.push_back({name, parts.back().row_begin + parts.back().rows, shape[1]});
  }
  return modules;
}

std::vector<Module> InBlocks(std::vector<Module> modules) {
  std::erase_if(modules, [](const Module& m) { return !absl::StrContains(m.name, "blocks."); });
  return modules;
}

TEST(FluxLoraFormats, KohyaWithBothTextEncoders) {
  for (const char* t5 : {"lora_te3_", "lora_te2_"}) {
    Tensors file;
    for (const Module& m : InBlocks(Native())) AddKohya(file, "lora_unet_" + Flat(m.name), m);
    for (const Module& m : Canonical(Targets()[1])) AddKohya(file, "lora_te1_text_model_" + Flat(m.name), m);
    for (const Module& m : Canonical(Targets()[2])) AddKohya(file, t5 + Flat(m.name), m);
    const Outcome outcome = MatchAll(file, Targets());
    EXPECT_EQ(outcome.layers, 304 + 72 + 168);
    EXPECT_EQ(outcome.matched, (Counts{{"transformer", 304}, {"text_encoder", 72}, {"text_encoder_2", 168}}));
    EXPECT_EQ(outcome.tensors, (Counts{{"transformer", 494}, {"text_encoder", 72}, {"text_encoder_2", 168}}));
    EXPECT_EQ(outcome.with_alpha, outcome.layers);
  }
}

TEST(FluxLoraFormats, PeftUnderEveryPrefix) {
  for (const char* prefix : {"transformer.", "base_model.model.", "base_model.model.transformer.", ""}) {
    const Outcome outcome = MatchAll(Peft(prefix, Canonical(Targets()[0])), Targets());
    EXPECT_EQ(outcome.matched, (Counts{{"transformer", 504}})) << prefix;
    EXPECT_EQ(outcome.tensors, outcome.matched);
    EXPECT_EQ(outcome.with_alpha, 0);
  }
}

TEST(FluxLoraFormats, PeftWithTheNameOfAnAdapter) {
  EXPECT_EQ(MatchAll(Peft("transformer.", Canonical(Targets()[0]), "default."), Targets()).matched,
            (Counts{{"transformer", 504}}));
}

TEST(FluxLoraFormats, NativeNamesWithPeftSuffixes) {
  const Outcome outcome = MatchAll(Peft("diffusion_model.", InBlocks(Native())), Targets());
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
  const Outcome outcome = MatchAll(file, Targets());
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
  const Outcome outcome = MatchAll(file, Targets());
  EXPECT_EQ(outcome.matched, (Counts{{"transformer", 504}, {"text_encoder", 72}, {"text_encoder_2", 168}}));
  EXPECT_EQ(outcome.ignored, 1);
}

// Of X-flux's double blocks, 1 is the image's stream and 2 the text's; a single block's proj takes all that
// linear2 does (15360 numbers), its qkv gives linear1's first rows.
TEST(FluxLoraFormats, XlabsProcessors) {
  Tensors file;
  const auto add = [&](const std::string& name, int64_t rows, int64_t columns) {
    AddPair(file, name + ".down.weight", name + ".up.weight", {name, rows, columns});
  };
  for (int block = 0; block < 19; ++block) {
    for (const char* layer : {"qkv_lora1", "qkv_lora2", "proj_lora1", "proj_lora2"}) {
      add(absl::StrCat("double_blocks.", block, ".processor.", layer), layer[0] == 'q' ? 9216 : 3072, 3072);
    }
  }
  const Outcome doubles = MatchAll(file, Targets());
  EXPECT_EQ(doubles.matched, (Counts{{"transformer", 76}}));
  EXPECT_EQ(doubles.tensors, (Counts{{"transformer", 152}}));
  for (int block = 0; block < 38; ++block) {
    add(absl::StrCat("single_blocks.", block, ".processor.qkv_lora"), 9216, 3072);
    add(absl::StrCat("single_blocks.", block, ".processor.proj_lora"), 3072, 15360);
  }
  const Outcome all = MatchAll(file, Targets());
  EXPECT_EQ(all.matched, (Counts{{"transformer", 76 + 76}}));
  EXPECT_EQ(all.tensors, (Counts{{"transformer", 152 + 38 * 4}}));
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
  const Outcome outcome = MatchAll(file, Targets());
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
  const Outcome outcome = MatchAll(file, Targets());
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
    const Outcome outcome = MatchAll(file, Targets());
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
  const Outcome outcome = MatchAll(file, Targets());
  EXPECT_EQ(outcome.types, (Counts{{"LoRA+bias", 314}, {"set scale", 152}}));
  EXPECT_EQ(outcome.grown, (Counts{{"transformer.x_embedder.weight", 128}}));
}

// ------------------------------------------------------------------------------------------ published files

TEST(FluxLoraFiles, EveryPublishedKeyListMatchesInFull) {
  auto component = [](const std::string& of) {
    return of == "unet" ? "transformer" : of == "te1" ? "text_encoder" : "text_encoder_2";
  };
  CheckPublishedLists("flux1_", Targets(), component, {});
}

}  // namespace
}  // namespace latentd
