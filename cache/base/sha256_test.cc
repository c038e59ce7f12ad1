#include "cache/base/sha256.h"

#include <gtest/gtest.h>

namespace latentd {
namespace {

// FIPS 180-2, appendix B.1.
constexpr char kAbc[] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

TEST(Sha256, OfAWholeText) { EXPECT_EQ(Sha256Hex("abc"), kAbc); }

TEST(Sha256, OfATextInPieces) {
  Sha256 sum;
  sum.Update("a");
  sum.Update("");
  sum.Update("bc");
  EXPECT_EQ(sum.Finish(), kAbc);
}

}  // namespace
}  // namespace latentd
