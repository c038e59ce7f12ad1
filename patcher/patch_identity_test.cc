// Which architecture a file is for, by names and shapes.
//
// With LATENTD_LORA_FILES naming a folder of key lists of published files (NAME.json with "tensors": {name:
// shape}, and expected.json), those are identified as well.
#include "patcher/patch_identity.h"

#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace latentd {
namespace {

using Counts = std::map<std::string, int64_t>;

NamedShapes Pair(const std::string& name, int64_t rows, int64_t columns) {
  return {{name + ".lora_down.weight", {4, columns}}, {name + ".lora_up.weight", {rows, 4}}};
}

TEST(PatchIdentityTest, NamesAndShapesTellTheFamily) {
  const struct {
    const char *family, *layer;
    int64_t rows, columns;
  } cases[] = {
      {"FLUX.1", "lora_unet_double_blocks_0_img_attn_qkv", 9216, 3072},
      {"FLUX.1", "transformer.single_transformer_blocks.0.attn.to_q", 3072, 3072},
      {"FLUX.1", "transformer.transformer_blocks.18.attn.to_q", 3072, 3072},
      {"FLUX.2", "lora_unet_single_blocks_0_linear1", 27648, 3072},
      {"FLUX.2", "diffusion_model.double_blocks.0.img_attn.qkv", 12288, 4096},
      {"FLUX.2", "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj", 27648, 3072},
      {"Qwen-Image", "transformer.transformer_blocks.59.attn.to_q", 3072, 3072},
      {"Qwen-Image", "transformer_blocks.0.img_mod.1", 18432, 3072},
      {"SD3", "transformer.transformer_blocks.0.attn.to_q", 1536, 1536},
      {"SD3", "lora_unet_joint_blocks_0_x_block_attn_qkv", 4608, 1536},
      {"SD3.5", "transformer.transformer_blocks.0.attn.to_q", 2432, 2432},
      {"Z-Image", "lora_unet_layers_0_attention_to_q", 3840, 3840},
      {"Z-Image", "diffusion_model.noise_refiner.0.feed_forward.w1", 10240, 3840},
      {"Anima", "lora_unet_blocks_0_self_attn_q_proj", 2048, 2048},
      {"WAN 2.1", "lora_unet_blocks_0_cross_attn_k_img", 5120, 5120},
      {"WAN 2.1", "transformer.blocks.0.attn1.to_q", 1536, 1536},
      {"WAN 2.2", "diffusion_model.blocks.0.self_attn.q", 5120, 5120},
      {"SD1.5", "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k", 320, 768},
      {"SD2", "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k", 320, 1024},
      {"SDXL", "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k", 640, 2048},
      {"SDXL", "lora_unet_mid_block_attentions_0_transformer_blocks_9_attn1_to_q", 1280, 1280},
      {"SDXL", "lora_unet_input_blocks_4_1_proj_in", 640, 640},
      {"Krea 2", "lora_unet_txtfusion_refiner_blocks_0_attn_wq", 2560, 2560},
      {"", "some.thing.else", 8, 8},
  };
  for (const auto& c : cases) {
    NamedShapes file = Pair(c.layer, c.rows, c.columns);
    if (std::string(c.layer) == "transformer.blocks.0.attn1.to_q")
      file.merge(Pair("transformer.blocks.0.ffn.net.0.proj", 8960, 1536));
    const auto identity = Identify(file);
    ASSERT_TRUE(identity.ok()) << identity.status();
    EXPECT_EQ(identity->family, c.family) << c.layer;
  }
}

TEST(PatchIdentityTest, AFileThatIsRefusedIsStillIdentified) {
  NamedShapes file = {{"unet:0:up", {320, 4}},
                      {"unet:0:down", {4, 768}},
                      {"text_encoder:0:up", {768, 4}},
                      {"text_encoder:0:down", {4, 768}}};
  const auto identity = Identify(file);
  ASSERT_TRUE(identity.ok());
  EXPECT_EQ(identity->family, "SD1.5");
  EXPECT_EQ(identity->components, (Counts{{"denoiser", 1}, {"text_encoder", 1}}));
  EXPECT_FALSE(PatchKeys::Group(file).ok());
}

nlohmann::json ReadJson(const std::string& path) {
  std::ifstream in(path);
  return nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
}

TEST(PatchIdentityTest, EveryPublishedKeyListIsIdentified) {
  const char* folder = std::getenv("LATENTD_LORA_FILES");
  if (folder == nullptr) GTEST_SKIP() << "LATENTD_LORA_FILES names no folder of key lists";
  const nlohmann::json all = ReadJson(absl::StrCat(folder, "/expected.json"));
  ASSERT_TRUE(all.is_object());
  for (const auto& [name, expected] : all.items()) {
    SCOPED_TRACE(name);
    NamedShapes file;
    const nlohmann::json listed = ReadJson(absl::StrCat(folder, "/", name, ".json"));
    for (const auto& [key, shape] : listed["tensors"].items()) file[key] = shape.get<std::vector<int64_t>>();
    const auto identity = Identify(file);
    ASSERT_TRUE(identity.ok()) << identity.status();
    EXPECT_EQ(identity->family, expected["family"].get<std::string>());
    EXPECT_EQ(identity->layers, expected["layers_in_file"].get<int64_t>());
    EXPECT_EQ(identity->layers_with_alpha, expected["layers_with_alpha"].get<int64_t>());
    EXPECT_EQ(identity->ignored, expected["ignored_entries"].get<int64_t>());
    Counts components;
    for (const auto& [of, count] : expected["components"].items()) {
      components[of == "unet"  ? "denoiser"
                 : of == "te1" ? "text_encoder"
                 : of == "te2" ? "text_encoder_2"
                               : "text_encoder_3"] = count;
    }
    EXPECT_EQ(identity->components, components);
    if (name == "sd15_cloneofsimo") continue;  // by index: a type of its own here
    Counts types = identity->layer_types, ranks;
    EXPECT_EQ(types, expected["layer_types"].get<Counts>());
    for (const auto& [rank, count] : identity->ranks) ranks[absl::StrCat(rank)] = count;
    if (expected["ranks"].empty()) continue;  // the lists have those of down/up pairs alone
    EXPECT_EQ(ranks, expected["ranks"].get<Counts>());
  }
}

}  // namespace
}  // namespace latentd
