#include "server/ctl/job.h"

#include <gtest/gtest.h>

#include <string>

namespace latentd::ctl {
namespace {

TEST(CtlJob, VaeTilingIsTheServersWhereItIsNotGiven) {
  const auto tiling = [](const std::string& text) {
    JobOptions options;
    options.vae_tiling = text;
    return Params(options)->vae_tiling();
  };
  EXPECT_EQ(tiling(""), v1::VAE_TILING_UNSPECIFIED);
  EXPECT_EQ(tiling("never"), v1::VAE_TILING_NEVER);
  EXPECT_EQ(tiling("when-needed"), v1::VAE_TILING_WHEN_NEEDED);
  EXPECT_EQ(tiling("always"), v1::VAE_TILING_ALWAYS);
}

}  // namespace
}  // namespace latentd::ctl
