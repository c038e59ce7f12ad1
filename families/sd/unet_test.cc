// The full-size models by description alone, and what configs are refused.
#include "families/sd/unet.h"

#include "ATen/ATen.h"
#include "cache/base/error.h"
#include "families/encoders/clip_text_model.h"
#include "families/sd/sd_keys.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

using testing::ElementsAre;

std::vector<int64_t> ShapeOf(const ComponentLayout& layout, const std::string& name) {
  const Slot slot = layout.Find(name);
  return slot ? layout[slot].shape : std::vector<int64_t>{};
}

// Published numbers of parameters.
TEST(FullSizeDescriptions, HaveThePublishedNumberOfParameters) {
  EXPECT_EQ(UNet2DCondition(UNetConfig::Sd15()).layout()->parameter_count(), 859'520'964);
  EXPECT_EQ(UNet2DCondition(UNetConfig::SdxlBase()).layout()->parameter_count(), 2'567'463'684);
  EXPECT_EQ(ClipTextModel(ClipTextConfig::ClipL()).layout()->parameter_count(), 123'060'480);
  EXPECT_EQ(ClipTextModel(ClipTextConfig::ClipG()).layout()->parameter_count(), 694'659'840);
}

TEST(FullSizeDescriptions, HaveTheShapesThatSetTheModelsApart) {
  const UNet2DCondition sd15(UNetConfig::Sd15()), base(UNetConfig::SdxlBase()),
      refiner(UNetConfig::SdxlRefiner());
  EXPECT_THAT(ShapeOf(*sd15.layout(), "down_blocks.0.attentions.0.proj_in.weight"),
              ElementsAre(320, 320, 1, 1));
  EXPECT_THAT(ShapeOf(*sd15.layout(), "up_blocks.3.resnets.2.conv_shortcut.weight"),
              ElementsAre(320, 640, 1, 1));
  EXPECT_THAT(ShapeOf(*base.layout(), "down_blocks.2.attentions.1.transformer_blocks.9.attn2.to_k.weight"),
              ElementsAre(1280, 2048));
  EXPECT_THAT(ShapeOf(*base.layout(), "add_embedding.linear_1.weight"), ElementsAre(1280, 2816));
  EXPECT_THAT(ShapeOf(*refiner.layout(), "mid_block.attentions.0.transformer_blocks.3.attn2.to_v.weight"),
              ElementsAre(1536, 1280));
  EXPECT_THAT(ShapeOf(*refiner.layout(), "add_embedding.linear_1.weight"), ElementsAre(1536, 2560));
  EXPECT_EQ(UNetConfig::SdxlBase().time_ids(1280), 6);
  EXPECT_EQ(UNetConfig::SdxlRefiner().time_ids(1280), 5);
  EXPECT_EQ(UNetConfig::SdxlBase().time_ids(1281), -1);
}

TEST(FullSizeDescriptions, BlocksAreSmallAndInOrderOfUse) {
  const UNet2DCondition base(UNetConfig::SdxlBase());
  std::vector<int64_t> bytes(base.layout()->blocks().size());
  for (const TensorDecl& tensor : base.layout()->tensors()) {
    int64_t n = 4;
    for (int64_t extent : tensor.shape) n *= extent;
    bytes[static_cast<size_t>(tensor.block)] += n;
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_LT(bytes[i], int64_t{200} << 20) << base.layout()->blocks()[i].name;
  }
  EXPECT_EQ(base.layout()->blocks().front().name, "embeddings");
  EXPECT_EQ(base.layout()->blocks()[1].name, "down_blocks.0.resnets.0");
  EXPECT_EQ(base.layout()->blocks().back().name, "output");
}

TEST(LdmNames, OfEveryLayerOfTheFullSizeModels) {
  for (const UNetConfig& config : {UNetConfig::Sd15(), UNetConfig::SdxlBase(), UNetConfig::SdxlRefiner()}) {
    const UNet2DCondition unet(config);
    const KeyMap& map = *LdmUNetKeys(unet);
    size_t weights = 0;
    for (const TensorDecl& tensor : unet.layout()->tensors())
      weights += tensor.name.ends_with(".weight") ? 1 : 0;
    const std::vector<std::string> modules = map.NativeModules(*unet.layout());
    EXPECT_EQ(modules.size(), weights);
    EXPECT_THAT(modules, testing::Each(testing::Not(testing::HasSubstr("down_blocks"))));
  }
}

TEST(LdmNames, OfPublishedCheckpoints) {
  const std::vector<std::tuple<UNetConfig, const char*, const char*>> cases = {
      {UNetConfig::Sd15(), "input_blocks.3.0.op", "down_blocks.0.downsamplers.0.conv"},
      {UNetConfig::Sd15(), "input_blocks.4.0.skip_connection", "down_blocks.1.resnets.0.conv_shortcut"},
      {UNetConfig::Sd15(), "input_blocks.11.0.out_layers.3", "down_blocks.3.resnets.1.conv2"},
      {UNetConfig::Sd15(), "output_blocks.2.1.conv", "up_blocks.0.upsamplers.0.conv"},
      {UNetConfig::Sd15(), "output_blocks.5.2.conv", "up_blocks.1.upsamplers.0.conv"},
      {UNetConfig::Sd15(), "output_blocks.11.1.proj_out", "up_blocks.3.attentions.2.proj_out"},
      {UNetConfig::SdxlBase(), "input_blocks.4.1.transformer_blocks.1.attn2.to_out.0",
       "down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_out.0"},
      {UNetConfig::SdxlBase(), "output_blocks.2.2.conv", "up_blocks.0.upsamplers.0.conv"},
      {UNetConfig::SdxlBase(), "label_emb.0.2", "add_embedding.linear_2"},
      {UNetConfig::SdxlRefiner(), "output_blocks.2.1.conv", "up_blocks.0.upsamplers.0.conv"},
      {UNetConfig::SdxlRefiner(), "middle_block.1.transformer_blocks.3.ff.net.0.proj",
       "mid_block.attentions.0.transformer_blocks.3.ff.net.0.proj"},
  };
  for (const auto& [config, native, canonical] : cases) {
    const UNet2DCondition unet(config);
    const std::vector<KeyPart> parts = LdmUNetKeys(unet)->Resolve(native, *unet.layout());
    ASSERT_EQ(parts.size(), 1u) << native;
    EXPECT_EQ(parts[0].canonical, canonical) << native;
  }
}

}  // namespace
}  // namespace latentd
