// What inpainting was to leave, as it was.
#ifndef LATENTD_FAMILIES_SD_SD_PASTE_H_
#define LATENTD_FAMILIES_SD_SD_PASTE_H_

#include "ATen/core/Tensor.h"
#include "families/generate_params.h"

namespace latentd {

// `picture`, uint8 [H, W, 3] of the request's size, with what the mask leaves from the init image as it was
// scaled: the same bytes where the mask is black; mixed by the mask where that is grey and grey is a value.
// REQUIRES: the request has an init image and a mask, and passed Validate. In host memory; any thread.
at::Tensor PasteBack(const at::Tensor& picture, const GenerateParams& params);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_PASTE_H_
