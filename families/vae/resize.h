// Resampling of 8-bit pictures, the way Pillow does it: Lanczos with 3 lobes, widened when shrinking,
// one direction after the other with 8-bit values in between, 22-bit fixed-point weights. Gives the bytes
// of Pillow 13.
//
// Pure; any thread.
#ifndef LATENTD_FAMILIES_VAE_RESIZE_H_
#define LATENTD_FAMILIES_VAE_RESIZE_H_

#include <cstdint>
#include <vector>

namespace latentd {

// `pixels`: [height, width, 3], contiguous. → [new_height, new_width, 3]. REQUIRES: all sizes >= 1.
std::vector<uint8_t> ResizeLanczos(const uint8_t* pixels, int64_t width, int64_t height, int64_t new_width,
                                   int64_t new_height);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_VAE_RESIZE_H_
