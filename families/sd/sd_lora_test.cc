// LoRA files of every known format against the full-size SD 1.5 and SDXL, by names and shapes alone.
//
// The formats' rules are generated here. With LATENTD_LORA_FILES naming a folder of key lists of published
// files, those are matched as well.
#include "families/sd/sd_lora.h"

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "families/encoders/clip_text_model.h"
#include "families/lora_test_util.h"
#include "families/sd/sd_keys.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

const std::vector<PatchTarget>& Sd15() {
  static const auto* targets =
      new std::vector<PatchTarget>{UNetTarget(UNet2DCondition(UNetConfig::Sd15())),
                                   ClipLTarget(ClipTextModel(ClipTextConfig::ClipL()).layout())};
  return *targets;
}

const std::vector<PatchTarget>& Sdxl() {
  static const auto* targets =
      new std::vector<PatchTarget>{UNetTarget(UNet2DCondition(UNetConfig::SdxlBase())),
                                   ClipLTarget(ClipTextModel(ClipTextConfig::ClipL()).layout()),
                                   ClipGTarget(ClipTextModel(ClipTextConfig::ClipG()).layout())};
  return *targets;
}

const std::vector<PatchTarget>& Refiner() {
  static const auto* targets =
      new std::vector<PatchTarget>{UNetTarget(UNet2DCondition(UNetConfig::SdxlRefiner())),
                                   ClipGTarget(ClipTextModel(ClipTextConfig::ClipG()).layout())};
  return *targets;
}

// Every layer with a matrix, the convolutions among them.
struct Layer {
  std::string name;
  std::vector<int64_t> shape;
};
std::vector<Layer> Layers(const PatchTarget& target) {
  std::vector<Layer> layers;
  for (const TensorDecl& tensor : target.layout->tensors()) {
    if (tensor.shape.size() < 2 || absl::StrContains(tensor.name, "embeddings.")) continue;
    layers.push_back({tensor.name.substr(0, tensor.name.rfind('.')), tensor.shape});
  }
  return layers;
}

void AddLoCon(Tensors& file, const std::string& name, const Layer& layer, int64_t rank = 8) {
  std::vector<int64_t> down = layer.shape, up = {layer.shape[0], rank};
  down[0] = rank;
  if (down.size() == 4) up.insert(up.end(), {1, 1});
  file[name + ".lora_down.weight"] = OfShape(down);
  file[name + ".lora_up.weight"] = OfShape(up);
  file[name + ".alpha"] = OfShape({});
}

// The name of a layer in the layout of single-file checkpoints.
std::map<std::string, std::string> LdmNames(const UNetConfig& config) {
  const UNet2DCondition unet(config);
  std::map<std::string, std::string> names;
  for (const std::string& native : LdmUNetKeys(unet)->NativeModules(*unet.layout())) {
    names[LdmUNetKeys(unet)->Resolve(native, *unet.layout())[0].canonical] = native;
  }
  return names;
}

int64_t Count(const PatchTarget& target) { return static_cast<int64_t>(Layers(target).size()); }

TEST(SdLoraFormats, KohyaWithEveryConvolutionUnderBothBlockNames) {
  const std::vector<std::pair<UNetConfig, const std::vector<PatchTarget>*>> models = {
      {UNetConfig::Sd15(), &Sd15()},
      {UNetConfig::SdxlBase(), &Sdxl()},
      {UNetConfig::SdxlRefiner(), &Refiner()}};
  for (const auto& [config, targets] : models) {
    const std::map<std::string, std::string> ldm = LdmNames(config);
    for (const bool native : {false, true}) {
      Tensors file;
      Counts expected;
      for (const PatchTarget& target : *targets) {
        const std::string te = target.component == "text_encoder_2" ? "lora_te2_text_model_"
                               : targets->size() == 2               ? "lora_te_text_model_"
                                                                    : "lora_te1_text_model_";
        for (const Layer& layer : Layers(target)) {
          const bool unet = target.component == "unet";
          AddLoCon(file, (unet ? "lora_unet_" : te) + Flat(unet && native ? ldm.at(layer.name) : layer.name),
                   layer);
        }
        expected[target.component] = Count(target);
      }
      EXPECT_EQ(MatchAll(file, *targets).matched, expected) << native;
    }
  }
}

TEST(SdLoraFormats, DiffusersAndPeftUnderEveryPrefix) {
  const std::vector<Module> unet = Canonical(Sdxl()[0]);
  const Counts expected = {{"unet", static_cast<int64_t>(unet.size())}};
  for (const char* prefix : {"unet.", "base_model.model.", "base_model.model.unet.", ""}) {
    EXPECT_EQ(MatchAll(Peft(prefix, unet), Sdxl()).matched, expected) << prefix;
  }
  EXPECT_EQ(MatchAll(Peft("unet.", unet, "default."), Sdxl()).matched, expected);
  Tensors file = Peft("text_encoder.text_model.", Canonical(Sdxl()[1]));
  file.merge(Peft("text_encoder_2.text_model.", Canonical(Sdxl()[2])));
  const auto layers = [](size_t i) { return static_cast<int64_t>(Canonical(Sdxl()[i]).size()); };
  EXPECT_EQ(MatchAll(file, Sdxl()).matched,
            (Counts{{"text_encoder", layers(1)}, {"text_encoder_2", layers(2)}}));
}

TEST(SdLoraFormats, OldDiffusersNames) {
  for (const std::string prefix : {"", "unet."}) {
    Tensors file;
    int64_t attention = 0;
    for (const Module& m : Canonical(Sd15()[0])) {
      const size_t at = m.name.find(".attn");
      if (at == std::string::npos) continue;
      ++attention;
      const std::string layer(absl::StripSuffix(m.name.substr(at + 7), ".0"));
      const std::string name = absl::StrCat(prefix, m.name.substr(0, at + 7), "processor.", layer, "_lora");
      AddPair(file, name + ".down.weight", name + ".up.weight", m);
    }
    EXPECT_EQ(attention, 128);
    EXPECT_EQ(MatchAll(file, Sd15()).matched, (Counts{{"unet", 128}}));
  }
  Tensors file;
  for (const Module& m : Canonical(Sd15()[1])) {
    const std::string name = "text_encoder.text_model." + m.name + ".lora_linear_layer";
    AddPair(file, name + ".down.weight", name + ".up.weight", m);
  }
  EXPECT_EQ(MatchAll(file, Sd15()).matched, (Counts{{"text_encoder", 72}}));
}

TEST(SdLoraFormats, LycorisPrefixes) {
  for (const char* prefix : {"lycoris_", "lycoris_unet_", "oft_unet_"}) {
    Tensors file;
    for (const Layer& layer : Layers(Sdxl()[0])) AddLoCon(file, prefix + Flat(layer.name), layer);
    EXPECT_EQ(MatchAll(file, Sdxl()).matched, (Counts{{"unet", Count(Sdxl()[0])}})) << prefix;
  }
}

TEST(SdLoraFormats, TheEmbeddingsOfABundleAreDropped) {
  Tensors file;
  for (const Module& m : Canonical(Sdxl()[0])) {
    AddKohya(file, "lora_unet_" + Flat(m.name), m);
    file["lora_unet_" + Flat(m.name) + ".dora_scale"] = OfShape({1, m.columns});
  }
  file["bundle_emb.token.clip_l"] = OfShape({4, 768});
  file["bundle_emb.token.clip_g"] = OfShape({4, 1280});
  const Outcome outcome = MatchAll(file, Sdxl());
  EXPECT_EQ(outcome.ignored, 2);
  EXPECT_EQ(outcome.types, (Counts{{"LoRA+DoRA", outcome.layers}}));
}

std::string ComponentOf(const std::string& of) {
  return of == "unet" ? "unet" : of == "te1" ? "text_encoder" : "text_encoder_2";
}

// cloneofsimo's files number their layers and name none.
TEST(SdLoraFiles, EveryPublishedKeyListOfSd15MatchesInFull) {
  CheckPublishedLists("sd15_", Sd15(), ComponentOf, {"sd15_cloneofsimo"});
}
TEST(SdLoraFiles, EveryPublishedKeyListOfSdxlMatchesInFull) {
  CheckPublishedLists("sdxl_", Sdxl(), ComponentOf, {});
}

}  // namespace
}  // namespace latentd
