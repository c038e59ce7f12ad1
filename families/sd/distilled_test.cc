#include "families/sd/distilled.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace latentd {
namespace {

// Names of files as their makers published them, and what their model cards say.
TEST(Distilled, IsToldByTheNamesThatPeopleKnow) {
  struct Case {
    std::string name, variant, sampler;
    int64_t steps;
  };
  for (const Case& c : std::vector<Case>{
           {"sdxl_lightning_4step.safetensors", "lightning", "euler", 4},
           {"sdxl_lightning_8step_unet.safetensors", "lightning", "euler", 8},
           {"juggernautXL_v9Rdphoto2Lightning.safetensors", "lightning", "euler", 4},
           {"RealVisXL_V4.0_Lightning", "lightning", "euler", 4},
           {"sd_xl_turbo_1.0_fp16.safetensors", "turbo", "euler_a", 4},
           {"dreamshaperXL_v21TurboDPMSDE.safetensors", "turbo", "euler_a", 4},
           {"Hyper-SDXL-1step-Unet-Comfyui.fp16.safetensors", "hyper", "", 1},
           {"LCM_Dreamshaper_v7_4k.safetensors", "lcm", "lcm", 4},
           {"dmd2_sdxl_4step_unet_fp16.safetensors", "dmd2", "lcm", 4},
       }) {
    const auto found = DistilledByName(c.name);
    ASSERT_TRUE(found) << c.name;
    EXPECT_EQ(found->variant, c.variant) << c.name;
    EXPECT_EQ(found->sampler, c.sampler) << c.name;
    EXPECT_EQ(found->steps, c.steps) << c.name;
    EXPECT_EQ(found->trailing, c.variant != "lcm" && c.variant != "dmd2") << c.name;
  }
}

TEST(Distilled, IsNotReadIntoOtherNames) {
  for (const char* name :
       {"v1-5-pruned-emaonly.safetensors", "sd_xl_base_1.0.safetensors", "hyperrealism_v3.safetensors",
        "filmcmix.safetensors", "trained_20000steps.safetensors", ""}) {
    EXPECT_FALSE(DistilledByName(name)) << name;
  }
  EXPECT_EQ(DistilledByName("turbo_20000steps")->steps, 4) << "steps of its training";
}

TEST(Distilled, ATitleGoesBeforeAName) {
  EXPECT_EQ(FindDistilled({{"modelspec.title", "SDXL Lightning 8 steps"}}, "/m/turbo.safetensors")->variant,
            "lightning");
  EXPECT_EQ(FindDistilled({{"modelspec.title", "My mix"}}, "/m/turbo.safetensors")->variant, "turbo");
  EXPECT_FALSE(FindDistilled({}, "/turbo/mix.safetensors")) << "folders are not the file's";
}

}  // namespace
}  // namespace latentd
